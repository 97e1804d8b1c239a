"""Continuous batching: what the next step computes. Pure: no I/O, no clock.

A step holds one token of every running decode, and prefill chunks of up to `chunk_tokens` tokens in all,
first come first served: short prompts share a step, a long one takes several. A sequence is in one place:

    submit ──> waiting ──prefill done──> ready ──slot free──> decoding ──> end
                  ^                        └────────┬────────────┘
                  └───────────preempted─────────────┘

Pages come from the pool when they are needed. If it runs dry, the youngest sequence that generates here
gives its pages back and computes them again later; the oldest always gets through. Pages of a sequence in
the running step are released only when that step's result is in.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator

import msgspec

from prfaas.engine.interface import ChunkPlan, EngineLoad, SequenceEvent, SequenceRequest
from prfaas.engine.sequence import Sequence
from prfaas.engine.step import SequenceStep, StepPlan, StepResult
from prfaas.errors import EngineFailure
from prfaas.kv.pool import PagePool
from prfaas.protocol.messages import TokenLogprobs


class PlannedStep(msgspec.Struct, frozen=True):
    """A step to run now, and the prefill chunks in it."""

    plan: StepPlan
    chunks: list[ChunkPlan]


class _Item(msgspec.Struct, frozen=True):
    """One sequence's part of the running step."""

    sequence: Sequence
    end: int
    """KV before this position is valid once the step is done."""
    samples: bool


class BatchScheduler:
    """Plans steps and turns their results into events.

    Drive it as: `submit`/`cancel` at any time; `plan`, run the step, `finish` or `fail_step`, again; drain
    `take_events` after each. At most one step is planned and not finished.

    Args:
        chunk_tokens: most prefill tokens in one step.
        max_running: most sequences decoded together.
        context_length: most tokens of a sequence, prompt and answer together.
        eos_token_ids: tokens that end a sequence unless its sampling says `ignore_eos`.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        chunk_tokens: int,
        max_running: int,
        context_length: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        if chunk_tokens < 1 or max_running < 1:
            raise ValueError(f"chunk_tokens={chunk_tokens} and max_running={max_running} must be positive")
        self._pool = pool
        self._chunk_tokens = chunk_tokens
        self._max_running = max_running
        self._context_length = context_length
        self._eos_token_ids = eos_token_ids
        self._sequences: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []  # prefill to do, oldest first
        self._ready: deque[Sequence] = deque()  # waiting for a decode slot
        self._decoding: list[Sequence] = []  # oldest first
        self._items: list[_Item] | None = None  # of the running step
        self._events: list[SequenceEvent] = []
        self._submitted = 0
        self._steps = 0
        self._prefill_tokens = 0
        self._decode_tokens = 0

    # ------------------------------------------------------------ in and out

    @property
    def idle(self) -> bool:
        """Whether there is no sequence at all."""
        return not self._sequences

    def submit(self, request: SequenceRequest) -> None:
        """Queue a sequence; one that can never run ends at once with `error`.

        Raises:
            ValueError: the request contradicts itself (a caller's fault, not a client's).
        """
        self._validate(request)
        sequence = Sequence(self._submitted, request)
        self._submitted += 1
        self._sequences[sequence.id] = sequence
        problem = self._why_impossible(sequence)
        if problem:
            self._end(sequence, "error", problem)
        elif sequence.prefill_left:
            self._waiting.append(sequence)
        else:
            self._prefill_done(sequence)

    def cancel(self, sequence_id: str, error: str = "") -> None:
        """End a sequence: now, or when the running step is done if it takes part in it.

        Args:
            error: the sequence ends with `error` and this text, instead of `cancelled`.
        """
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return
        ending = ("error", error) if error else ("cancelled", "")
        if any(item.sequence is sequence for item in self._items or ()):
            sequence.ending = sequence.ending or ending
        else:
            self._end(sequence, *ending)

    def end_all(self, reason: str, error: str = "") -> None:
        """End every sequence. Call it only when the runner can write no page any more."""
        self._items = None
        for sequence in list(self._sequences.values()):
            self._end(sequence, reason, error)

    def take_events(self) -> list[SequenceEvent]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def load(self) -> EngineLoad:
        """Queue lengths and running totals; `busy_s_total` is the engine's to fill in."""
        started = sum(s.started for s in self._waiting)
        return EngineLoad(
            waiting=len(self._waiting) - started + len(self._ready),
            running=len(self._decoding) + started,
            waiting_prefill_tokens=sum(s.prefill_left for s in self._waiting),
            running_context_tokens=sum(s.computed for s in self._decoding),
            prefill_tokens_total=self._prefill_tokens,
            decode_tokens_total=self._decode_tokens,
            steps_total=self._steps,
            busy_s_total=0.0,
        )

    # ------------------------------------------------------------ planning

    def plan(self, layers_done: int) -> PlannedStep | None:
        """The next step; None = nothing to do now (call again after `submit` or when pages came back).

        Args:
            layers_done: the layer counter's value now, while no step runs.
        """
        if self._items is not None:
            raise RuntimeError("plan() called before the running step's result is in")
        while True:
            self._fill_decode_slots()
            items = self._decode_items()
            items += self._chunk_items(may_skip=not items and not self._pages_will_return())
            if items:
                return self._planned(items, layers_done)
            if not self._ready and not self._unblock():
                return None

    def _fill_decode_slots(self) -> None:
        while self._ready and len(self._decoding) < self._max_running:
            insort(self._decoding, self._ready.popleft(), key=lambda s: s.order)

    def _decode_items(self) -> list[_Item]:
        # Oldest first: whoever is preempted for pages has not been planned yet.
        return [
            _Item(sequence, sequence.computed + 1, samples=True)
            for sequence in list(self._decoding)
            if sequence in self._decoding and self._make_room(sequence)
        ]

    def _make_room(self, sequence: Sequence) -> bool:
        """Hold the page of the next decode step, taken from the youngest if need be, perhaps this one."""
        while not sequence.grow(self._pool, sequence.computed + 1):
            victim = self._youngest_holder(sequence)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _chunk_items(self, *, may_skip: bool) -> list[_Item]:
        """Prefill chunks in order of arrival; a sequence that lacks pages gets the next ones.

        Args:
            may_skip: let younger prefill-only sequences pass a blocked one (they cannot be preempted for it).
        """
        items: list[_Item] = []
        budget, blocked = self._chunk_tokens, False
        for sequence in list(self._waiting):
            if blocked and sequence.is_preemptible:
                continue
            admitted = not sequence.rematch or self._readmit(sequence)
            end = self._chunk_end(sequence, budget, alone=not items)
            if end == sequence.computed and sequence.prefill_left:
                break  # the budget is spent
            if not (admitted and sequence.grow(self._pool, end)):
                if not may_skip:
                    break
                blocked = True
            elif sequence.prefill_left:
                sequence.started = True
                items.append(_Item(sequence, end, samples=False))
                budget -= end - sequence.computed
            else:
                self._waiting.remove(sequence)
                self._prefill_done(sequence)
        return items

    def _chunk_end(self, sequence: Sequence, budget: int, *, alone: bool) -> int:
        """Where the chunk ends: at the prefill's end, else at a page's end so that the page can be sent."""
        end = sequence.computed + min(budget, sequence.prefill_left)
        if end == sequence.prefill_end:
            return end
        aligned = end - end % self._pool.page_size
        if aligned > sequence.computed:
            return aligned
        return end if alone else sequence.computed

    def _planned(self, items: list[_Item], layers_done: int) -> PlannedStep:
        self._items = items
        self._steps += 1
        steps = [
            SequenceStep(
                token_ids=item.sequence.tokens[item.sequence.computed : item.end],
                start=item.sequence.computed,
                page_ids=item.sequence.page_ids[: -(-item.end // self._pool.page_size)],
                sampling=item.sequence.sampling if item.samples else None,
            )
            for item in items
        ]
        chunks = [
            ChunkPlan(
                sequence_id=item.sequence.id,
                start_token=step.start,
                end_token=item.end,
                layers_done_before=layers_done,
                last=item.end == item.sequence.prefill_end,
                page_ids=step.page_ids,
            )
            for item, step in zip(items, steps, strict=True)
            if not item.samples
        ]
        return PlannedStep(StepPlan(self._steps, steps), chunks)

    # ------------------------------------------------------------ results

    def finish(self, result: StepResult) -> None:
        """Take in the running step's result.

        Raises:
            EngineFailure: the result does not answer the step that was planned.
        """
        items = self._items or []
        sampled = sum(item.samples for item in items)
        if result.step != self._steps or len(result.token_ids) != sampled or len(result.logprobs) != sampled:
            raise EngineFailure(
                f"runner answered step {result.step} with {len(result.token_ids)} tokens, "
                f"expected step {self._steps} with {sampled}"
            )
        self._items = None
        outputs = iter(zip(result.token_ids, result.logprobs, strict=True))
        for item in items:
            self._take_in(item, outputs)

    def fail_step(self, error: str) -> None:
        """The running step failed: its sequences end with `error`, the others go on."""
        items, self._items = self._items or [], None
        for item in items:
            self._end(item.sequence, *(item.sequence.ending or ("error", error)))

    def _take_in(self, item: _Item, outputs: Iterator[tuple[int, TokenLogprobs | None]]) -> None:
        sequence = item.sequence
        output = next(outputs) if item.samples else None
        if output is None:
            self._prefill_tokens += item.end - sequence.computed
        sequence.advance(self._pool, item.end)
        if sequence.ending is not None:
            self._end(sequence, *sequence.ending)
        elif output is not None:
            self._decoded(sequence, *output)
        else:
            self._events.append(SequenceEvent(sequence_id=sequence.id, prefilled_tokens=sequence.computed))
            if not sequence.prefill_left:
                self._waiting.remove(sequence)
                self._prefill_done(sequence)

    def _prefill_done(self, sequence: Sequence) -> None:
        """Everything but the last token has KV: decode, or hand the pages to the host."""
        if sequence.sampling is not None:
            self._ready.append(sequence)
            return
        del self._sequences[sequence.id]
        pages, sequence.page_ids = sequence.page_ids, []
        self._events.append(
            SequenceEvent(
                sequence_id=sequence.id,
                prefilled_tokens=sequence.computed,
                finish_reason="prefilled",
                page_ids=pages,
            )
        )

    def _decoded(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> None:
        sequence.tokens.append(token)
        self._decode_tokens += 1
        reason = self._finish_reason(sequence, token)
        if reason is not None:
            self._forget(sequence)
        self._events.append(
            SequenceEvent(
                sequence_id=sequence.id,
                token_ids=[token],
                logprobs=[] if logprobs is None else [logprobs],
                finish_reason=reason,
            )
        )

    def _finish_reason(self, sequence: Sequence, token: int) -> str | None:
        sampling = sequence.sampling
        assert sampling is not None
        if token in sampling.stop_token_ids or (token in self._eos_token_ids and not sampling.ignore_eos):
            return "stop"
        if sequence.generated >= sampling.max_tokens or len(sequence.tokens) >= self._context_length:
            return "length"
        return None

    # ------------------------------------------------------------ too few pages

    def _youngest_holder(self, least: Sequence) -> Sequence:
        """The youngest sequence whose pages may be taken away; `least` if there is none younger."""
        holders = (s for s in self._sequences.values() if s.is_preemptible and s.page_ids)
        return max((least, *holders), key=lambda s: s.order)

    def _preempt(self, sequence: Sequence) -> None:
        """Take the pages; prompt and generated tokens are computed again when it is its turn."""
        sequence.give_back(self._pool)
        sequence.rematch = True
        if sequence in self._decoding:
            self._decoding.remove(sequence)
        elif sequence in self._ready:
            self._ready.remove(sequence)
        else:
            return  # waiting already
        insort(self._waiting, sequence, key=lambda s: s.order)

    def _readmit(self, sequence: Sequence) -> bool:
        """Let a preempted sequence back in, only with pages up to its next token: it always gets on."""
        sequence.reuse_cache(self._pool)
        if sequence.grow(self._pool, len(sequence.tokens)):
            return True
        self._preempt(sequence)
        return False

    def _pages_will_return(self) -> bool:
        """Whether somebody else holds pages (transfers, the host): those come back by themselves."""
        ours = sum(len(s.page_ids) for s in self._sequences.values())
        return self._pool.total_pins > ours or self._pool.counts().quarantined > 0

    def _unblock(self) -> bool:
        """Nothing can run and nobody else will free pages: take them from the youngest that waits.

        Returns:
            Whether planning again may help; False = wait for pages to come back from outside.
        """
        if not self._waiting or self._pages_will_return():
            return False
        oldest, others = self._waiting[0], [s for s in self._waiting[1:] if s.page_ids]
        # The oldest comes last: it may fit once it uses the published twins of its own pages.
        preemptible = [s for s in (oldest, *others) if s.is_preemptible and s.page_ids]
        if preemptible:
            self._preempt(preemptible[-1])
            return True
        victim = others[-1] if others else oldest
        self._end(
            victim,
            "error",
            f"KV pool exhausted: {len(victim.tokens)} tokens do not fit beside older sequences in "
            f"{self._pool.num_pages} pages of {self._pool.page_size} tokens",
        )
        return True

    # ------------------------------------------------------------ ends

    def _end(self, sequence: Sequence, reason: str, error: str = "") -> None:
        self._forget(sequence)
        self._events.append(SequenceEvent(sequence_id=sequence.id, finish_reason=reason, error=error))

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.id]
        for place in (self._waiting, self._ready, self._decoding):
            if sequence in place:
                place.remove(sequence)
        sequence.give_back(self._pool)

    # ------------------------------------------------------------ validation

    def _validate(self, request: SequenceRequest) -> None:
        computed, prompt = request.computed_tokens, len(request.token_ids)
        if request.sequence_id in self._sequences:
            raise ValueError(f"sequence {request.sequence_id} is running already")
        if not 0 <= computed < prompt:
            raise ValueError(f"{computed} computed tokens of a prompt of {prompt}: the last one is decode's")
        if computed > len(request.page_ids) * self._pool.page_size:
            raise ValueError(f"{computed} computed tokens do not fit {len(request.page_ids)} pages")

    def _why_impossible(self, sequence: Sequence) -> str:
        tokens = sequence.prompt_tokens
        if tokens > self._context_length:
            return f"prompt of {tokens} tokens exceeds the context length of {self._context_length}"
        needs_kv = tokens if sequence.sampling is not None else tokens - 1
        if needs_kv > self._pool.num_pages * self._pool.page_size:
            return f"prompt of {tokens} tokens exceeds the KV pool of {self._pool.num_pages} pages"
        if sequence.sampling is not None and sequence.sampling.max_tokens < 1:
            return f"max_tokens={sequence.sampling.max_tokens} asks for no token"
        return ""

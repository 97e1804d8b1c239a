"""Does the fleet answer as one engine does? Replay every prompt without disaggregation, compare token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from prfaas.engine.interface import Engine, SequenceEvent, SequenceRequest
from prfaas.errors import EngineFailure
from prfaas.protocol.messages import Sampling, TokenLogprobs

NEAR_TIE = 1e-3
"""Two best logits (log probabilities differ by the same amount) this close may swap by rounding alone."""
_CONCURRENT = 8
_REPLAY_TIMEOUT_S = 900.0

Verdict = Literal["same", "near_tie", "different"]


@dataclass(frozen=True, slots=True)
class Greedy:
    """A prompt and its greedy continuation."""

    name: str
    prompt_ids: list[int]
    token_ids: list[int]
    max_tokens: int


@dataclass(slots=True)
class Parity:
    """Counts over requests, and what differed."""

    same: int = 0
    near_tie: int = 0
    different: int = 0
    notes: list[str] = field(default_factory=list)

    def add(self, verdict: Verdict, note: str) -> None:
        setattr(self, verdict, getattr(self, verdict) + 1)
        if verdict != "same":
            self.notes.append(f"{note}: {verdict}")


def judge(answer: Sequence[int], reference: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Verdict:
    """Compare an answer with the reference at the first position where they differ.

    Args:
        logprobs: of the reference, with the two likeliest tokens at each position.
    """
    first = next(
        (i for i, (ours, theirs) in enumerate(zip(answer, reference, strict=False)) if ours != theirs),
        min(len(answer), len(reference)),
    )
    if first == len(answer) == len(reference):
        return "same"
    if first >= len(logprobs):  # the answer goes on where the reference has ended
        return "different"
    best, second = sorted((logprob for _, logprob in logprobs[first].top), reverse=True)[:2]
    return "near_tie" if best - second <= NEAR_TIE else "different"


def without_end(token_ids: Sequence[int], eos_token_ids: Sequence[int]) -> list[int]:
    """`token_ids` without an end-of-sequence token at their end: not every layer passes it on."""
    ended = bool(token_ids) and token_ids[-1] in eos_token_ids
    return list(token_ids[:-1] if ended else token_ids)


async def check_parity(
    engine: Engine,
    answers: Sequence[Greedy],
    eos_token_ids: Sequence[int],
    progress: Callable[[int], None] = lambda done: None,
) -> Parity:
    """Replay `answers` on a started engine, several at once, and count verdicts.

    Raises:
        EngineFailure: the engine failed, or took longer than its deadline.
    """
    parity = Parity()
    waiting = iter(answers)
    done = 0

    async def replay_some() -> None:
        nonlocal done
        for answer in waiting:
            token_ids, logprobs = await replay(engine, answer)
            ours, theirs = (without_end(ids, eos_token_ids) for ids in (answer.token_ids, token_ids))
            parity.add(judge(ours, theirs, logprobs), answer.name)
            done += 1
            progress(done)

    try:
        async with asyncio.timeout(_REPLAY_TIMEOUT_S):
            async with asyncio.TaskGroup() as group:
                for _ in range(_CONCURRENT):
                    group.create_task(replay_some())
    except TimeoutError:
        raise EngineFailure(f"the reference engine took over {_REPLAY_TIMEOUT_S:.0f} s") from None
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return parity


async def replay(engine: Engine, answer: Greedy) -> tuple[list[int], list[TokenLogprobs]]:
    """Greedy continuation of one prompt on `engine`, with the two likeliest tokens at each position.

    Raises:
        EngineFailure: the sequence ended in an error.
    """
    ended: asyncio.Future[SequenceEvent] = asyncio.get_running_loop().create_future()
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []

    def on_event(event: SequenceEvent) -> None:
        token_ids.extend(event.token_ids)
        logprobs.extend(event.logprobs)
        if event.finish_reason is not None and not ended.done():
            ended.set_result(event)

    match = engine.pool.match(answer.prompt_ids, max_tokens=len(answer.prompt_ids) - 1)
    request = SequenceRequest(
        sequence_id=answer.name,
        token_ids=answer.prompt_ids,
        page_ids=list(match.page_ids),
        computed_tokens=match.tokens,
        sampling=Sampling(max_tokens=answer.max_tokens, logprobs=2),
    )
    engine.submit(request, on_event)
    last = await ended
    if last.finish_reason not in ("stop", "length"):
        raise EngineFailure(
            f"the reference engine ended {answer.name} with {last.finish_reason}: {last.error}"
        )
    return token_ids, logprobs

"""A runner without a model: each step takes as long as a profile says, on a scaled clock.

What others can see of a step is real: keys reach the pool layer by layer, the layer counter moves when each
layer is due, tokens come out at the end. Both are functions of tokens and positions alone, so any worker
computes the same for the same prompt, and a page that arrived can be checked against what it must hold.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from prfaas.engine.interface import StepProfile
from prfaas.engine.step import RunnerError, SequenceStep, StepPlan, StepResult
from prfaas.kv.layout import DTYPE_BYTES, KVLayout
from prfaas.kv.shared_buffer import SharedLayerCounter

MARK_BYTES = 8
"""Written per token and layer (fewer where a key of one head is shorter); the rest of a page stays."""
_AT_ONCE_S = 0.005
"""A step that is asked for this soon after the former one's answer follows it without a pause."""
_MOST_LATE_S = 0.1
"""Such a step begins when the former one was *due* to end, so that late timers do not add up; beyond this the
machine is too slow, and that should show."""


def step_seconds(profile: StepProfile, sequences: Sequence[SequenceStep]) -> float:
    """How long a step takes, by the profile.

    Chunks and decodes of one step share its fixed part: the larger of the two bases counts once.
    """
    chunks = [s for s in sequences if s.sampling is None]
    decodes = [s for s in sequences if s.sampling is not None]
    base_s = max(
        profile.prefill_base_s if chunks else 0.0,
        profile.decode_base_s if decodes else 0.0,
    )
    prefill_s = sum(
        len(s.token_ids)
        * (profile.prefill_token_s + (s.start + len(s.token_ids) / 2) * profile.prefill_context_s)
        for s in chunks
    )
    context_tokens = sum(s.start for s in decodes)
    return (
        base_s
        + prefill_s
        + len(decodes) * profile.decode_sequence_s
        + context_tokens * profile.decode_context_s
    )


def token_marks(token_ids: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """64 bits that tell tokens and positions apart (finalizer of SplitMix64); shape as the arguments'."""
    x = (token_ids.astype(np.uint64) << np.uint64(32)) + positions.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return result


def next_tokens(
    last: NDArray[np.int64], positions: NDArray[np.int64], vocab_size: int, never: frozenset[int]
) -> NDArray[np.int64]:
    """The token at each of `positions`: a function of that and of the token before, `last`.

    Tokens of `never` (they end answers) are passed over.
    """
    tokens = (token_marks(last, positions) % np.uint64(vocab_size)).astype(np.int64)
    if never and len(never) < vocab_size:
        while (ending := np.isin(tokens, list(never))).any():
            tokens = np.where(ending, (tokens + 1) % vocab_size, tokens)
    return tokens


class PacedRunner:
    """Sleeps instead of computing; one step at a time.

    Args:
        pool: the KV pool's bytes, `layout.pool_bytes` of them.
        counter: bumped once per layer and step.
        profile: step times in seconds of this process's clock (scaled already).
        vocab_size: tokens come from [0, vocab_size) …
        never: … but for these.
    """

    def __init__(
        self,
        layout: KVLayout,
        pool: NDArray[np.uint8],
        counter: SharedLayerCounter,
        profile: StepProfile,
        *,
        vocab_size: int,
        never: frozenset[int] = frozenset(),
    ) -> None:
        self.lost = asyncio.Event()
        self._layout = layout
        self._counter = counter
        self._profile = profile
        self._vocab_size = vocab_size
        self._never = never
        self._keys = pool_keys(pool, layout)
        self._due_s = self._answered_s = -math.inf

    async def execute(self, plan: StepPlan, deadline_s: float) -> StepResult | RunnerError:
        """Run one step. `deadline_s` is for runners that can hang."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        follows = now_s - self._answered_s < _AT_ONCE_S and now_s - self._due_s < _MOST_LATE_S
        began_s = self._due_s if follows else now_s
        duration_s = step_seconds(self._profile, plan.sequences)
        try:
            pages, slots, marks = self._places(plan.sequences)
        except ValueError as error:
            return RunnerError(step=plan.step, message=str(error))
        layers = self._layout.num_layers
        streamed = any(s.sampling is None for s in plan.sequences)
        for layer in range(layers):
            # Only prompt KV is streamed: a step without any needs no more than one sleep.
            due_s = began_s + duration_s * (layer + 1) / layers if streamed else began_s + duration_s
            if (wait_s := due_s - loop.time()) > 0:
                await asyncio.sleep(wait_s)
            self._write(layer, pages, slots, marks)
            self._counter.increment()
        self._due_s, self._answered_s = began_s + duration_s, loop.time()
        sampled = [s for s in plan.sequences if s.sampling is not None]
        last = np.array([s.token_ids[-1] for s in sampled], dtype=np.int64)
        at = np.array([s.start + len(s.token_ids) for s in sampled], dtype=np.int64)
        return StepResult(
            step=plan.step,
            token_ids=next_tokens(last, at, self._vocab_size, self._never).tolist(),
            logprobs=[None] * len(sampled),
            elapsed_s=loop.time() - now_s,
        )

    async def close(self, *, kill: bool = False) -> None:
        """Let go of the pool."""
        self.lost.set()
        self._keys = self._keys[:0]

    def last_words(self) -> str:
        return ""

    def _places(
        self, sequences: Sequence[SequenceStep]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint64]]:
        """(page, slot in it, mark) of every token of a step.

        Raises:
            ValueError: a token has no page: a wrong one would silently overwrite another sequence.
        """
        page_size = self._layout.page_size
        tokens: list[int] = []
        positions: list[int] = []
        pages: list[int] = []
        for s in sequences:
            end = s.start + len(s.token_ids)
            if not s.token_ids or self._layout.pages_for(end) > len(s.page_ids):
                raise ValueError(f"{len(s.page_ids)} pages do not hold tokens [{s.start}, {end})")
            tokens += s.token_ids
            positions += range(s.start, end)
            for index in range(s.start // page_size, self._layout.pages_for(end)):
                first = max(s.start, index * page_size)
                pages += [s.page_ids[index]] * (min(end, (index + 1) * page_size) - first)
        if pages and not 0 <= min(pages) <= max(pages) < self._layout.num_pages:
            raise ValueError(f"a page id is not within the pool of {self._layout.num_pages}")
        at = np.array(positions, dtype=np.int64)
        return (
            np.array(pages, dtype=np.int64),
            at % page_size,
            token_marks(np.array(tokens, dtype=np.int64), at),
        )

    def _write(
        self, layer: int, pages: NDArray[np.int64], slots: NDArray[np.int64], marks: NDArray[np.uint64]
    ) -> None:
        width = min(MARK_BYTES, self._keys.shape[-1])
        data = (marks + np.uint64(layer)).astype("<u8").view(np.uint8).reshape(-1, MARK_BYTES)
        self._keys[layer, pages, slots, :width] = data[:, :width]


def pool_keys(pool: NDArray[np.uint8], layout: KVLayout) -> NDArray[np.uint8]:
    """Keys of head 0 as bytes, shape [layers, pages, slots, bytes]: a view of the pool."""
    group, bytes_each = layout.group, DTYPE_BYTES[layout.dtype]
    shape = (layout.num_layers, layout.num_pages, 2, group.kv_heads, layout.page_size, -1)
    view: NDArray[np.uint8] = pool[: layout.pool_bytes].reshape(shape)[:, :, 0, 0]
    assert view.shape[-1] == group.head_dim * bytes_each
    return view

"""How long one worker's engine takes: the profile that simulated workers obey.

The router is told `router_profile()`, the linear fit that live calibration would measure, so a table's bends
are prediction errors in the simulator as they are on real machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple, Protocol

from prfaas.engine.interface import StepProfile


class StepLine(NamedTuple):
    """Seconds of a decode step of a fixed batch with C context tokens in all: base_s + C · slope_s."""

    base_s: float
    slope_s: float
    until_context: float
    """Total context tokens up to which the line holds (a table's next knot); infinity = always."""


ANY_NUMBER = 1 << 40


class StepTimes(Protocol):
    """Step times of one kind of worker. Overheads per step and per request are already in them."""

    @property
    def chunk_tokens(self) -> int:
        """Most prompt tokens computed in one step."""
        ...

    @property
    def chunks_ahead(self) -> int:
        """Chunks whose times can be told before the first one begins."""
        ...

    @property
    def request_overhead_s(self) -> float:
        """Once per request before its first chunk is computed: tokenizer, HTTP, engine scheduler."""
        ...

    def prefill_s(self, new_tokens: int, cached_tokens: int) -> float:
        """A whole prompt's chunks on an otherwise idle engine, without `request_overhead_s`."""
        ...

    def chunk_s(self, new_tokens: int, cached_tokens: int) -> float:
        """One chunk (new_tokens ≤ chunk_tokens) after `cached_tokens`, alone in its step."""
        ...

    def decode_line(self, batch: int, context_tokens: float) -> StepLine:
        """Decode steps of `batch` ≥ 1 sequences that hold `context_tokens` in all now."""
        ...

    def shared_base_s(self) -> float:
        """What a step that carries both a chunk and decodes saves against the two alone: its fixed part."""
        ...

    def router_profile(self) -> StepProfile:
        """The linear profile that calibration of such a worker would report."""
        ...


def tokens_read(chunks: float, cached_tokens: float, chunk_tokens: int) -> float:
    """Tokens before each chunk, summed over a prompt's chunks."""
    return chunks * cached_tokens + chunk_tokens * chunks * (chunks - 1) / 2


@dataclass(frozen=True, slots=True)
class LinearStepTimes:
    """Step times as the router's linear profile says, exactly so while `read_s` is 0."""

    profile: StepProfile
    request_overhead_s: float = 0.0
    read_s: float = 0.0
    """Per chunk and token before it."""

    @property
    def chunk_tokens(self) -> int:
        return self.profile.chunk_tokens

    @property
    def chunks_ahead(self) -> int:
        return ANY_NUMBER

    def prefill_s(self, new_tokens: int, cached_tokens: int) -> float:
        p = self.profile
        chunks = -(-new_tokens // p.chunk_tokens)
        per_context = new_tokens * (cached_tokens + new_tokens / 2)
        seconds = (
            chunks * p.prefill_base_s + new_tokens * p.prefill_token_s + per_context * p.prefill_context_s
        )
        if self.read_s:
            seconds += self.read_s * tokens_read(chunks, cached_tokens, p.chunk_tokens)
        return seconds

    def chunk_s(self, new_tokens: int, cached_tokens: int) -> float:
        return self.prefill_s(new_tokens, cached_tokens)

    def decode_line(self, batch: int, context_tokens: float) -> StepLine:
        p = self.profile
        return StepLine(p.decode_base_s + batch * p.decode_sequence_s, p.decode_context_s, inf)

    def shared_base_s(self) -> float:
        return min(self.profile.prefill_base_s, self.profile.decode_base_s)

    def router_profile(self) -> StepProfile:
        return self.profile

"""Prefill times known at a few whole-prompt lengths, as papers publish them; decode is linear."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from prfaas.engine.interface import StepProfile
from simulations.fleet import HardwareSpec
from simulations.hardware.fit import relative_least_squares
from simulations.hardware.step_times import ANY_NUMBER, StepLine


class PointsStepTimes:
    """A prompt of n tokens alone takes T(n): the points joined by lines, the outer lines going on.

    After c cached tokens it takes T(c + n) - T(c) + T(0): the increment, and the fixed part that every chunk
    pays (T(0) is where the first line meets zero tokens). Points are of whole prompts, so `chunk_tokens`
    should be at least the longest prompt; smaller chunks pay T(0) each.
    """

    def __init__(
        self, prefill: list[tuple[float, float]], decode: dict[str, float], spec: HardwareSpec
    ) -> None:
        """`prefill`: (tokens, seconds), rising; `decode`: the three decode fields of a `StepProfile`."""
        self.chunk_tokens = spec.chunk_tokens
        self.chunks_ahead = ANY_NUMBER
        self.request_overhead_s = spec.request_overhead_s
        self._tokens = [tokens for tokens, _ in prefill]
        self._seconds = [seconds * spec.prefill_scale for _, seconds in prefill]
        self._fixed_s = max(self._at(0.0), 0.0) + spec.step_overhead_s
        self._decode_base_s = decode["decode_base_s"] * spec.decode_scale + spec.step_overhead_s
        self._decode_sequence_s = decode["decode_sequence_s"] * spec.decode_scale
        self._decode_context_s = decode["decode_context_s"] * spec.decode_scale

    def _at(self, tokens: float) -> float:
        right = min(max(bisect_right(self._tokens, tokens), 1), len(self._tokens) - 1)
        x0, x1 = self._tokens[right - 1], self._tokens[right]
        y0, y1 = self._seconds[right - 1], self._seconds[right]
        return y0 + (tokens - x0) * (y1 - y0) / (x1 - x0)

    def prefill_s(self, new_tokens: int, cached_tokens: int) -> float:
        chunks = -(-new_tokens // self.chunk_tokens)
        return chunks * self._fixed_s + self._at(cached_tokens + new_tokens) - self._at(cached_tokens)

    def chunk_s(self, new_tokens: int, cached_tokens: int) -> float:
        return self.prefill_s(new_tokens, cached_tokens)

    def decode_line(self, batch: int, context_tokens: float) -> StepLine:
        base_s = self._decode_base_s + batch * self._decode_sequence_s
        return StepLine(base_s, self._decode_context_s, float("inf"))

    def shared_base_s(self) -> float:
        return min(self._fixed_s, self._decode_base_s)

    def router_profile(self) -> StepProfile:
        """Prefill fitted to whole prompts, uncached, between the outer points."""
        length = np.linspace(max(self._tokens[0], 1.0), self._tokens[-1], 64)
        seconds = np.array([self.prefill_s(int(n), 0) for n in length])
        chunks = np.ceil(length / self.chunk_tokens)
        base, token, context = relative_least_squares(
            np.column_stack([chunks, length, length**2 / 2]), np.maximum(seconds, 1e-9)
        )
        return StepProfile(
            chunk_tokens=self.chunk_tokens,
            prefill_base_s=float(base),
            prefill_token_s=float(token),
            prefill_context_s=float(context),
            decode_base_s=self._decode_base_s,
            decode_sequence_s=self._decode_sequence_s,
            decode_context_s=self._decode_context_s,
        )

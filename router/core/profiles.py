"""Step times of a worker: a measured profile, refined by what its prefills and decode steps really took."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque

from prfaas.engine.interface import StepProfile

# A ratio beyond these is a broken measurement or a stopped machine, not a profile.
FACTOR_RANGE = (0.2, 5.0)
SHORTEST_SAMPLE_S = 0.02
"""Prefills predicted shorter than this say more about timers than about the worker."""


class MovingMedian:
    """Median of the last `window` samples: follows a drift within half a window, ignores outliers."""

    def __init__(self, window: int, initial: float) -> None:
        self._window = window
        self._samples: deque[float] = deque()
        self._ordered: list[float] = []
        self.value = initial

    def add(self, sample: float) -> None:
        samples, ordered = self._samples, self._ordered
        samples.append(sample)
        insort(ordered, sample)
        if len(samples) > self._window:
            ordered.remove(samples.popleft())
        half = len(ordered) // 2
        self.value = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2

    def __len__(self) -> int:
        return len(self._samples)


def prefill_seconds(profile: StepProfile, new_tokens: int, cached_tokens: int) -> float:
    """Seconds of chunks that compute `new_tokens` after `cached_tokens`.

    The chunks' attention terms n_i·(c_i + n_i/2) add up to n·(c + n/2), so only the base counts chunks.
    """
    n, c = new_tokens, cached_tokens
    chunks = math.ceil(n / profile.chunk_tokens)
    return (
        chunks * profile.prefill_base_s
        + n * profile.prefill_token_s
        + n * (c + n / 2) * profile.prefill_context_s
    )


def decode_seconds(profile: StepProfile, sequences: float, context_tokens: float) -> float:
    """Seconds of one decode step of `sequences` with `context_tokens` in all; 0 for an empty batch."""
    if sequences <= 0:
        return 0.0
    return (
        profile.decode_base_s
        + sequences * profile.decode_sequence_s
        + context_tokens * profile.decode_context_s
    )


class RefinedProfile:
    """A `StepProfile` and two correction factors (actual ÷ predicted), one for prefill, one for decode."""

    def __init__(self, profile: StepProfile, window: int) -> None:
        self.profile = profile
        self.prefill_factor = 1.0
        self.decode_factor = 1.0
        self._prefill = MovingMedian(window, 1.0)
        self._decode = MovingMedian(window, 1.0)

    def observe_prefill(self, new_tokens: int, cached_tokens: int, mixed_s: float, actual_s: float) -> None:
        """Learn from one prefill of `new_tokens` after `cached_tokens`.

        Args:
            mixed_s: the part of `actual_s` that decodes sharing its steps are held to have taken.
        """
        predicted_s = prefill_seconds(self.profile, new_tokens, cached_tokens)
        if predicted_s >= SHORTEST_SAMPLE_S:
            self._prefill.add(_clamp((actual_s - mixed_s) / predicted_s))
            self.prefill_factor = self._prefill.value

    def observe_decode_step(self, sequences: int, context_tokens: int, actual_s: float) -> None:
        """Learn from a decode step without prefill in it."""
        predicted_s = decode_seconds(self.profile, sequences, context_tokens)
        if predicted_s > 0 and actual_s > 0:
            self._decode.add(_clamp(actual_s / predicted_s))
            self.decode_factor = self._decode.value

    def prefill_s(self, new_tokens: int, cached_tokens: int) -> float:
        return self.prefill_factor * prefill_seconds(self.profile, new_tokens, cached_tokens)

    def decode_s(self, sequences: float, context_tokens: float) -> float:
        return self.decode_factor * decode_seconds(self.profile, sequences, context_tokens)


def _clamp(ratio: float) -> float:
    low, high = FACTOR_RANGE
    return low if ratio < low else high if ratio > high else ratio

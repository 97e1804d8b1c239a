"""Measured rates of a worker, from the engine's running totals."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from prfaas.engine.interface import EngineLoad

WINDOW_S = 30.0


@dataclass(frozen=True, slots=True)
class _Interval:
    at_s: float
    prefill_tokens: int
    decode_tokens: int
    steps: int
    busy_s: float


class RateMeter:
    """Prefill rate and decode step time over the last half minute.

    Intervals that mix prefill and decode say little about either; they count only where no others are.
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._last: EngineLoad | None = None
        self._intervals: deque[_Interval] = deque()

    def sample(self, now_s: float, load: EngineLoad) -> None:
        """Take the totals at `now_s`; call it every heartbeat or so."""
        last, self._last = self._last, load
        if last is not None and load.steps_total > last.steps_total:
            self._intervals.append(
                _Interval(
                    now_s,
                    load.prefill_tokens_total - last.prefill_tokens_total,
                    load.decode_tokens_total - last.decode_tokens_total,
                    load.steps_total - last.steps_total,
                    load.busy_s_total - last.busy_s_total,
                )
            )
        while self._intervals and self._intervals[0].at_s < now_s - self._window_s:
            self._intervals.popleft()

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens computed per busy second; 0 = none lately."""
        used = [i for i in self._intervals if i.prefill_tokens and not i.decode_tokens]
        used = used or [i for i in self._intervals if i.prefill_tokens]
        busy_s = sum(i.busy_s for i in used)
        return sum(i.prefill_tokens for i in used) / busy_s if busy_s > 0 else 0.0

    @property
    def decode_step_s(self) -> float:
        """Mean duration of a decode step; 0 = none lately."""
        used = [i for i in self._intervals if i.decode_tokens and not i.prefill_tokens]
        used = used or [i for i in self._intervals if i.decode_tokens]
        steps = sum(i.steps for i in used)
        return sum(i.busy_s for i in used) / steps if steps else 0.0

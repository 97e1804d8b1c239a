"""Time as an argument: live code reads a `WallClock`, tests and the simulator drive a `VirtualClock`."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic seconds."""

    def now(self) -> float:
        """Monotonic seconds since an arbitrary origin (on Linux: CLOCK_MONOTONIC, shared by processes)."""
        ...


class WallClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance_to(self, at_s: float) -> None:
        """Move to `at_s`.

        Raises:
            ValueError: `at_s` lies in the past; a clock never goes backwards.
        """
        if at_s < self._now_s:
            raise ValueError(f"clock cannot go back from {self._now_s} to {at_s}")
        self._now_s = at_s

"""The virtual clock: a heap of (time, sequence, callback, argument)."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Loop:
    """Runs callbacks in order of time; those of one time in the order in which they were asked for."""

    __slots__ = ("_count", "_heap", "_stopped", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._count = 0
        self._stopped = False

    def at(self, when_s: float, call: Callable[[Any], None], argument: Any = None) -> None:
        """Call `call(argument)` at `when_s`, or now if that is past: the clock never goes back.

        Nothing is ever taken out of the heap. Who may change his mind passes a version as the argument and
        ignores the call when his own has moved on.
        """
        self._count += 1
        heappush(self._heap, (when_s, self._count, call, argument))

    def stop(self) -> None:
        """Run no further callback."""
        self._stopped = True

    def run(self) -> None:
        """Run until nothing is left or `stop` was called."""
        heap = self._heap
        while heap and not self._stopped:
            when_s, _, call, argument = heappop(heap)
            if when_s > self.now_s:
                self.now_s = when_s
            call(argument)

"""Stretches of decode steps with a constant batch, in closed form.

A step of B sequences with C context tokens takes a + c·C. The context grows by B per step, so n steps from
C₀ on take n·(a + c·C₀) + c·B·n(n-1)/2: where the batch stands at any time is one square root away.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from math import sqrt


class Stretch:
    """`count` steps that began at `begin_s`, none of which changes the batch.

    Steps that carry prefill chunks have their ends listed (a few per prompt); others follow the formula,
    as p·k + q·k² with p = a + c·C₀ - c·B/2 and q = c·B/2.
    """

    __slots__ = ("_ends", "_p", "_q", "begin_s", "count")

    def __init__(self, begin_s: float, count: int, p: float, q: float, ends: list[float] | None) -> None:
        self.begin_s = begin_s
        self.count = count
        self._p = p
        self._q = q
        self._ends = ends

    @classmethod
    def decode(cls, begin_s: float, count: int, batch: int, context: float, a: float, c: float) -> Stretch:
        """Pure decode steps, the first one with `context` tokens in all."""
        q = 0.5 * c * batch
        return cls(begin_s, count, a + c * context - q, q, None)

    @classmethod
    def mixed(cls, begin_s: float, ends: list[float]) -> Stretch:
        """Steps that end `ends` seconds after `begin_s`."""
        return cls(begin_s, len(ends), 0.0, 0.0, ends)

    def after_s(self, steps: int) -> float:
        """Seconds that the first `steps` ≥ 1 steps take."""
        return self._ends[steps - 1] if self._ends is not None else steps * (self._p + self._q * steps)

    def done_by(self, now_s: float) -> int:
        """Whole steps over at `now_s`."""
        elapsed_s = now_s - self.begin_s
        if self._ends is not None:
            return bisect_right(self._ends, elapsed_s)
        p, q, count = self._p, self._q, self.count
        steps = min(self._root(elapsed_s), count)
        while steps < count and (steps + 1) * (p + q * (steps + 1)) <= elapsed_s:
            steps += 1
        while steps and steps * (p + q * steps) > elapsed_s:
            steps -= 1
        return steps

    def next_boundary(self, now_s: float) -> int:
        """Number (≥ 1) of the step at whose end, at `now_s` or right after it, the batch may change."""
        elapsed_s = now_s - self.begin_s
        if self._ends is not None:
            return min(bisect_left(self._ends, elapsed_s), self.count - 1) + 1
        p, q, count = self._p, self._q, self.count
        steps = min(max(self._root(elapsed_s), 1), count)
        while steps < count and steps * (p + q * steps) < elapsed_s:
            steps += 1
        while steps > 1 and (steps - 1) * (p + q * (steps - 1)) >= elapsed_s:
            steps -= 1
        return steps

    def _root(self, elapsed_s: float) -> int:
        """About how many steps `elapsed_s` holds: rounding may make it one too many or too few."""
        p, q = self._p, self._q
        if elapsed_s <= 0:
            return 0
        # The stable form of (-p + √(p² + 4q·t)) / 2q; right for q = 0 too.
        return int(2 * elapsed_s / (p + sqrt(p * p + 4 * q * elapsed_s)))

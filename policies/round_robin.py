"""Every feasible placement in turn, whatever it costs: the baseline that others must beat."""

from __future__ import annotations

import numpy as np

from policies.base import BasePolicy
from policies.types import Candidates, FleetView, RequestView


class RoundRobin(BasePolicy):
    """Takes the candidate (decode worker, prefill site) that has waited longest for its turn."""

    def __init__(self) -> None:
        self._turn = 0
        self._last_turn: dict[tuple[str, str], int] = {}
        self._names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self._pairs: list[tuple[str, str]] = []
        self._turns = np.zeros(0, dtype=np.int64)
        """Of `_pairs`, which are those of `_names`: mostly the same ones again for the next request."""

    def choose(
        self, request: RequestView, candidates: Candidates, view: FleetView, rng: np.random.Generator
    ) -> int:
        if candidates.decode is not self._names[0] or candidates.site is not self._names[1]:
            self._names = (candidates.decode, candidates.site)
            self._pairs = list(zip(candidates.decode, candidates.site, strict=True))
            self._turns = np.array([self._last_turn.get(pair, 0) for pair in self._pairs])
        chosen = int(self._turns.argmin())
        self._turn += 1
        self._turns[chosen] = self._last_turn[self._pairs[chosen]] = self._turn
        return chosen

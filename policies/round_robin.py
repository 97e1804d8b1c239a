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

    def choose(
        self, request: RequestView, candidates: Candidates, view: FleetView, rng: np.random.Generator
    ) -> int:
        pairs = list(zip(candidates.decode, candidates.site, strict=True))
        chosen = min(range(len(pairs)), key=lambda index: self._last_turn.get(pairs[index], 0))
        self._turn += 1
        self._last_turn[pairs[chosen]] = self._turn
        return chosen

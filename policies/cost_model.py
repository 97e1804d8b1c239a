"""The default: least cost in seconds, a request's own delay plus the delay it imposes on others."""

from __future__ import annotations

import numpy as np

from policies.base import BasePolicy, least
from policies.types import Candidates, FleetView, RequestView


class CostModel(BasePolicy):
    """argmin of ttft_s + interference_weight · interference_s + externality_weight · externality_s.

    Args:
        interference_weight: worth of a second of delay to running decodes against one of own TTFT.
        externality_weight: worth of a second of delay to requests still to come; 0 = greedy TTFT.

    Raises:
        ValueError: a weight is negative.
    """

    takes_cheapest = True

    def __init__(self, interference_weight: float = 1.0, externality_weight: float = 1.0) -> None:
        if interference_weight < 0 or externality_weight < 0:
            raise ValueError("interference_weight and externality_weight must be 0 or more")
        self._interference = interference_weight
        self._externality = externality_weight

    def choose(
        self, request: RequestView, candidates: Candidates, view: FleetView, rng: np.random.Generator
    ) -> int:
        if self._interference == 1 and self._externality == 1:
            return least(candidates.cost_s, candidates, view, rng)
        cost_s = (
            candidates.ttft_s
            + self._interference * candidates.interference_s
            + self._externality * candidates.externality_s
        )
        return least(cost_s, candidates, view, rng)

"""A policy that repeats what a live router chose: then only times can differ, not placements."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from policies.base import BasePolicy, least
from policies.types import Candidates, FleetView, RequestView


class RecordedPolicy(BasePolicy):
    """Chooses the recorded (decode worker, prefill site) of each request.

    Where that pair is no candidate (its worker is full or gone in the simulation), the least cost decides and
    `missed` counts it.

    Args:
        choices: by request id.
    """

    def __init__(self, choices: Mapping[str, tuple[str, str]]) -> None:
        self._choices = choices
        self.missed = 0

    def choose(
        self, request: RequestView, candidates: Candidates, view: FleetView, rng: np.random.Generator
    ) -> int:
        wanted = self._choices.get(request.request_id)
        pairs = zip(candidates.decode, candidates.site, strict=True)
        for row, pair in enumerate(pairs):
            if pair == wanted:
                return row
        self.missed += 1
        return least(candidates.cost_s, candidates, view, rng)

"""A policy during whose choices Ctrl-C is pressed, once enough requests have been placed."""

from __future__ import annotations

import signal

import numpy as np

from policies.base import BasePolicy
from policies.types import Candidates, FleetView, RequestView


class Interrupting(BasePolicy):
    """Takes the least cost; presses Ctrl-C at request number `after`."""

    def __init__(self, after: int) -> None:
        self._left = after

    def choose(
        self, request: RequestView, candidates: Candidates, view: FleetView, rng: np.random.Generator
    ) -> int:
        self._left -= 1
        if self._left == 0:
            signal.raise_signal(signal.SIGINT)
        return int(np.argmin(candidates.cost_s))

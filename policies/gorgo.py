"""Whole requests to the replica that answers first, network included."""

from __future__ import annotations

import numpy as np

from policies.base import BasePolicy, least
from policies.pairing import Where
from policies.types import Candidates, FleetView, RequestView


class Gorgo(BasePolicy):
    """One worker does all of a request: least queue + prefill of what it has not cached + network latency.

    GORGO (arXiv 2602.11688) balances replicas of whole models across regions. So only decode workers that
    prefill for themselves are considered, and prefill workers stay idle. Of the network latency only what
    the router has measured of it is known: the overhead of this path, the same for all replicas.

    Args:
        queue_weight: worth of a second in the queue.
        prefill_weight: worth of a second of prefill.
        network_weight: worth of a second of network and other overhead.

    Raises:
        ValueError: a weight is negative.
    """

    def __init__(
        self, queue_weight: float = 1.0, prefill_weight: float = 1.0, network_weight: float = 1.0
    ) -> None:
        if min(queue_weight, prefill_weight, network_weight) < 0:
            raise ValueError("queue_weight, prefill_weight and network_weight must be 0 or more")
        self._local = Where("local")
        self._queue, self._prefill, self._network = queue_weight, prefill_weight, network_weight

    def choose(
        self, request: RequestView, candidates: Candidates, view: FleetView, rng: np.random.Generator
    ) -> int:
        wait_s = np.maximum(candidates.start_s, candidates.slot_s)
        cost_s = (
            self._queue * wait_s
            + self._prefill * candidates.prefill_s
            + self._network * candidates.overhead_s
        )
        return least(cost_s, candidates, view, rng, self._local.rows(candidates))

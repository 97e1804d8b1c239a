"""What restricts a request to some pairs, and why none can take it when none can."""

from __future__ import annotations

import numpy as np

from policies.types import Bools, Floats
from router.core import tables as t
from router.core.decision import NoCapacity
from router.core.events import PlaceRequest
from router.core.topology import Topology
from router.core.weigh import PAIR_UNAVAILABLE, SITE, TOO_LONG

NO_WORKER_RETRY_S = 2.0
_ALL: Bools = np.zeros(0, dtype=np.bool_)


def avoided(request: PlaceRequest, topology: Topology) -> Bools:
    """Pairs of which a member is to be avoided, shape [pairs]; empty where the request avoids none."""
    if not request.avoid:
        return _ALL
    names = set(request.avoid)
    pairs = zip(topology.decode, topology.site, strict=True)
    return np.array([d in names or s in names for d, s in pairs], dtype=np.bool_)


def wanted(request: PlaceRequest, topology: Topology) -> Bools:
    """Where the pair is the one asked for, shape [pairs]; empty where the request asks for none."""
    if request.pair is None:
        return _ALL
    pairs = zip(topology.decode, topology.site, strict=True)
    return np.array([pair == request.pair for pair in pairs], dtype=np.bool_)


def no_worker() -> NoCapacity:
    return NoCapacity("no_decode_worker", NO_WORKER_RETRY_S, "no decode worker is ready")


def refusal(why: int, request: PlaceRequest, topology: Topology, workers: Floats) -> NoCapacity:
    """The error for an answer of `weigh` that is no number of pairs."""
    if why == TOO_LONG:
        message = f"{request.prompt_tokens} prompt tokens fit no worker's KV pool"
        return NoCapacity("prompt_too_long", 0.0, message)
    if why == PAIR_UNAVAILABLE:
        return NoCapacity("pair_unavailable", 1.0, f"{request.pair} cannot take the request now")
    free_at_s = float(workers[t.FREE_AT].take(topology.pairs[SITE]).min())
    return NoCapacity(
        "queues_full", max(1.0, free_at_s - request.now_s), "every worker that fits has a full queue"
    )

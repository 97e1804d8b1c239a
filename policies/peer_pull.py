"""Follow a prefix only where it is enough longer than what the least loaded worker has."""

from __future__ import annotations

import numpy as np

from policies.base import BasePolicy
from policies.pairing import Where, decode_occupancy, site_requests, site_then_decode
from policies.types import Candidates, FleetView, RequestView


class PeerPull(BasePolicy):
    """The worker that holds so much more of the prompt than the least loaded one, else the least loaded.

    llm-d's peer-to-peer KV pulls (llm-d-router, 2026) send the request to the least loaded worker and let it
    *pull* the prefix from the peer that holds that much more. Workers cannot fetch from each other here,
    so the request goes to the holder itself, and waits in its queue. Decode is where most KV is free.

    The delta is theirs in meaning: from how many tokens on moving beats recomputing, as measured on the
    fleet at hand.

    Args:
        min_cached_token_delta: tokens. The default is about where pulls begin to pay in llm-d's own figures.
        where: sites considered (`policies.pairing.Where`).

    Raises:
        ValueError: the delta is not positive, or `where` is another word.
    """

    def __init__(self, min_cached_token_delta: int = 2048, where: str = "prefill") -> None:
        if min_cached_token_delta < 1:
            raise ValueError(f"min_cached_token_delta must be 1 or more, is {min_cached_token_delta}")
        self._delta = min_cached_token_delta
        self._where = Where(where)

    def choose(
        self, request: RequestView, candidates: Candidates, view: FleetView, rng: np.random.Generator
    ) -> int:
        rows = self._where.rows(candidates)
        load = site_requests(candidates, view)
        cached = candidates.site_cached_tokens
        idlest = rows[load[rows] == load[rows].min()]
        delta = cached[rows].max() - cached[idlest].max()
        if delta >= self._delta:
            rows = rows[cached[rows] == cached[rows].max()]
        else:
            rows = idlest[cached[idlest] == cached[idlest].max()]
        return site_then_decode(load, decode_occupancy(candidates, view), candidates, view, rng, rows)

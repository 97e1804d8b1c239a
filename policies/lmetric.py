"""Two indicators multiplied: nothing to tune."""

from __future__ import annotations

import numpy as np

from policies.base import BasePolicy, gather, least
from policies.pairing import Where, decode_requests
from policies.types import Candidates, FleetView, RequestView


class LMetric(BasePolicy):
    """Least (prefill tokens ahead and new, if placed there) x (decode batch, if placed there).

    LMetric (OSDI '26, arXiv 2603.15202), made for workers that do both phases. With separate prefill, the
    tokens are the prefill site's and the batch is the decode worker's. The batch counts this request, so
    that an idle worker's score still tells a cached prefix from none, and those whose KV is on its way. The
    link is not looked at.

    Args:
        where: sites considered (`policies.pairing.Where`).
    """

    def __init__(self, where: str = "all") -> None:
        self._where = Where(where)

    def choose(
        self, request: RequestView, candidates: Candidates, view: FleetView, rng: np.random.Generator
    ) -> int:
        tokens = gather(view.queued_tokens, candidates.site) + candidates.uncached_tokens
        batch = decode_requests(candidates, view) + 1
        return least(tokens * batch, candidates, view, rng, self._where.rows(candidates))

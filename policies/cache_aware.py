"""The prefix while the load is even, the load when it is not."""

from __future__ import annotations

import numpy as np

from policies.base import BasePolicy, gather
from policies.pairing import Where, decode_requests, site_requests, site_then_decode
from policies.types import Candidates, FleetView, Floats, Ints, RequestView


class CacheAware(BasePolicy):
    """SGLang's `cache_aware`: the site that holds most of the prompt, unless the fleet is out of balance.

    Out of balance: the most loaded site has over `balance_abs_threshold` requests more than the least
    loaded, and over `balance_rel_threshold` times as many; then the least loaded gets the request. In
    balance: the longest cached prefix wins where it covers over `cache_threshold` of the prompt;
    otherwise the site with the largest free part of its cache. Of decode workers, that with fewest requests.

    Theirs guesses caches from what it sent where; this knows them from the workers' events.

    Args:
        cache_threshold: least share of the prompt that makes a prefix worth following.
        balance_abs_threshold: requests.
        balance_rel_threshold: ratio.
        where: sites considered (`policies.pairing.Where`).

    Raises:
        ValueError: a number is out of range, or `where` is another word.
    """

    def __init__(
        self,
        cache_threshold: float = 0.3,
        balance_abs_threshold: int = 64,
        balance_rel_threshold: float = 1.5,
        where: str = "prefill",
    ) -> None:
        if not 0 <= cache_threshold <= 1:
            raise ValueError(f"cache_threshold must be within 0 and 1, is {cache_threshold}")
        if balance_abs_threshold < 0 or balance_rel_threshold < 1:
            raise ValueError("balance_abs_threshold must be 0 or more, balance_rel_threshold 1 or more")
        self._cache = cache_threshold
        self._abs, self._rel = balance_abs_threshold, balance_rel_threshold
        self._where = Where(where)

    def choose(
        self, request: RequestView, candidates: Candidates, view: FleetView, rng: np.random.Generator
    ) -> int:
        rows = self._where.rows(candidates)
        load = site_requests(candidates, view)
        most, least = load[rows].max(), load[rows].min()
        if most - least > self._abs and most > self._rel * least:
            value = load
        else:
            value = self._by_cache(request, candidates, view, rows)
        return site_then_decode(value, decode_requests(candidates, view), candidates, view, rng, rows)

    def _by_cache(self, request: RequestView, candidates: Candidates, view: FleetView, rows: Ints) -> Floats:
        cached = candidates.site_cached_tokens
        if cached[rows].max() > self._cache * request.prompt_tokens:
            return -cached.astype(np.float64)
        return -gather(view.free_pages, candidates.site) / gather(view.total_pages, candidates.site)

"""Routers that first choose a decode worker, and then whether it prefills by itself."""

from __future__ import annotations

import numpy as np

from policies.base import BasePolicy, gather, least, pick
from policies.dynamo_kv import DynamoKV
from policies.pairing import Where, same, site_requests
from policies.types import Candidates, FleetView, Floats, Ints, PlacementKind, RequestView


class IslOrLoad(BasePolicy):
    """Dynamo's conditional disaggregation: prompts that are short and mostly cached prefill on their decode
    worker, and any do while the prefill worker is busy.

    The decode worker has the least KV cost (`policies.dynamo_kv`). It prefills by itself when it lacks
    fewer than `threshold_tokens` **and** less than `ratio` of the prompt (Dynamo's `isl_bounding`), **or**
    when the prefill worker that would be chosen has over `prefill_busy_tokens` queued (its `prefill_load`);
    together its `isl_or_load`. Unless the decode worker itself is too full.

    Dynamo counts the busy threshold in batches of the prefill worker, and its default changed between
    releases (and may be unset); here it is in tokens, four batches of 8,192.

    Args:
        threshold_tokens: of uncached prompt at the decode worker.
        ratio: uncached share of the prompt.
        prefill_busy_tokens: queued at the prefill worker; None = never busy (`isl_bounding` alone).
        decode_busy_share: of its KV pages in use, from which on a decode worker prefills nothing; 1 = off.
        where: prefill workers considered (`policies.pairing.Where`).

    Raises:
        ValueError: a number is out of range, or `where` is another word.
    """

    def __init__(
        self,
        threshold_tokens: int = 2048,
        ratio: float = 0.7,
        prefill_busy_tokens: int | None = 32_768,
        decode_busy_share: float = 1.0,
        where: str = "prefill",
    ) -> None:
        if threshold_tokens < 0 or not 0 <= ratio <= 1 or not 0 <= decode_busy_share <= 1:
            raise ValueError("threshold_tokens must be 0 or more, ratio and decode_busy_share within 0 and 1")
        self._tokens, self._ratio, self._full = threshold_tokens, ratio, decode_busy_share
        self._busy = np.inf if prefill_busy_tokens is None else prefill_busy_tokens
        self._where, self._local = Where(where), Where("local")
        self._cost = DynamoKV()

    def choose(
        self, request: RequestView, candidates: Candidates, view: FleetView, rng: np.random.Generator
    ) -> int:
        cost = self._cost.cost(request, candidates, view)
        own = least(cost, candidates, view, rng, self._local.rows(candidates))
        rows = _prefill_rows(candidates, view, self._where, own)
        if not len(rows):
            return own
        away = least(cost, candidates, view, rng, rows)
        uncached = int(candidates.uncached_tokens[own])
        little = uncached < self._tokens and uncached < self._ratio * request.prompt_tokens
        busy = view.queued_tokens[candidates.site[away]] > self._busy
        return own if (little or busy) and not self._decode_full(candidates.decode[own], view) else away

    def _decode_full(self, decode: str, view: FleetView) -> bool:
        if self._full == 1:
            return False
        return 1 - view.free_pages[decode] / view.total_pages[decode] > self._full


class PrefixThreshold(BasePolicy):
    """llm-d's `prefix-based-pd-decider`: from so many uncached tokens on, another worker prefills.

    The decode worker has the highest score of prefix held (weight 2), short queue and free KV (1 each), as
    in llm-d's usual profiles; so has the prefill worker. vllm-project/router's open proposal of the same
    rule has 256 tokens.

    Args:
        non_cached_tokens: at the decode worker.
        prefix_weight: weight of the prefix in both scores.
        where: prefill workers considered (`policies.pairing.Where`).

    Raises:
        ValueError: a number is negative, or `where` is another word.
    """

    def __init__(
        self, non_cached_tokens: int = 512, prefix_weight: float = 2.0, where: str = "prefill"
    ) -> None:
        if non_cached_tokens < 0 or prefix_weight < 0:
            raise ValueError("non_cached_tokens and prefix_weight must be 0 or more")
        self._tokens, self._prefix = non_cached_tokens, prefix_weight
        self._where, self._local = Where(where), Where("local")

    def choose(
        self, request: RequestView, candidates: Candidates, view: FleetView, rng: np.random.Generator
    ) -> int:
        sites = candidates.site
        free = gather(view.free_pages, sites) / gather(view.total_pages, sites)
        score = self._prefix / request.prompt_tokens * candidates.site_cached_tokens + free
        load = site_requests(candidates, view)
        rows = self._local.rows(candidates)
        own = pick(rows, rng, _spread(load, rows) - score)
        rows = _prefill_rows(candidates, view, self._where, own)
        if candidates.uncached_tokens[own] < self._tokens or not len(rows):
            return own
        return pick(rows, rng, _spread(load, rows) - score)


def _prefill_rows(candidates: Candidates, view: FleetView, where: Where, own: int) -> Ints:
    """Rows in which another worker prefills for the decode worker of row `own`; none where it is alone."""
    rows = same(gather(view.number, candidates.decode), where.rows(candidates), own)
    away: Ints = rows[candidates.kind[rows] >= PlacementKind.POOL]
    return away


def _spread(values: Floats, rows: Ints) -> Floats:
    """`values`, 0 for the least of `rows` and 1 for the most."""
    least, most = float(values[rows].min()), float(values[rows].max())
    spread: Floats = (values - least) / max(most - least, 1e-9)
    return spread

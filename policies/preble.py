"""Exploit a cached prefix, or explore for the least load."""

from __future__ import annotations

import numpy as np

from policies.base import BasePolicy, gather
from policies.pairing import Where, decode_occupancy, site_then_decode
from policies.types import Candidates, FleetView, Floats, RequestView


class Preble(BasePolicy):
    """Preble's E2 (arXiv 2407.00023): more tokens cached somewhere than new → exploit, else explore.

    Exploit: the site with the longest cached prefix, of equal ones the least loaded; unless its load is
    over `balance_threshold` times the least, which then gets the request (its load rebalancing). Explore:
    the site with the least load + prefill of this request. Load is in seconds: prefill queued, and the
    decode steps of the batch running there. Where prefill is separate, decode is where most KV is free.

    The cost of what an insertion evicts is left out: the router does not know what a worker would evict. Nor
    are hot prefixes copied. The window of past load is the live queue instead.

    Args:
        exploit_share: least cached share of the prompt that is exploited.
        balance_threshold: ratio.
        where: sites considered (`policies.pairing.Where`).

    Raises:
        ValueError: a number is out of range, or `where` is another word.
    """

    def __init__(
        self, exploit_share: float = 0.5, balance_threshold: float = 2.0, where: str = "prefill"
    ) -> None:
        if not 0 <= exploit_share <= 1 or balance_threshold < 1:
            raise ValueError("exploit_share must be within 0 and 1, balance_threshold 1 or more")
        self._share, self._balance = exploit_share, balance_threshold
        self._where = Where(where)

    def choose(
        self, request: RequestView, candidates: Candidates, view: FleetView, rng: np.random.Generator
    ) -> int:
        rows = self._where.rows(candidates)
        load_s = _load_s(candidates, view)
        cached = candidates.site_cached_tokens
        longest = cached[rows].max()
        value = load_s + candidates.prefill_s
        if longest > self._share * request.prompt_tokens:
            holders = rows[cached[rows] == longest]
            # One prefill more than the least loaded is no imbalance, however idle that is.
            bound_s = self._balance * load_s[rows].min() + candidates.prefill_s[rows].max()
            if load_s[holders].min() <= bound_s:
                rows, value = holders, load_s
        return site_then_decode(value, decode_occupancy(candidates, view), candidates, view, rng, rows)


def _load_s(candidates: Candidates, view: FleetView) -> Floats:
    """Seconds until the site is through with its prefills, and of one step of what it decodes."""
    queue_s = np.maximum(gather(view.prefill_ends_s, candidates.site) - view.now_s, 0.0)
    running = gather(view.running, candidates.site)
    step_s = (
        gather(view.decode_base_s, candidates.site)
        + running * gather(view.decode_sequence_s, candidates.site)
        + gather(view.running_context_tokens, candidates.site)
        * gather(view.decode_context_s, candidates.site)
    )
    load_s: Floats = queue_s + np.where(running > 0, step_s * running, 0.0)
    return load_s

"""The paper's rule (arXiv 2604.15039): long uncached prompts go to the other cluster, the rest stay."""

from __future__ import annotations

import numpy as np

from policies.base import BasePolicy, least
from policies.types import REFUSE, Candidates, FleetView, PlacementKind, RequestView


class Threshold(BasePolicy):
    """Uncached length at home ≤ `tokens`: stay in the PD cluster, on the prefill pool where there is one,
    on the decode worker otherwise. Longer: prefill remotely. The least predicted TTFT within the group.

    The uncached length is prompt tokens minus the longest prefix cached in the PD cluster (the paper's
    rule under scarce bandwidth, each cluster's cache judged alone).

    Args:
        tokens: the threshold t. The paper's case study finds 19,400 for its hardware; a fleet's own
            depends on its speeds and its link.
        without_remote: what a long request gets where no remote site is feasible: `refuse`, or `stay`.

    Raises:
        ValueError: `tokens` is negative or `without_remote` is another word.
    """

    def __init__(self, tokens: int = 19_400, without_remote: str = "refuse") -> None:
        if tokens < 0:
            raise ValueError(f"tokens must be 0 or more, is {tokens}")
        if without_remote not in ("refuse", "stay"):
            raise ValueError(f"without_remote must be `refuse` or `stay`, is `{without_remote}`")
        self._tokens = tokens
        self._stay_without_remote = without_remote == "stay"

    def choose(
        self, request: RequestView, candidates: Candidates, view: FleetView, rng: np.random.Generator
    ) -> int:
        remote = candidates.kind == PlacementKind.REMOTE
        home = np.flatnonzero(~remote)
        uncached = candidates.uncached_tokens[home].min(initial=request.prompt_tokens)
        rows = np.flatnonzero(remote) if uncached > self._tokens else self._home_group(candidates)
        if not len(rows) and (uncached <= self._tokens or self._stay_without_remote):
            rows = home
        if not len(rows):
            return REFUSE
        return least(candidates.ttft_s, candidates, view, rng, rows)

    @staticmethod
    def _home_group(candidates: Candidates) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        pool = np.flatnonzero(candidates.kind == PlacementKind.POOL)
        return pool if len(pool) else np.flatnonzero(candidates.kind < PlacementKind.POOL)

"""Policies that promise one place, for comparison and for deployments that want just that."""

from __future__ import annotations

import numpy as np

from policies.base import BasePolicy, least
from policies.types import REFUSE, Candidates, FleetView, PlacementKind, RequestView


class AlwaysLocal(BasePolicy):
    """Prefill on the decode worker with the least predicted TTFT."""

    def choose(
        self, request: RequestView, candidates: Candidates, view: FleetView, rng: np.random.Generator
    ) -> int:
        rows = np.flatnonzero(candidates.kind < PlacementKind.POOL)
        return least(candidates.ttft_s, candidates, view, rng, rows) if len(rows) else REFUSE


class AlwaysRemote(BasePolicy):
    """Prefill in another cluster, never silently elsewhere: without a remote site the request is refused.

    The one exception is a prompt whose KV the decode worker has complete: there is nothing to prefill.
    """

    def choose(
        self, request: RequestView, candidates: Candidates, view: FleetView, rng: np.random.Generator
    ) -> int:
        nothing_to_do = (candidates.kind == PlacementKind.REUSE) & (candidates.uncached_tokens == 0)
        rows = np.flatnonzero((candidates.kind == PlacementKind.REMOTE) | nothing_to_do)
        return least(candidates.ttft_s, candidates, view, rng, rows) if len(rows) else REFUSE

"""A third-party policy in twenty lines: LMetric (arXiv 2603.15202), nothing to tune.

Use it without installing anything, from the folder above this one:

    policy: {name: "examples.policy_example:LMetric"}

or from a package of yours that declares an entry point of group `prfaas.policies`. `Candidates`,
`FleetView` and the other types are documented in `policies/types.py`.
"""

from __future__ import annotations

import numpy as np

from policies.base import BasePolicy, least
from policies.types import Candidates, FleetView, RequestView


class LMetric(BasePolicy):
    """Least (prefill tokens queued at the site if placed there) x (decode batch there if placed there)."""

    def choose(
        self, request: RequestView, candidates: Candidates, view: FleetView, rng: np.random.Generator
    ) -> int:
        queued = np.array([view.queued_tokens[site] for site in candidates.site], dtype=np.float64)
        batch = np.array([view.running[decode] for decode in candidates.decode], dtype=np.float64)
        score = (queued + candidates.uncached_tokens) * (batch + 1)
        return least(score, candidates, view, rng)

"""Other policies on the PrfaaS case study's fleet and workload, told nothing but profiles and link.

    python -m benchmarks.paper_policies [--policies cost_model,dual_timescale] [--requests 3000] [--seeds 2]

Λ is the highest rate whose TTFT P90 is within twice the unloaded one of the paper's own policy (a fixed
threshold that its model found), the same limit for all. Prints one JSON line per policy: Λ, its ratio to the
threshold's, TTFT there and the share of requests prefilled remotely.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import numpy as np

from policies.types import PlacementKind, Policy
from simulations.commands.policy_spec import parse_policies
from simulations.engine.run import RunOptions, simulate
from simulations.paper.case import Case, paper_case
from simulations.paper.event_driven import (
    P90_FACTOR,
    UNLOADED,
    WARM_UP_SHARE,
    fleet_of,
    poisson_trace,
    policy_of,
    with_lines,
)
from simulations.paper.model import Split, figures, paper_splits

MakePolicy = Callable[[], Policy]
STEPS = 7
"""Bisections: Λ is known to 0.4 % of what the fleet could serve without queues."""


def measure(
    case: Case, split: Split, rate: float, make: MakePolicy, requests: int, seeds: int
) -> list[float]:
    """TTFT P50, P90, P99 and the share prefilled remotely, over all seeds, after the warm-up."""
    fleet, first = fleet_of(case, split), int(WARM_UP_SHARE * requests)
    ttfts, remote = [], []
    for seed in range(seeds):
        trace = poisson_trace(case, requests, seed).at_rate(rate)
        found = simulate(trace, fleet, make(), RunOptions(seed=seed))
        ttfts.append(np.nan_to_num(found.ttft_s[first:], nan=np.inf))
        remote.append(found.kind[first:] == PlacementKind.REMOTE)
    ttft_s = np.concatenate(ttfts)
    return [float(np.quantile(ttft_s, q, method="lower")) for q in (0.5, 0.9, 0.99)] + [
        float(np.concatenate(remote).mean())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--policies", default="cost_model,dual_timescale")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    requests, seeds = arguments.requests, arguments.seeds
    case = paper_case()
    split = paper_splits(case)["prfaas_pd"]
    most = figures(with_lines(case), split).lambda_max
    policies: dict[str, MakePolicy] = {"the paper's threshold": lambda: policy_of(split)}
    policies |= {spec.label: spec.make for spec in parse_policies(arguments.policies)}
    unloaded = measure(case, split, UNLOADED * most, lambda: policy_of(split), requests // 3, 1)
    limit_s, reference = P90_FACTOR * unloaded[1], 0.0
    for name, make in policies.items():
        low, high, best = most / 2, most, [float("nan")] * 4
        for _ in range(STEPS):
            rate = (low + high) / 2
            found = measure(case, split, rate, make, requests, seeds)
            if found[1] <= limit_s:
                low, best = rate, found
            else:
                high = rate
        reference = reference or low
        line = {
            "policy": name,
            "lambda_max": round(low, 3),
            "over_threshold": round(low / reference, 3),
            "ttft_p90_limit_s": round(limit_s, 2),
            **dict(zip(("ttft_p50_s", "ttft_p90_s", "ttft_p99_s"), np.round(best, 2).tolist(), strict=False)),
            "offload_share": round(best[3], 3),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

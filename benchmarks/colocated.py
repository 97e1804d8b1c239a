"""Does disaggregation pay? The same workers colocated, split into prefill and decode, or with remote prefill.

    python -m benchmarks.colocated [--fleets hybrid,dense,small] [--traces mooncake,lognormal] [--jobs N]

Four fleets are made of each: `colocated` (every worker of the PD cluster serves whole requests, chunked
prefill beside its running decodes), `split` (as the fleet says, without its remote cluster), `remote +
colocated` and `remote + split` (the whole fleet). Capacity is the highest rate within the fleet's service
levels under the default policy, as in benchmarks.policies. Prints one JSON line per fleet and trace.
"""

from __future__ import annotations

import argparse
import json

from msgspec.structs import replace

from benchmarks.policies import FINE, WARM_UP, load_traces
from simulations.bound import fluid_bound
from simulations.commands.policy_spec import parse_policy
from simulations.experiments.capacity import Attempt, search, summed_up, try_rate
from simulations.experiments.sweep import run_chains
from simulations.fleet import Fleet, SimCluster
from simulations.fleet_load import load_fleet
from simulations.workload.trace import Trace

POLICY = "cost_model"


def colocated(cluster: SimCluster) -> SimCluster:
    """Every worker takes whole requests."""
    if cluster.kind == "prefill":
        return cluster
    workers = {name: replace(group, role="decode") for name, group in cluster.workers.items()}
    return replace(cluster, workers=workers)


def variants(fleet: Fleet) -> dict[str, Fleet]:
    together = {name: colocated(cluster) for name, cluster in fleet.clusters.items()}
    alone = {name: cluster for name, cluster in fleet.clusters.items() if cluster.kind == "pd"}
    return {
        "colocated": replace(fleet, clusters={name: together[name] for name in alone}, links={}),
        "split": replace(fleet, clusters=alone, links={}),
        "remote + colocated": replace(fleet, clusters=together),
        "remote + split": fleet,
    }


def capacities(fleets: dict[str, Fleet], trace: Trace, jobs: int) -> dict[str, float]:
    """Requests per second within the service levels, by variant."""
    first, spec = int(WARM_UP * len(trace)), parse_policy(POLICY)
    bounds = {name: fluid_bound(trace, fleet, first=first).rate_per_s for name, fleet in fleets.items()}
    starts = [
        Attempt("trace", fleet, spec, fleet.slo, bounds[name], 0, WARM_UP) for name, fleet in fleets.items()
    ]
    chains = [search(start, start.rate_per_s, FINE) for start in starts]
    swept = run_chains(try_rate, chains, {"trace": trace}, jobs=jobs)
    found = zip(fleets, swept.results, strict=True)
    return {name: summed_up(POLICY, (tuple(t),), bounds[name], FINE).rate_per_s for name, t in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--fleets", default="hybrid,dense,small")
    parser.add_argument("--traces", default="mooncake,lognormal")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="length of the counted half at the bound's rate"
    )
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    traces = load_traces(arguments.traces.split(","))
    for fleet_name in arguments.fleets.split(","):
        fleets = variants(load_fleet(fleet_name))
        for trace_name, whole in traces.items():
            rate = fluid_bound(whole.part(0, min(len(whole), 3000)), fleets["remote + split"]).rate_per_s
            trace = whole.part(0, min(int(arguments.seconds * rate / (1 - WARM_UP)), len(whole)))
            found = capacities(fleets, trace, arguments.jobs)
            line = {"fleet": fleet_name, "trace": trace_name, "requests": len(trace)}
            line |= {name: round(value, 2) for name, value in found.items()}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

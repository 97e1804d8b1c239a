"""The comparison of policies: capacity and TTFT of each, by fleet, trace and link.

    python -m benchmarks.policies --out FILE.json [--quick] [--jobs N] [--policies a,b] [--fleets small]
        [--traces mooncake,lognormal,agentic] [--links 0.2,1,5] [--seconds 300] [--seeds 5]

A cell is a fleet, a trace and a link: the link's bandwidth is such that KV of all prompts, offered at the
bound's rate (of an endless link), would be 0.2, 1 or 5 times of it. In each cell every policy's parameters
are chosen on the first half of the trace (highest capacity of a small grid); its capacity is then measured on
the second half, after the first has warmed the caches, and its TTFT at 50, 80 and 95 % of the best policy's
capacity. Prints tables and writes everything as JSON. `mooncake` needs the data folder, else it is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from prfaas.errors import ConfigError
from prfaas.units import Rate
from simulations.bound import Bound, fluid_bound
from simulations.commands.policy_spec import PolicySpec, parse_policies, parse_policy
from simulations.data_folder import data_file
from simulations.experiments.capacity import Attempt, Capacity, Trial, search, summed_up, try_rate
from simulations.experiments.sweep import run_all, run_chains
from simulations.fleet import Fleet
from simulations.fleet_load import load_fleet
from simulations.groups import link_for_offered, mean_kv_bytes
from simulations.workload.load import load_trace
from simulations.workload.trace import Trace

DEFAULT = "cost_model"
OWN = ("cost_model", "dual_timescale", "priced")
"""All others are foreign: what other systems do, or no policy at all."""
ENDLESS = 1e15
"""Bytes per second of a link that limits nothing."""
LOADS = (0.5, 0.8, 0.95)
WARM_UP = 0.5
ROUGH, FINE = 0.15, 0.02
"""Relative width of the last bracket, when parameters are chosen and when capacity is reported."""
TRACES = {
    "mooncake": "traces/mooncake_conversation.jsonl.gz",
    "lognormal": "generate:lognormal?requests=20000&mu=8.7&output_tokens=300&output_sigma=0.7&seed=1",
    "agentic": "generate:agentic?requests=20000&rate=4&seed=1",
}
WHERE = ("prefill", "all")
GRIDS: dict[str, dict[str, Sequence[Any]]] = {
    "lmetric": {"where": WHERE},
    "netkv": {"where": WHERE},
    "mooncake": {"where": WHERE},
    "preble": {"where": WHERE},
    "peer_pull": {"where": WHERE},
    "conversation": {"where": WHERE},
    "dynamo_kv": {"where": WHERE},
    "isl_or_load": {"threshold_tokens": (512, 2048, 8192)},
    "prefix_threshold": {"non_cached_tokens": (512, 2048, 8192)},
    "cache_aware": {"where": WHERE},
    "power_of_two": {"where": WHERE},
    "least_load": {"where": WHERE},
    "random": {"where": WHERE},
}
ALL = (
    "cost_model,dual_timescale,threshold,lmetric,netkv,mooncake,gorgo,preble,peer_pull,conversation,dynamo_kv,"
    "isl_or_load,prefix_threshold,power_of_two,least_load,cache_aware,random,always_local"
)
QUICK = "cost_model,threshold,lmetric,mooncake,always_local"


@dataclass
class Cell:
    name: str
    fleet: Fleet
    trace: Trace
    """Whole; the first half tunes and warms, the second counts."""
    bound: Bound
    """Of the counted half."""
    bound_free_roles_per_s: float
    tuned: dict[str, PolicySpec] = field(default_factory=dict)
    capacities: dict[str, Capacity] = field(default_factory=dict)
    loads: dict[str, dict[str, list[Trial]]] = field(default_factory=dict)
    """By load and policy, one trial per seed."""

    @property
    def first_half(self) -> Trace:
        return self.trace.part(0, int(WARM_UP * len(self.trace)))

    def best(self, names: Iterable[str]) -> tuple[str, float]:
        """(policy with the highest capacity among `names`, that capacity)."""
        rates = {name: self.capacities[name].rate_per_s for name in names if name in self.capacities}
        return max(rates.items(), key=lambda item: item[1], default=("none", 0.0))


def make_cells(
    fleets: list[str], traces: dict[str, Trace], offered: list[float], seconds: float
) -> list[Cell]:
    cells = []
    for fleet_name in fleets:
        fleet = load_fleet(fleet_name)
        for trace_name, whole in traces.items():
            trace = whole
            try:
                rate = fluid_bound(trace, with_link(fleet, ENDLESS)).rate_per_s
            except ConfigError as error:
                note(f"left out: {trace_name} on {fleet_name}: {error}")
                continue
            trace = trace.part(0, min(int(seconds * rate / (1 - WARM_UP)), len(trace)))
            first = int(WARM_UP * len(trace))
            endless = fluid_bound(trace, with_link(fleet, ENDLESS), first=first).rate_per_s
            for group in offered:
                at_link = with_link(
                    fleet, link_for_offered(group, endless, mean_kv_bytes(trace, fleet.model))
                )
                free = fluid_bound(trace, at_link, first=first, free_roles=True)
                bound = fluid_bound(trace, at_link, first=first)
                name = f"{fleet_name} · {trace_name} · offered/link {group:g}"
                cells.append(Cell(name, at_link, trace, bound, free.rate_per_s))
    return cells


def with_link(fleet: Fleet, bytes_per_s: float) -> Fleet:
    """Every link of `fleet` at this capacity."""
    links = {
        name: msgspec.structs.replace(link, capacity=Rate(bytes_per_s)) for name, link in fleet.links.items()
    }
    return msgspec.structs.replace(fleet, links=links)


def grid(policy: str, trace: Trace) -> list[PolicySpec]:
    """The parameter settings among which one is chosen on the first half."""
    spec = parse_policy(policy)
    if spec.parameters:
        return [spec]
    if policy == "threshold":
        cuts = np.quantile(trace.prompt_tokens, (0.3, 0.6, 0.85, 0.97)).astype(int).tolist()
        return [parse_policy(f"threshold:tokens={cut},without_remote=stay") for cut in cuts]
    options = [f"{policy}:{key}={value}" for key, values in GRIDS.get(policy, {}).items() for value in values]
    return [parse_policy(text) for text in options] or [spec]


# ---------------------------------------------------------------- the three stages


def tune(cells: list[Cell], policies: list[str], jobs: int) -> None:
    """Choose each policy's parameters on the first half of each cell's trace."""
    starts, owners = [], []
    for index, cell in enumerate(cells):
        for policy in policies:
            settings = grid(policy, cell.first_half)
            cell.tuned[policy] = settings[0]
            for spec in settings if len(settings) > 1 else ():
                rate = cell.bound.rate_per_s
                starts.append(
                    Attempt(f"{index}-first", cell.fleet, spec, cell.fleet.slo, rate, drop_first=0.2)
                )
                owners.append((index, policy, spec))
    traces = {f"{index}-first": cell.first_half for index, cell in enumerate(cells)}
    chains = [search(s, s.rate_per_s, ROUGH) for s in starts]
    swept = run_chains(try_rate, chains, traces, jobs=jobs, on_result=counter("tuning"))
    stop_if(swept.interrupted)
    best: dict[tuple[int, str], float] = {}
    for (index, policy, spec), trials in zip(owners, swept.results, strict=True):
        rate = max((t.rate_per_s for t in trials if t.met), default=0.0)
        if rate > best.get((index, policy), -1.0):
            best[index, policy] = rate
            cells[index].tuned[policy] = spec


def measure_capacity(cells: list[Cell], policies: list[str], seeds: int, jobs: int) -> None:
    starts = [
        Attempt(
            str(index), cell.fleet, cell.tuned[policy], cell.fleet.slo, cell.bound.rate_per_s, seed, WARM_UP
        )
        for index, cell in enumerate(cells)
        for policy in policies
        for seed in range(seeds)
    ]
    chains = [search(start, start.rate_per_s, FINE) for start in starts]
    traces = {str(index): cell.trace for index, cell in enumerate(cells)}
    swept = run_chains(try_rate, chains, traces, jobs=jobs, on_result=counter("capacity"))
    stop_if(swept.interrupted)
    results = iter(swept.results)
    for cell in cells:
        for policy in policies:
            trials = tuple(tuple(next(results)) for _ in range(seeds))
            cell.capacities[policy] = summed_up(policy, trials, cell.bound.rate_per_s, FINE)


def measure_latency(cells: list[Cell], policies: list[str], seeds: int, jobs: int) -> None:
    tasks, owners = [], []
    for index, cell in enumerate(cells):
        _, top = cell.best(policies)
        for share in LOADS if top else ():
            for policy in policies:
                for seed in range(seeds):
                    rate, spec = share * top, cell.tuned[policy]
                    tasks.append(Attempt(str(index), cell.fleet, spec, cell.fleet.slo, rate, seed, WARM_UP))
                    owners.append((cell, f"{share:g}", policy))
    traces = {str(index): cell.trace for index, cell in enumerate(cells)}
    found, interrupted = run_all(try_rate, tasks, traces, jobs=jobs, on_result=counter("latency"))
    stop_if(interrupted)
    for (cell, load, policy), trial in zip(owners, found, strict=True):
        assert trial is not None
        cell.loads.setdefault(load, {}).setdefault(policy, []).append(trial)


# ---------------------------------------------------------------- what comes out


def cell_data(cell: Cell, policies: list[str]) -> dict[str, Any]:
    foreign_name, foreign = cell.best(p for p in policies if p not in OWN)
    default = cell.capacities[DEFAULT].rate_per_s if DEFAULT in cell.capacities else 0.0
    best_name, best = cell.best(policies)
    return {
        "cell": cell.name,
        "link_bytes_per_s": {name: float(link.capacity) for name, link in cell.fleet.links.items()},
        "bound_per_s": cell.bound.rate_per_s,
        "bound_free_roles_per_s": cell.bound_free_roles_per_s,
        "binding": list(cell.bound.binding),
        "best": {"policy": best_name, "rate_per_s": best},
        "best_foreign": {"policy": foreign_name, "rate_per_s": foreign},
        "default_over_best_foreign": default / foreign if foreign else None,
        "default_over_bound": default / cell.bound.rate_per_s,
        "policies": {policy: policy_data(cell, policy) for policy in policies},
    }


def policy_data(cell: Cell, policy: str) -> dict[str, Any]:
    found = cell.capacities[policy]
    miss = found.first_miss
    return {
        "setting": cell.tuned[policy].label,
        "capacity_per_s": found.rate_per_s,
        "by_seed": list(found.by_seed),
        "over_bound": found.rate_per_s / cell.bound.rate_per_s,
        "served_over_bound": found.best.throughput_per_s / cell.bound.rate_per_s if found.best else 0.0,
        "limited_by": miss.missed if miss else None,
        "at_load": {
            load: {
                name: median(by_policy[policy], name) for name in ("ttft_p90_s", "ttft_p99_s", "tpot_p90_s")
            }
            | {"met": all(trial.met for trial in by_policy[policy])}
            for load, by_policy in cell.loads.items()
        },
    }


def median(trials: list[Trial], name: str) -> float | None:
    values = [trial.figures[name] for trial in trials if trial.figures[name] == trial.figures[name]]
    return statistics.median(values) if values else None


def print_cell(found: dict[str, Any]) -> None:
    print(f"\n{found['cell']}: bound {found['bound_per_s']:.3g}/s ({', '.join(found['binding'][:2])})")
    loads = [f"{100 * load:.0f} %" for load in LOADS]
    print(
        f"  {'policy':46s} {'req/s':>7s} {'bound':>6s} {'served':>6s}   TTFT P90 / P99 s at "
        + ", ".join(loads)
    )
    ranked = sorted(found["policies"].values(), key=lambda p: -p["capacity_per_s"])
    for row in ranked:
        cells = [f"{shown(at['ttft_p90_s'])}/{shown(at['ttft_p99_s'])}" for at in row["at_load"].values()]
        shares = f"{row['capacity_per_s']:7.3g} {row['over_bound']:6.1%} {row['served_over_bound']:6.1%}"
        print(f"  {row['setting'][:46]:46s} {shares}   {'  '.join(cells)}")


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def print_summary(cells: list[dict[str, Any]]) -> None:
    ratios = [c["default_over_best_foreign"] for c in cells if c["default_over_best_foreign"] is not None]
    if not ratios:
        return
    print(f"\n{DEFAULT} over the best foreign policy, {len(ratios)} cells:")
    print(
        f"  at least 1.10 in {sum(r >= 1.10 for r in ratios)}, under 0.98 in {sum(r < 0.98 for r in ratios)}"
    )
    print(f"  least {min(ratios):.3f}, median {statistics.median(ratios):.3f}, most {max(ratios):.3f}")
    over = [c["default_over_bound"] for c in cells]
    print(f"{DEFAULT} over the bound: at least 0.90 in {sum(r >= 0.9 for r in over)}, least {min(over):.3f}")


# ---------------------------------------------------------------- helpers


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def counter(stage: str) -> Any:
    done = 0

    def count(_: int, __: object) -> None:
        nonlocal done
        done += 1
        if done % 50 == 0:
            note(f"{stage}: {done} runs")

    return count


def stop_if(interrupted: bool) -> None:
    if interrupted:
        note("stopped before the end; nothing written")
        sys.exit(130)


def load_traces(names: list[str]) -> dict[str, Trace]:
    traces = {}
    for name in names:
        try:
            spec = TRACES[name]
            trace = load_trace(spec if spec.startswith("generate:") else data_file(spec))
        except ConfigError as error:
            note(f"left out: {name}: {error}")
            continue
        traces[name] = trace
    return traces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="few requests, policies and seeds")
    parser.add_argument("--policies")
    parser.add_argument("--fleets", default="hybrid,dense,small")
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("--links", default="0.2,1,5")
    parser.add_argument("--seconds", type=float, help="length of the counted half at the bound's rate")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    policies = [
        spec.label for spec in parse_policies(arguments.policies or (QUICK if arguments.quick else ALL))
    ]
    seconds = arguments.seconds or (40.0 if arguments.quick else 300.0)
    seeds = arguments.seeds or (1 if arguments.quick else 5)
    traces = load_traces(arguments.traces.split(","))
    offered = [float(text) for text in arguments.links.split(",")]
    cells = make_cells(arguments.fleets.split(","), traces, offered, seconds)
    tune(cells, policies, arguments.jobs)
    measure_capacity(cells, policies, seeds, arguments.jobs)
    measure_latency(cells, policies, seeds, arguments.jobs)
    found = [cell_data(cell, policies) for cell in cells]
    for cell in found:
        print_cell(cell)
    print_summary(found)
    arguments.out.write_text(json.dumps({"seconds": seconds, "seeds": seeds, "cells": found}, indent=1))


if __name__ == "__main__":
    main()

"""TTFT by load: where the queues begin that the model does not have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isinf
from typing import Any

from simulations.groups import Groups
from simulations.paper.case import Case
from simulations.paper.event_driven import UNLOADED, Effort, Job, RunJobs, together
from simulations.paper.link_sweep import operating_groups
from simulations.paper.model import Split
from simulations.paper.published import DeploymentName
from simulations.paper.queueing import ttft_mean_s


@dataclass(frozen=True, slots=True)
class LoadPoint:
    deployment: DeploymentName
    load: float
    """Arrival rate over the model's λ_max."""
    rate_per_s: float
    theory_ttft_mean_s: float
    """By queueing theory; infinite where a queue has no end."""
    ttft_mean_s: float
    """Event by event, as the next one."""
    ttft_p90_s: float
    p90_over_unloaded: float
    groups: Groups


@dataclass(frozen=True, slots=True)
class LoadSweep:
    points: tuple[LoadPoint, ...]
    """By load, then by deployment."""
    complete: bool = True
    """False after an interrupt."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON; an endless wait is None."""
        rows = []
        for point in self.points:
            row = {name: getattr(point, name) for name in point.__slots__ if name != "groups"}
            plain = {n: None if isinstance(v, float) and isinf(v) else v for n, v in row.items()}
            rows.append({**plain, "groups": point.groups.as_dict()})
        return {"sweep": "load", **({} if self.complete else {"complete": False}), "points": rows}


def sweep_load(
    case: Case,
    splits: Mapping[DeploymentName, Split],
    model_rates: Mapping[DeploymentName, float],
    loads: Sequence[float],
    effort: Effort,
    rtt_s: float,
    run_jobs: RunJobs,
) -> LoadSweep:
    """Every fleet at every load; after an interrupt the loads done by then."""
    points: list[LoadPoint] = []
    unloaded_s: dict[DeploymentName, float] = {}
    try:
        for load in (UNLOADED, *loads):
            jobs = [
                Job(case, split, load * model_rates[name], effort.requests, seed, unloaded=load == UNLOADED)
                for name, split in splits.items()
                for seed in range(effort.seeds)
            ]
            samples = iter(run_jobs(jobs))
            for name, split in splits.items():
                sample = together([next(samples) for _ in range(effort.seeds)])
                if name not in unloaded_s:
                    unloaded_s[name] = sample.ttft_p90_s
                    continue
                rate = load * model_rates[name]
                points.append(
                    LoadPoint(
                        deployment=name,
                        load=load,
                        rate_per_s=rate,
                        theory_ttft_mean_s=ttft_mean_s(case, split, rate),
                        ttft_mean_s=float(sample.ttft_s.mean()),
                        ttft_p90_s=sample.ttft_p90_s,
                        p90_over_unloaded=sample.ttft_p90_s / unloaded_s[name],
                        groups=operating_groups(case, split, rate, rtt_s),
                    )
                )
    except KeyboardInterrupt:
        return LoadSweep(tuple(points), complete=False)
    return LoadSweep(tuple(points))


def jobs_of_loads(effort: Effort, deployments: int, loads: int) -> int:
    """Runs that `sweep_load` will ask for."""
    return deployments * effort.seeds * (loads + 1)

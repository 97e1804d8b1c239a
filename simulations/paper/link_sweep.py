"""The side that the paper never enters: what is left of the gain as the link gets slower.

At every rate the threshold and the split are searched anew, so each point is the best that the model knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

import numpy as np

from simulations.groups import Groups, Traffic, groups
from simulations.paper.case import Case
from simulations.paper.event_driven import Effort, RunJobs, search, with_lines
from simulations.paper.model import (
    STAGES,
    Demand,
    Split,
    best_split,
    binding_stages,
    demand,
    figures,
    grid,
    paper_splits,
    stage_rates,
)
from simulations.paper.published import EQUAL_COST_GAIN, PUBLISHED, Figures


@dataclass(frozen=True, slots=True)
class LinkPoint:
    """The best that `prfaas_pd`'s instances do on one link."""

    link_gbps: float
    figures: Figures
    binding: str
    """The stages of `model.STAGES` that limit it, joined by `+`."""
    groups: Groups
    split: Split
    queued_lambda_max: float | None = None
    """The rate event by event, with TTFT P90 within twice the unloaded one, at the same threshold and split;
    None where it was not searched for."""


@dataclass(frozen=True, slots=True)
class LinkSweep:
    points: tuple[LinkPoint, ...]
    homogeneous_lambda_max: float
    """Of the paper's 12 PD instances without a remote pool."""
    equal_cost_lambda_max: float
    """Of a homogeneous fleet that costs as much, from the paper's gain of ≈15 % at equal cost."""
    pd_alone_lambda_max: float
    """Of the PD cluster's 8 instances with the remote pool switched off."""
    unmoved_from_gbps: float
    """On links at least this fast the optimum is that of an endless link."""
    pays_from_gbps: float
    """Below this rate `prfaas_pd` serves less than the 12 homogeneous instances."""
    pays_at_equal_cost_from_gbps: float
    complete: bool = True
    """False: an interrupt ended the event-driven searches; they are there for the fastest links."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        rows = [
            {
                "link_gbps": point.link_gbps,
                **asdict(point.figures),
                "binding": point.binding,
                "event_driven_lambda_max": point.queued_lambda_max,
                "groups": point.groups.as_dict(),
            }
            for point in self.points
        ]
        rest = {name: getattr(self, name) for name in self.__slots__ if name not in ("points", "complete")}
        if not self.complete:
            rest["complete"] = False
        return {"sweep": "link", **rest, "points": rows}


def sweep_link(case: Case, rates_gbps: Sequence[float], rtt_s: float) -> LinkSweep:
    """Search the optimum anew on each link; `rtt_s` only enters the groups."""
    search = _Search(case)
    points = []
    for rate in rates_gbps:
        here = search.case_at(rate)
        split = search.best(rate)
        found = figures(here, split)
        regime = operating_groups(here, split, found.lambda_max, rtt_s)
        points.append(LinkPoint(rate, found, binding_stages(here, split), regime, split))
    homogeneous = figures(case, paper_splits(case)["homogeneous"]).lambda_max
    unbound = search.rate(inf)
    equal_cost = unbound / EQUAL_COST_GAIN
    return LinkSweep(
        points=tuple(points),
        homogeneous_lambda_max=homogeneous,
        equal_cost_lambda_max=equal_cost,
        pd_alone_lambda_max=search.rate(0.0),
        unmoved_from_gbps=figures(search.case_at(inf), search.best(inf)).egress_gbps or 0.0,
        pays_from_gbps=search.slowest_link(homogeneous),
        pays_at_equal_cost_from_gbps=search.slowest_link(equal_cost),
    )


def add_queues(case: Case, sweep: LinkSweep, effort: Effort, run_jobs: RunJobs) -> LinkSweep:
    """The sweep with an event-driven search on every link, fastest first; after an interrupt on some."""
    done: dict[float, float] = {}
    complete = True
    for point in reversed(sweep.points):
        here = replace(case, link_bytes_per_s=point.link_gbps * 1e9 / 8)
        limit = figures(with_lines(here), point.split).lambda_max
        found = search(here, {"prfaas_pd": point.split}, {"prfaas_pd": limit}, effort, run_jobs)
        if not found.complete:
            complete = False
            break
        if found.figures:
            done[point.link_gbps] = found.figures["prfaas_pd"].lambda_max
    points = [replace(point, queued_lambda_max=done.get(point.link_gbps)) for point in sweep.points]
    return replace(sweep, points=tuple(points), complete=complete)


def operating_groups(case: Case, split: Split, rate_per_s: float, rtt_s: float) -> Groups:
    """The groups of a fleet at `rate_per_s`."""
    threshold, lengths = split.threshold_tokens, case.lengths
    share = lengths.share(above=threshold)
    rates = stage_rates(case, demand(case, np.array([threshold])), split.n_prfaas, split.n_p, split.n_d)[:, 0]
    traffic = Traffic(
        rate_per_s=rate_per_s,
        kv_bytes_all=lengths.mean(case.kv_bytes),
        remote_share=share,
        kv_bytes_remote=lengths.mean(case.kv_bytes, above=threshold),
        prefill_s_remote=lengths.mean(case.remote_prefill_s, above=threshold),
    )
    utilisation = {stage: float(rate_per_s / rate) for stage, rate in zip(STAGES, rates, strict=True)}
    return groups(traffic, case.link_bytes_per_s, rtt_s, utilisation)


class _Search:
    """Optima of the paper's fleet by link rate; the thresholds' demand is computed once."""

    def __init__(self, case: Case) -> None:
        row = PUBLISHED["prfaas_pd"]
        self._case = case
        self._sizes = row.n_prfaas, row.n_p + row.n_d
        self._grid: Demand = grid(case)

    def case_at(self, link_gbps: float) -> Case:
        return replace(self._case, link_bytes_per_s=link_gbps * 1e9 / 8)

    def best(self, link_gbps: float) -> Split:
        return best_split(self.case_at(link_gbps), *self._sizes, self._grid)

    def rate(self, link_gbps: float) -> float:
        return figures(self.case_at(link_gbps), self.best(link_gbps)).lambda_max

    def slowest_link(self, lambda_max: float) -> float:
        """The slowest link (Gbit/s) on which the fleet reaches `lambda_max`; 0 where it needs none."""
        low, high = 0.0, 1000.0
        while high - low > 1e-3:
            middle = (low + high) / 2
            low, high = (low, middle) if self.rate(middle) >= lambda_max else (middle, high)
        return high if low > 0 else 0.0

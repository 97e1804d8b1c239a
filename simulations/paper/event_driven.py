"""The same three fleets event by event: Poisson arrivals, queues, and a link that takes its time.

The model calls a fleet full when its queues have no end; users leave long before. Here λ_max is the highest
rate whose TTFT P90 is within twice the unloaded one, found by bisection. Every rate is tried on the same
requests in the same order, only closer together: two rates differ by their load and not by luck.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import msgspec
import numpy as np

from policies.fixed import AlwaysRemote
from policies.threshold import Threshold
from policies.types import PlacementKind, Policy
from prfaas.units import Rate, Seconds
from simulations.engine.run import RunOptions, simulate
from simulations.fleet import Fleet
from simulations.fleet_load import load_fleet
from simulations.paper.case import Case
from simulations.paper.model import Split
from simulations.paper.published import DeploymentName, Figures
from simulations.result import SERVED, RunResult
from simulations.workload.trace import Floats, Trace

BASE_FLEET = "hybrid"
UNLOADED = 0.03
"""Of the model's λ_max: nobody waits for anybody."""
P90_FACTOR = 2.0
WARM_UP_SHARE = 0.1
"""Of the requests: the fleet starts empty, and a full one is what is asked about."""
_SEARCHED = (0.5, 1.0)
"""Range of the search, as shares of what the fleet could serve without queues."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to look. The P90 of fewer requests is too uncertain for a second digit."""

    requests: int = 3000
    """In each run."""
    seeds: int = 2
    """Runs at every rate; their requests count together."""
    steps: int = 6
    """Bisections: the rate is known to 0.8 % of the model's."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run: `split`'s fleet at `rate_per_s`. Plain data, so that another process can do it."""

    case: Case
    split: Split
    rate_per_s: float
    requests: int
    seed: int
    unloaded: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """What one or more runs of one fleet at one rate found."""

    ttft_s: Floats
    """Of the requests after the warm-up; infinite where one was not served."""
    placed: int
    remote: int
    remote_bytes: float
    work_s: Mapping[str, float]
    """Busy seconds by stage: `remote`, `home`; seconds in a decode slot: `decode`."""

    @property
    def ttft_p90_s(self) -> float:
        return float(np.quantile(self.ttft_s, 0.9, method="lower"))


@dataclass(slots=True)
class _Search:
    split: Split
    low: float
    high: float
    limit_s: float = inf
    best: Sample | None = field(default=None)
    """At `low`."""


@dataclass(frozen=True, slots=True)
class Found:
    figures: Mapping[DeploymentName, Figures]
    complete: bool
    """False after an interrupt: the rates known by then to be within the limit."""


RunJobs = Callable[[Sequence[Job]], list[Sample]]
"""Does jobs, here or in other processes, and answers in their order."""


def search(
    case: Case,
    splits: Mapping[DeploymentName, Split],
    limits: Mapping[DeploymentName, float],
    effort: Effort,
    run_jobs: RunJobs,
) -> Found:
    """λ_max of each fleet with queues, and its figures at that rate.

    All fleets are bisected side by side, so that `run_jobs` always has several jobs. An interrupt ends the
    search with the highest rates known by then to be within the limit.

    Args:
        limits: requests per second that the fleets could serve without queues (the model's λ_max of
            `with_lines(case)`). From there on queues have no end, which a run of finite length may not show.
    """
    low, high = _SEARCHED
    searches = {
        name: _Search(split, low * limits[name], high * limits[name]) for name, split in splits.items()
    }
    complete = False
    try:
        unloaded = {name: UNLOADED * rate for name, rate in limits.items()}
        for name, sample in _run_all(case, searches, unloaded, effort, run_jobs, unloaded=True).items():
            searches[name].limit_s = P90_FACTOR * sample.ttft_p90_s
        for _ in range(effort.steps):
            rates = {name: (one.low + one.high) / 2 for name, one in searches.items()}
            for name, sample in _run_all(case, searches, rates, effort, run_jobs).items():
                one = searches[name]
                if sample.ttft_p90_s <= one.limit_s:
                    one.low, one.best = rates[name], sample
                else:
                    one.high = rates[name]
        complete = True
    except KeyboardInterrupt:
        pass
    known = {
        name: measured_figures(case, one.split, one.low, one.best)
        for name, one in searches.items()
        if one.best is not None
    }
    return Found(known, complete)


def jobs_of(effort: Effort, deployments: int) -> int:
    """Runs that `search` will ask for."""
    return deployments * effort.seeds * (effort.steps + 1)


def measured_figures(case: Case, split: Split, rate_per_s: float, sample: Sample) -> Figures:
    """The figures of a run at `rate_per_s`; stage throughputs from the work that it took."""
    share = sample.remote / sample.placed
    home = sample.placed - sample.remote
    remote_bytes = sample.remote_bytes / sample.remote if sample.remote else 0.0
    theta_prefill = split.n_prfaas * sample.remote / sample.work_s["remote"] if sample.remote else 0.0
    theta_link = case.link_bytes_per_s / remote_bytes if remote_bytes else inf
    return Figures(
        lambda_max=rate_per_s,
        theta_prfaas=min(theta_prefill, theta_link) if sample.remote else None,
        theta_pd_p=split.n_p * home / sample.work_s["home"] if home else None,
        theta_pd_d=split.n_d * case.decode_slots * sample.placed / sample.work_s["decode"],
        threshold_tokens=split.threshold_tokens if 0 < split.threshold_tokens < inf else None,
        n_prfaas=split.n_prfaas,
        n_p=split.n_p,
        n_d=split.n_d,
        offload_share=share,
        egress_gbps=rate_per_s * share * remote_bytes * 8e-9,
        ttft_mean_s=float(sample.ttft_s.mean()),
        ttft_p90_s=sample.ttft_p90_s,
    )


def run_job(job: Job) -> Sample:
    """Simulate one job."""
    fleet = fleet_of(job.case, job.split)
    if job.unloaded:  # statuses tell nothing new then, and there is a lot of empty time to fill with them
        fleet = msgspec.structs.replace(fleet, status_period=Seconds(2.0))
    trace = poisson_trace(job.case, job.requests, job.seed).at_rate(job.rate_per_s)
    result = simulate(trace, fleet, policy_of(job.split), RunOptions(seed=job.seed))
    if not result.complete:
        raise KeyboardInterrupt  # part of a run says nothing about its rate
    return _sample(result)


def poisson_trace(case: Case, requests: int, seed: int) -> Trace:
    """Requests of the case's lengths, one per second.

    Over the whole trace, rate and lengths are as asked for (one length from each of `requests` equal strata,
    in random order): an unlucky mix would shift the result more than some queues do. Over the minutes that a
    queue remembers, both are as random as ever.
    """
    rng = np.random.default_rng(seed)
    gaps_s = rng.exponential(1.0, requests)
    return Trace(
        name="paper",
        arrival_s=np.cumsum(gaps_s / gaps_s.mean()),
        prompt_tokens=case.lengths.stratified(requests, rng),
        output_tokens=np.full(requests, case.output_tokens),
    )


def fleet_of(case: Case, split: Split) -> Fleet:
    """The shipped `hybrid` fleet with the split's numbers of instances and the case's link."""
    fleet = load_fleet(BASE_FLEET)
    counts = {"remote": split.n_prfaas, "prefill": split.n_p, "decode": split.n_d}
    clusters = {}
    for name, cluster in fleet.clusters.items():
        workers = {
            group: msgspec.structs.replace(spec, count=counts[group])
            for group, spec in cluster.workers.items()
            if counts[group]
        }
        if workers:
            clusters[name] = msgspec.structs.replace(cluster, workers=workers)
    links = {
        name: msgspec.structs.replace(link, capacity=Rate(case.link_bytes_per_s))
        for name, link in fleet.links.items()
        if set(link.between) <= set(clusters)
    }
    return msgspec.structs.replace(fleet, clusters=clusters, links=links)


def policy_of(split: Split) -> Policy:
    """The paper's rule; all remote and none remote are its two ends."""
    if split.threshold_tokens == 0:
        return AlwaysRemote()
    return Threshold(tokens=int(min(split.threshold_tokens, 2**40)))


def link_rtt_s() -> float:
    """Round trip of the fleet's link; the paper has none."""
    (link,) = load_fleet(BASE_FLEET).links.values()
    return float(link.rtt)


def _run_all(
    case: Case,
    searches: Mapping[DeploymentName, _Search],
    rates: Mapping[DeploymentName, float],
    effort: Effort,
    run_jobs: RunJobs,
    unloaded: bool = False,
) -> dict[DeploymentName, Sample]:
    """Every fleet at its rate, all seeds of it together."""
    jobs = [
        Job(case, one.split, rates[name], effort.requests, seed, unloaded)
        for name, one in searches.items()
        for seed in range(effort.seeds)
    ]
    samples = iter(run_jobs(jobs))
    return {name: together([next(samples) for _ in range(effort.seeds)]) for name in searches}


def together(samples: Sequence[Sample]) -> Sample:
    """Runs of one fleet at one rate as one."""
    return Sample(
        ttft_s=np.concatenate([sample.ttft_s for sample in samples]),
        placed=sum(sample.placed for sample in samples),
        remote=sum(sample.remote for sample in samples),
        remote_bytes=sum(sample.remote_bytes for sample in samples),
        work_s={stage: sum(sample.work_s[stage] for sample in samples) for stage in samples[0].work_s},
    )


def _sample(result: RunResult) -> Sample:
    ttft_s = np.where((result.state == SERVED) & ~np.isnan(result.ttft_s), result.ttft_s, inf)
    remote = result.kind == PlacementKind.REMOTE
    sites = np.unique(result.site[remote])
    remote_names = {result.workers[site] for site in sites}
    busy_s = {"remote": 0.0, "home": 0.0}
    for use in result.resources:
        if use.kind == "prefill":
            busy_s["remote" if use.name in remote_names else "home"] += use.busy_s
    decoding_s = np.nansum(result.tpot_s * result.output_tokens)
    return Sample(
        ttft_s=ttft_s[int(len(ttft_s) * WARM_UP_SHARE) :],
        placed=int((result.kind >= 0).sum()),
        remote=int(remote.sum()),
        remote_bytes=float(result.kv_bytes[remote].sum()),
        work_s={**busy_s, "decode": float(decoding_s)},
    )


def with_lines(case: Case) -> Case:
    """The case with the simulator's own prefill times in place of the quadratic.

    What the model says of it differs from an event-driven run by queueing alone.
    """
    return replace(case, remote_prefill_s=case.remote_ttft_s, home_prefill_s=case.home_ttft_s)

"""The highest arrival rate that a policy serves within the service levels, and its share of the bound."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from policies.types import Policy
from prfaas.errors import ConfigError
from simulations.bound import Bound, fluid_bound
from simulations.engine.run import RunOptions, simulate
from simulations.experiments.context import Context
from simulations.experiments.levels import asked, missed
from simulations.experiments.sweep import run_chains
from simulations.fleet import SLO, Fleet
from simulations.workload.trace import Trace

FIRST_TRY = 0.7
"""Of the bound: where the search begins."""
STEP_UP = 1.25
LOWEST = 2.0**-7
"""Of the bound: a policy that fails here is taken to fail at every rate."""
HIGHEST = 4.0
"""Of the bound. A short trace may be offered faster than any sustained rate: its tail is served later."""


class PolicyMaker(Protocol):
    """Makes a fresh policy for every run; it must pickle (`simulations.commands.policy_spec.PolicySpec`)."""

    @property
    def label(self) -> str: ...

    def make(self) -> Policy: ...


class Attempt(msgspec.Struct, frozen=True):
    """One run to make."""

    trace: str
    """Its name in the sweep."""
    fleet: Fleet
    policy: PolicyMaker
    slo: SLO
    rate_per_s: float
    seed: int = 0
    drop_first: float = 0.0
    """Share of the requests that only warm the caches; rates are those of the rest."""
    causal: bool = False


@dataclass(frozen=True, slots=True)
class Trial:
    """What a run at one rate found."""

    rate_per_s: float
    """Offered: the counted requests' mean arrival rate."""
    met: bool
    missed: dict[str, float]
    """By level missed, the seconds found; `unserved` counts requests without an answer."""
    throughput_per_s: float
    """Served requests over the time from the first counted arrival to the last answer's end."""
    figures: dict[str, float]
    """`RunResult.summary()`."""
    cpu_s: float = field(compare=False)

    @property
    def overhang(self) -> float:
        """Time from the last arrival to the last answer's end, over the time of the arrivals.

        By this share a rate of arrival may exceed any sustained rate; where it is large, the trace is short.
        """
        return (
            max(self.rate_per_s / self.throughput_per_s - 1.0, 0.0) if self.throughput_per_s else float("inf")
        )


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of one policy."""

    policy: str
    by_seed: tuple[float, ...]
    """Highest rate found that meets the levels, 0 where none does; requests per second."""
    trials: tuple[tuple[Trial, ...], ...]
    """By seed, in the order in which they were tried."""
    complete: bool
    """False after Ctrl-C: rates are lower limits."""

    @property
    def rate_per_s(self) -> float:
        """Median over the seeds (the lower one of an even number)."""
        return statistics.median_low(self.by_seed) if self.by_seed else 0.0

    @property
    def best(self) -> Trial | None:
        """The run at the median rate."""
        met = [trial for trials in self.trials for trial in trials if trial.met]
        return next((trial for trial in met if trial.rate_per_s == self.rate_per_s), None)

    @property
    def first_miss(self) -> Trial | None:
        """Of the seed with the median rate, the lowest rate above it that failed."""
        seeds = [index for index, rate in enumerate(self.by_seed) if rate == self.rate_per_s]
        failed = [
            t for s in seeds[:1] for t in self.trials[s] if not t.met and t.rate_per_s > self.rate_per_s
        ]
        return min(failed, key=lambda trial: trial.rate_per_s, default=None)


@dataclass(frozen=True, slots=True)
class CapacityStudy:
    bound: Bound
    capacities: tuple[Capacity, ...]
    """By policy, in the order asked for."""
    interrupted: bool


def capacity(
    trace: Trace,
    fleet: Fleet,
    policies: Sequence[PolicyMaker],
    slo: SLO | None = None,
    *,
    seeds: Sequence[int] = (0,),
    tolerance: float = 0.02,
    drop_first: float = 0.0,
    causal: bool = False,
    free_roles: bool = False,
    jobs: int = 1,
    ray: str = "",
    on_trial: Callable[[int, Trial], None] | None = None,
) -> CapacityStudy:
    """Highest rate at which `trace`, its arrivals sped up or slowed down, meets `slo` under each policy.

    A bisection by policy and seed, begun from the bound; see docs/bound.md for what it can and cannot say.

    Args:
        slo: levels; None = the fleet's own.
        tolerance: relative width of the last bracket.
        drop_first: share of the requests that only warm the caches.
        free_roles: for the bound, see `fluid_bound`.
        jobs, ray: see `run_chains`.
        on_trial: told (number of the policy and seed: policy · seeds + seed, trial) after every run.

    Raises:
        ConfigError: no level is asked for, or the trace has no rate to scale.
    """
    slo = slo if slo is not None else fleet.slo
    check_searchable(trace, slo, drop_first)
    bound = fluid_bound(trace, fleet, first=int(drop_first * len(trace)), free_roles=free_roles)
    starts = [
        Attempt(trace.name, fleet, policy, slo, bound.rate_per_s, seed, drop_first, causal)
        for policy in policies
        for seed in seeds
    ]
    chains = [search(start, bound.rate_per_s, tolerance) for start in starts]
    swept = run_chains(try_rate, chains, {trace.name: trace}, jobs=jobs, ray=ray, on_result=on_trial)
    found = []
    for index, policy in enumerate(policies):
        trials = tuple(tuple(t) for t in swept.results[index * len(seeds) : (index + 1) * len(seeds)])
        found.append(summed_up(policy.label, trials, bound.rate_per_s, tolerance))
    return CapacityStudy(bound, tuple(found), swept.interrupted)


def check_searchable(trace: Trace, slo: SLO, drop_first: float) -> None:
    """Raises:
    ConfigError: no level is asked for, or the trace has no rate to scale.
    """
    if not asked(slo):
        raise ConfigError("no service level is asked for: give --slo, e.g. ttft_p90=2s,tpot_p90=50ms")
    if counted(trace, drop_first).duration_s <= 0:
        raise ConfigError(f"trace {trace.name}: all requests arrive at once, so there is no rate to scale")


def summed_up(
    policy: str, trials: tuple[tuple[Trial, ...], ...], bound_per_s: float, tolerance: float
) -> Capacity:
    """What searches with several seeds found."""
    rates = tuple(max((t.rate_per_s for t in tried if t.met), default=0.0) for tried in trials)
    complete = all(next_rate(list(tried), bound_per_s, tolerance) is None for tried in trials)
    return Capacity(policy, rates, trials, complete)


# ---------------------------------------------------------------- one search


def search(start: Attempt, bound_per_s: float, tolerance: float) -> Callable[[list[Trial]], Attempt | None]:
    """A chain for `run_chains`: attempts like `start` at the rates that a bisection asks for."""

    def following(trials: list[Trial]) -> Attempt | None:
        rate = next_rate(trials, bound_per_s, tolerance)
        return None if rate is None else msgspec.structs.replace(start, rate_per_s=rate)

    return following


def next_rate(trials: list[Trial], bound_per_s: float, tolerance: float) -> float | None:
    """The rate to try next; None when the bracket is narrow enough or there is nothing to find.

    First a bracket (rates that meet and fail), then its geometric middle. More load is taken to be no easier.
    """
    if not trials:
        return FIRST_TRY * bound_per_s
    best = max((t.rate_per_s for t in trials if t.met), default=0.0)
    failed = min((t.rate_per_s for t in trials if not t.met and t.rate_per_s > best), default=float("inf"))
    if not best:
        return failed / 2 if failed / 2 >= LOWEST * bound_per_s else None
    if failed == float("inf"):
        return best * STEP_UP if best * STEP_UP <= HIGHEST * bound_per_s else None
    return (best * failed) ** 0.5 if failed > best * (1 + tolerance) else None


def try_rate(context: Context, attempt: Attempt) -> Trial | None:
    """One run; None when it was stopped."""
    trace = context.trace(attempt.trace)
    scale = attempt.rate_per_s / counted(trace, attempt.drop_first).rate_per_s
    options = RunOptions(
        seed=attempt.seed, causal=attempt.causal, drop_first=attempt.drop_first, stop=context.stopped
    )
    result = simulate(trace.at_rate(scale), attempt.fleet, attempt.policy.make(), options)
    if not result.complete:
        return None
    wrong = missed(result, attempt.slo)
    figures = result.summary()
    return Trial(
        rate_per_s=attempt.rate_per_s,
        met=not wrong,
        missed=wrong,
        throughput_per_s=figures["requests_per_s"],
        figures=figures,
        cpu_s=result.cpu_s,
    )


def counted(trace: Trace, drop_first: float) -> Trace:
    """The requests that a run with `drop_first` reports."""
    return trace.part(int(drop_first * len(trace)), len(trace))

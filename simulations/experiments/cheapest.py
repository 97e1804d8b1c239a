"""The cheapest numbers of workers that serve a trace at a given rate, by price per worker."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from prfaas.errors import ConfigError
from prfaas.units import Rate
from simulations.bound import fluid_bound
from simulations.experiments.capacity import Attempt, PolicyMaker, Trial, check_searchable, try_rate
from simulations.experiments.sweep import run_chains
from simulations.fleet import SLO, Fleet
from simulations.hardware.profiles import hardware_of
from simulations.workload.trace import Trace

Counts = tuple[int, ...]
SAMPLE = 400
"""Requests in each linear program: a rough bound is as true as a fine one and rules out nearly as much."""
LARGE = 50
"""Times as many workers in the linear program: one of a group that a fleet lacks is next to nothing then."""


@dataclass(frozen=True, slots=True)
class Option:
    """A fleet that was simulated."""

    counts: dict[str, int]
    """Workers by `cluster/group`."""
    price_per_hour: float
    bound_per_s: float
    trial: Trial


@dataclass(frozen=True, slots=True)
class Cheapest:
    policy: str
    rate_per_s: float
    found: Option | None
    tried: tuple[Option, ...]
    """Simulated, in order of price."""
    ruled_out: int
    """Cheaper fleets that no policy could serve the rate with, by the bound."""
    interrupted: bool


@dataclass(frozen=True, slots=True)
class Group:
    cluster: str
    name: str
    price_per_hour: float
    decodes: bool
    most: int

    @property
    def path(self) -> str:
        return f"{self.cluster}/{self.name}"


def cheapest_fleet(
    trace: Trace,
    fleet: Fleet,
    policy: PolicyMaker,
    rate_per_s: float,
    slo: SLO | None = None,
    *,
    seed: int = 0,
    drop_first: float = 0.0,
    most_per_group: int = 64,
    most_runs: int = 200,
    jobs: int = 1,
    ray: str = "",
    on_trial: Callable[[Option], None] | None = None,
) -> Cheapest:
    """The cheapest worker counts for `fleet`'s groups with which `policy` meets `slo` at `rate_per_s`.

    Fleets are tried from the cheapest on. Those whose bound is under the rate are not simulated: no policy
    could do it. So the answer is the cheapest of all with up to `most_per_group` workers in each group, as
    far as the simulation can tell. Among equal prices fewer workers come first.

    Raises:
        ConfigError: hardware has no price, or the search has no end in sight (`most_runs`).
    """
    slo = slo if slo is not None else fleet.slo
    check_searchable(trace, slo, drop_first)
    groups = price_list(fleet, most_per_group)
    first = int(drop_first * len(trace))
    pruned = _Pruned(trace, fleet, groups, rate_per_s, first)
    tried: list[Option] = []
    found: Option | None = None
    interrupted = False
    candidates = pruned.candidates()
    while found is None and not interrupted:
        batch = [c for _, c in zip(range(min(jobs, most_runs - len(tried))), candidates, strict=False)]
        if not batch:
            break
        attempts = [
            Attempt(trace.name, with_counts(fleet, groups, c), policy, slo, rate_per_s, seed, drop_first)
            for c, _ in batch
        ]
        swept = run_chains(try_rate, [_once(a) for a in attempts], {trace.name: trace}, jobs=jobs, ray=ray)
        interrupted = swept.interrupted
        for (counts, bound_per_s), results in zip(batch, swept.results, strict=True):
            if not results or found is not None:
                continue
            names = {group.path: count for group, count in zip(groups, counts, strict=True)}
            option = Option(names, price(groups, counts), bound_per_s, results[0])
            tried.append(option)
            if on_trial is not None:
                on_trial(option)
            if option.trial.met:
                found = option
    if found is None and not interrupted:
        raise ConfigError(
            f"no fleet of up to {most_per_group} workers a group was found that serves {rate_per_s:g} "
            f"requests/s within the levels under `{policy.label}` ({len(tried)} simulated, "
            f"{pruned.ruled_out} ruled out by the bound); lower --rate or loosen --slo"
        )
    return Cheapest(policy.label, rate_per_s, found, tuple(tried), pruned.ruled_out, interrupted)


def _once(attempt: Attempt) -> Callable[[list[Trial]], Attempt | None]:
    return lambda results: None if results else attempt


def price_list(fleet: Fleet, most: int) -> list[Group]:
    """The fleet's groups with their prices.

    Raises:
        ConfigError: a price is missing.
    """
    groups = []
    for cluster_name, cluster in fleet.clusters.items():
        for name, workers in cluster.workers.items():
            paid = hardware_of(fleet, workers).price_per_hour
            if paid <= 0:
                raise ConfigError(
                    f"hardware `{workers.hardware}` of {cluster_name}/{name} has no price; "
                    "set its `price_per_hour`"
                )
            groups.append(Group(cluster_name, name, paid, workers.role == "decode", most))
    return groups


def price(groups: list[Group], counts: Counts) -> float:
    """Per hour, of the whole fleet."""
    return sum(group.price_per_hour * count for group, count in zip(groups, counts, strict=True))


def with_counts(fleet: Fleet, groups: list[Group], counts: Counts) -> Fleet:
    """`fleet` with these numbers of workers; empty groups, clusters and their links are left out."""
    by_path = {group.path: count for group, count in zip(groups, counts, strict=True)}
    clusters = {}
    for cluster_name, cluster in fleet.clusters.items():
        kept = {
            name: msgspec.structs.replace(workers, count=by_path[f"{cluster_name}/{name}"])
            for name, workers in cluster.workers.items()
            if by_path[f"{cluster_name}/{name}"] > 0
        }
        if kept:
            clusters[cluster_name] = msgspec.structs.replace(cluster, workers=kept)
    links = {name: link for name, link in fleet.links.items() if set(link.between) <= set(clusters)}
    return msgspec.structs.replace(fleet, clusters=clusters, links=links)


class _Pruned:
    """Worker counts in order of price, without those whose bound is under the rate.

    The prices of one linear program bound every other fleet of the same groups, too: they say what a worker
    of each group is worth, and fleets whose workers are together worth too little cannot do it. So most are
    ruled out by a sum of a few numbers.
    """

    def __init__(self, trace: Trace, fleet: Fleet, groups: list[Group], rate: float, first: int) -> None:
        self._trace, self._fleet, self._groups = trace, fleet, groups
        self._rate, self._first = rate, first
        self._worths: list[tuple[list[float], float]] = []
        """(requests per second by worker of each group, of the links): their sum bounds any fleet's rate."""
        self.ruled_out = 0

    def candidates(self) -> Iterator[tuple[Counts, float]]:
        """(counts, bound) from the cheapest on."""
        if self._bound(tuple(group.most for group in self._groups)) < self._rate:
            return
        start = (0,) * len(self._groups)
        heap = [(0.0, 0, start)]
        seen = {start}
        while heap:
            _, _, counts = heapq.heappop(heap)
            bound_per_s = self._bound(counts)
            if bound_per_s >= self._rate:
                yield counts, bound_per_s
            else:
                self.ruled_out += 1
            for index, count in enumerate(counts):
                more = (*counts[:index], count + 1, *counts[index + 1 :])
                if count < self._groups[index].most and more not in seen:
                    seen.add(more)
                    heapq.heappush(heap, (price(self._groups, more), sum(more), more))

    def _bound(self, counts: Counts) -> float:
        """The bound of these counts; a looser one where that is enough to rule them out."""
        if not any(count and group.decodes for group, count in zip(self._groups, counts, strict=True)):
            return 0.0
        for worth in self._worths:
            if (bound := _worth_of(counts, worth)) < self._rate:
                return bound
        self._worths.append(self._worth(counts))
        return _worth_of(counts, self._worths[-1])

    def _worth(self, counts: Counts) -> tuple[list[float], float]:
        """What a worker of each group is worth in a fleet of these counts.

        Worth depends on proportions only; so the fleet is enlarged, to have a little of what it lacks.
        """
        many = tuple(LARGE * count or 1 for count in counts)
        links = {
            name: msgspec.structs.replace(link, capacity=Rate(link.capacity * LARGE))
            for name, link in self._fleet.links.items()
        }
        fleet = msgspec.structs.replace(with_counts(self._fleet, self._groups, many), links=links)
        bound = fluid_bound(self._trace, fleet, first=self._first, sample=SAMPLE)
        by_place: dict[str, float] = {}
        for resource in bound.resources:
            worth = bound.rate_per_s * resource.price * resource.capacity
            by_place[resource.place] = by_place.get(resource.place, 0.0) + worth
        workers = [by_place.pop(g.path, 0.0) / count for g, count in zip(self._groups, many, strict=True)]
        return workers, sum(by_place.values()) / LARGE


def _worth_of(counts: Counts, worth: tuple[list[float], float]) -> float:
    by_group, links = worth
    return sum(w * count for w, count in zip(by_group, counts, strict=True)) + links

"""The fluid bound: the highest rate at which any policy could serve a trace on a fleet (docs/bound.md)."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from prfaas.errors import ConfigError
from simulations.bound.envelope import Steps
from simulations.bound.needs import Needs, least_needs
from simulations.bound.places import Places, places
from simulations.bound.program import Optimum, Taken, solve
from simulations.bound.resources import Resource, list_resources, taken
from simulations.fleet import Fleet
from simulations.workload.trace import Floats, Trace

SAMPLE = 3000
"""Requests in the linear program; the prices that it finds are then tried on all of them."""
ROUNDS = 12
"""Most times that planes of the decode step times are added where the optimum lies under them."""


@dataclass(frozen=True, slots=True)
class ResourceBound:
    """One resource at the optimum."""

    name: str
    kind: str
    """`prefill`, `decode`, `slots`, `pages`, `page_seconds`, `sequences` or `link`."""
    place: str
    """`cluster/group`, or a link's `source->target`."""
    capacity: float
    """Units per second that the group or link has; 0 where the decode steps bring them."""
    used: float
    """Share of what there is."""
    price: float
    """Of one unit (second, sequence step, page step, page-second, byte), in seconds of the whole fleet."""
    weight: float
    """Share of the fleet's worth that lies in this resource: how much of the rate hangs on it, 0 … 1."""


@dataclass(frozen=True, slots=True)
class DecodePrices:
    """What decoding a request costs on a group, in seconds of the whole fleet."""

    second: float
    """A second of one worker."""
    sequence_step: float
    """One output token of one sequence, whatever its context."""
    context_step: float
    """One token of context through one step."""
    page_step: float
    """A page held through one step."""
    page_second: float
    """A page held for a second: while the request waits for its KV."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Shadow prices: by how much the rate falls if a unit of a resource is taken away.

    In seconds of the whole fleet: all that the fleet has in a second costs 1, and at the optimum a mean
    request costs 1 / rate. Sending a request another way than its cheapest is a mistake at full load.
    """

    prefill_second: dict[str, float]
    """By group of prefill workers (`cluster/group`)."""
    link_byte: dict[str, float]
    """By direction (`source->target`)."""
    decode: dict[str, DecodePrices]
    """By group of decode workers."""


@dataclass(frozen=True, slots=True)
class Bound:
    rate_per_s: float
    """Requests per second that no policy can exceed."""
    binding: tuple[str, ...]
    """Names of the resources that limit it, the one with most weight first."""
    resources: tuple[ResourceBound, ...]
    prices: Prices
    shares: dict[str, float]
    """Share of the requests by way, `site → decode group`, at the optimum."""
    roles: dict[str, float]
    """With free roles: by group, the share of its workers that prefill at the optimum; else empty."""

    def utilisation(self) -> dict[str, float]:
        """By resource name, share used at the optimum (the fullest of rows with one name)."""
        found: dict[str, float] = {}
        for resource in self.resources:
            found[resource.name] = max(resource.used, found.get(resource.name, 0.0))
        return found


def fluid_bound(
    trace: Trace,
    fleet: Fleet,
    *,
    first: int = 0,
    free_roles: bool = False,
    sample: int = SAMPLE,
) -> Bound:
    """The bound for requests `first` … of `trace` on `fleet`; see docs/bound.md for what it assumes.

    Args:
        first: requests before it only fill the caches, as with `RunOptions.drop_first`.
        free_roles: bound policies that convert workers between prefill and decode, too.
        sample: requests in the linear program itself. More is tighter; no number makes it wrong.

    Raises:
        ConfigError: a request fits nowhere, nothing decodes, a profile is unknown, or scipy is not installed.
    """
    if find_spec("scipy") is None:
        raise ConfigError("the bound needs the package `scipy`: pip install 'prfaas[simulate]'")
    where = places(fleet, free_roles)
    context = max(fleet.model.context_length, int((trace.prompt_tokens + trace.output_tokens).max()))
    decodes = sorted({way.decode for way in where.ways})
    steps = {g: Steps.of(where.groups[g].times, where.groups[g].max_running, context) for g in decodes}
    needs = least_needs(trace, fleet.model, fleet.page_size, where, first)
    optimum, resources = _optimum(_spread(needs, sample), where, steps, fleet.page_size)
    prices = _feasible_prices(optimum.prices, resources, where)
    cost = _least_cost(needs, prices, resources, where, steps)
    return _report(optimum, resources, prices, float(cost.mean()), where, steps, needs, sample)


# ---------------------------------------------------------------- solving


def _optimum(
    needs: Needs, where: Places, steps: dict[int, Steps], page: int
) -> tuple[Optimum, list[Resource]]:
    """Adds planes under the step times until the mean step at the optimum lies on one."""
    weights = np.full(len(needs), 1.0 / len(needs))
    planes = {}
    for group, known in steps.items():
        place = where.groups[group]
        planes[group] = [known.highest(np.array([1.0, place.max_running, place.kv_tokens / 2]))]
    for _ in range(ROUNDS):
        resources = list_resources(where, steps, planes, page)
        amounts = _amounts(resources, where, needs, steps)
        optimum = solve(where, resources, amounts, _fits(where, needs), weights)
        wanted = {g: known.highest(_decode_load(g, optimum, where, needs)) for g, known in steps.items()}
        missing = {group: plane for group, plane in wanted.items() if plane not in planes[group]}
        if not missing:
            break
        for group, plane in missing.items():
            planes[group].append(plane)
    return optimum, resources


def _spread(needs: Needs, sample: int) -> Needs:
    """At most `sample` requests, evenly over the order of decode and prefill work."""
    if len(needs) <= sample:
        return needs
    order = np.lexsort((needs.steps, np.nan_to_num(needs.prefill_s[0], posinf=1e9)))
    return needs.rows(order[np.linspace(0, len(needs) - 1, sample).astype(np.int64)])


def _amounts(resources: list[Resource], where: Places, needs: Needs, steps: dict[int, Steps]) -> Taken:
    return [[taken(row, way, needs, where, steps) for way in where.ways] for row in resources]


def _fits(where: Places, needs: Needs) -> Floats:
    known = np.isfinite(needs.prefill_s)
    return np.array([known[way.site] & known[way.decode] for way in where.ways])


def _decode_load(group: int, optimum: Optimum, where: Places, needs: Needs) -> Floats:
    """(steps, sequence steps, context steps) of a decode group per request."""
    rows = [index for index, way in enumerate(where.ways) if way.decode == group]
    share = optimum.shares[rows].sum(axis=0) / len(needs)
    return np.array([optimum.steps[group], share @ needs.steps, share @ needs.context_steps])


# ---------------------------------------------------------------- the certificate


def _feasible_prices(found: Floats, resources: list[Resource], where: Places) -> Floats:
    """The solver's prices, made exactly such that they prove a bound.

    A decode step must not earn more than it costs (its slots and pages against its seconds): what the
    solver's tolerance leaves over is taken from slots and pages. Then a second of the whole fleet costs 1.
    """
    prices = found.copy()
    for group in {resource.group for resource in resources if resource.kind == "slots"}:
        rows = [index for index, resource in enumerate(resources) if resource.group == group]
        per_step = np.array([resources[index].per_step * prices[index] for index in rows])
        costs, earns = per_step[per_step > 0].sum(), -per_step[per_step < 0].sum()
        if earns > costs:
            for index in rows:
                if resources[index].per_step < 0:
                    prices[index] *= costs / earns
    return prices / _worth(prices, resources, where)


def _worth(prices: Floats, resources: list[Resource], where: Places) -> float:
    """Price of all that the fleet has in a second; workers with free roles in their dearer one."""
    by_group: dict[int, float] = {}
    total = 0.0
    for price, resource in zip(prices.tolist(), resources, strict=True):
        if resource.group < 0:
            total += price * resource.capacity
        else:
            by_group[resource.group] = by_group.get(resource.group, 0.0) + price * resource.capacity
    for decode, prefill in where.twins:
        total += max(by_group.pop(decode, 0.0), by_group.pop(prefill, 0.0))
    return total + sum(by_group.values())


def _least_cost(
    needs: Needs, prices: Floats, resources: list[Resource], where: Places, steps: dict[int, Steps]
) -> Floats:
    """Each request's price on its cheapest way. Any prices whatever give a true bound with it: 1 / mean."""
    least = np.full(len(needs), np.inf)
    for way, fits in zip(where.ways, _fits(where, needs), strict=True):
        cost = np.zeros(len(needs))
        for price, resource in zip(prices.tolist(), resources, strict=True):
            amount = taken(resource, way, needs, where, steps) if price > 0 else None
            if amount is not None:
                cost += price * amount
        least = np.where(fits, np.minimum(least, cost), least)
    return least


# ---------------------------------------------------------------- what comes out


def _report(
    optimum: Optimum,
    resources: list[Resource],
    prices: Floats,
    cost_s: float,
    where: Places,
    steps: dict[int, Steps],
    needs: Needs,
    sample: int,
) -> Bound:
    few = _spread(needs, sample)
    found = [
        _at_optimum(row, price, optimum, where, few, steps)
        for row, price in zip(resources, prices.tolist(), strict=True)
    ]
    binding = sorted((row for row in found if row.weight > 0.005), key=lambda row: -row.weight)
    names = [f"{where.groups[way.site].name} → {where.groups[way.decode].name}" for way in where.ways]
    shares: dict[str, float] = {}
    for name, share in zip(names, optimum.shares.mean(axis=1).tolist(), strict=True):
        shares[name] = shares.get(name, 0.0) + share
    return Bound(
        rate_per_s=1.0 / cost_s,
        binding=tuple(dict.fromkeys(row.name for row in binding)),
        resources=tuple(found),
        prices=_price_list(found, resources, steps),
        shares=shares,
        roles={
            where.groups[prefill].name: optimum.capacity_s[prefill] / optimum.tau_s
            for _, prefill in where.twins
        },
    )


def _at_optimum(
    resource: Resource, price: float, optimum: Optimum, where: Places, needs: Needs, steps: dict[int, Steps]
) -> ResourceBound:
    asked = 0.0
    for way, share in zip(where.ways, optimum.shares, strict=True):
        amount = taken(resource, way, needs, where, steps)
        if amount is not None:
            asked += float(np.where(share > 0, amount, 0.0) @ share) / len(needs)
    there_is = resource.capacity * optimum.capacity_s.get(resource.group, optimum.tau_s)
    stepping = resource.per_step * optimum.steps.get(resource.group, 0.0)
    if resource.kind == "sequences":
        asked, there_is = stepping, -asked
    elif stepping < 0:
        there_is = -stepping
    else:
        asked += stepping
    return ResourceBound(
        name=resource.name,
        kind=resource.kind,
        place=resource.place,
        capacity=resource.capacity,
        used=asked / there_is if there_is > 0 else 0.0,
        price=price,
        weight=price * there_is / optimum.tau_s,
    )


def _price_list(found: list[ResourceBound], resources: list[Resource], steps: dict[int, Steps]) -> Prices:
    decode: dict[str, DecodePrices] = {}
    for place in dict.fromkeys(row.place for row in found if row.kind == "slots"):
        mine = [
            (row.price, resource)
            for row, resource in zip(found, resources, strict=True)
            if row.place == place
        ]
        least_s = next(steps[row.group].least_s for _, row in mine if row.kind == "slots")
        by_kind = {kind: sum(price for price, row in mine if row.kind == kind) for kind in _DECODE_KINDS}
        decode[place] = DecodePrices(
            second=by_kind["decode"],
            sequence_step=sum(price * row.sequence_s for price, row in mine)
            + by_kind["slots"]
            - by_kind["sequences"],
            context_step=sum(price * row.context_s for price, row in mine),
            page_step=by_kind["pages"] + by_kind["page_seconds"] * least_s,
            page_second=by_kind["page_seconds"],
        )
    return Prices(
        prefill_second={row.place: row.price for row in found if row.kind == "prefill"},
        link_byte={row.place: row.price for row in found if row.kind == "link"},
        decode=decode,
    )


_DECODE_KINDS = ("decode", "slots", "pages", "page_seconds", "sequences")

"""Solves the linear program: least fleet time per request over all ways to split the requests.

Columns, all per mean request: x, each request's share of each way; T, the steps of each decode group; τ,
seconds of the whole fleet; with free roles, τ times the share of a group in each role. The rate is 1/τ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from prfaas.errors import PrfaasError
from simulations.bound.places import Places
from simulations.bound.resources import Resource
from simulations.workload.trace import Floats

Taken = list[list[Floats | None]]
"""[resource][way] → units per request, or None."""


@dataclass(frozen=True, slots=True)
class Optimum:
    tau_s: float
    """Fleet seconds per request."""
    shares: Floats
    """[ways, requests]; each column adds up to 1."""
    steps: dict[int, float]
    """Decode steps per mean request, by decode group."""
    capacity_s: dict[int, float]
    """By group, its fleet seconds per request: τ, or less where its workers share their time with a twin."""
    prices: Floats
    """Dual prices of one unit of each resource; not scaled."""


def solve(where: Places, resources: list[Resource], amounts: Taken, fits: Floats, weights: Floats) -> Optimum:
    """Args:
        fits: [ways, requests] whether a request can go this way.
        weights: of each request, adding up to 1.

    Raises:
        PrfaasError: the solver gave up.
    """
    from scipy.optimize import linprog

    ways, count = fits.shape
    groups = sorted({way.decode for way in where.ways})
    steps_at = {group: ways * count + index for index, group in enumerate(groups)}
    tau_at = ways * count + len(groups)
    twins = [group for pair in where.twins for group in pair]
    role_at = {group: tau_at + 1 + index for index, group in enumerate(twins)}
    columns = tau_at + 1 + len(twins)
    sizes = np.array([resource.capacity or abs(resource.per_step) for resource in resources])

    limits = _Rows()
    for row, resource in enumerate(resources):
        for way, amount in enumerate(amounts[row]):
            if amount is not None:
                taken = np.where(fits[way], amount, 0.0) * weights / sizes[row]
                limits.add(row, way * count + np.arange(count), taken)
        if resource.per_step:
            limits.add(row, steps_at[resource.group], resource.per_step / sizes[row])
        if resource.capacity:
            limits.add(row, role_at.get(resource.group, tau_at), -resource.capacity / sizes[row])
    for row, pair in enumerate(where.twins, start=len(resources)):
        limits.add(row, [role_at[pair[0]], role_at[pair[1]], tau_at], [1.0, 1.0, -1.0])
    once = _Rows()
    for way in range(ways):
        once.add(np.arange(count), way * count + np.arange(count), np.ones(count))

    upper = np.full(columns, np.inf)
    upper[: ways * count] = np.where(fits, np.inf, 0.0).reshape(-1)
    objective = np.zeros(columns)
    objective[tau_at] = 1.0
    answer = linprog(
        objective,
        A_ub=limits.matrix(len(resources) + len(where.twins), columns),
        b_ub=np.zeros(len(resources) + len(where.twins)),
        A_eq=once.matrix(count, columns),
        b_eq=np.ones(count),
        bounds=np.column_stack([np.zeros(columns), upper]),
        method="highs",
    )
    if answer.status != 0:
        raise PrfaasError(f"the bound's linear program was not solved: {answer.message}")
    tau_s = float(answer.x[tau_at])
    return Optimum(
        tau_s=tau_s,
        shares=answer.x[: ways * count].reshape(ways, count),
        steps={group: float(answer.x[at]) for group, at in steps_at.items()},
        capacity_s={group: float(answer.x[role_at.get(group, tau_at)]) for group in range(len(where.groups))},
        prices=np.maximum(-answer.ineqlin.marginals[: len(resources)], 0.0) / sizes,
    )


class _Rows:
    """Collects the entries of a sparse matrix."""

    def __init__(self) -> None:
        self._entries: list[tuple[Any, ...]] = []

    def add(self, rows: Any, columns: Any, values: Any) -> None:
        self._entries.append(tuple(np.broadcast_arrays(np.atleast_1d(rows), columns, values)))

    def matrix(self, rows: int, columns: int) -> Any:
        from scipy.sparse import coo_array

        row, column, value = (np.concatenate(part) for part in zip(*self._entries, strict=True))
        return coo_array((value, (row, column)), shape=(rows, columns)).tocsr()

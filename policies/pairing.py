"""For policies that pick a prefill site by one rule and a decode worker by another, as most routers do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies.base import gather, pick
from policies.types import Candidates, FleetView, Floats, Ints, PlacementKind

WHERE = ("all", "prefill", "pool", "remote", "local")


@dataclass(frozen=True, slots=True)
class Groups:
    """Row numbers by where the candidate's site is."""

    all: Ints
    prefill: Ints
    """Prefill workers of any cluster."""
    pool: Ints
    """Of the decode worker's own cluster."""
    remote: Ints
    """Of other clusters."""
    local: Ints
    """The decode workers themselves."""

    @classmethod
    def of(cls, candidates: Candidates) -> Groups:
        kind = candidates.kind
        return cls(
            all=np.arange(len(kind)),
            prefill=np.flatnonzero(kind >= PlacementKind.POOL),
            pool=np.flatnonzero(kind == PlacementKind.POOL),
            remote=np.flatnonzero(kind == PlacementKind.REMOTE),
            local=np.flatnonzero(kind < PlacementKind.POOL),
        )


class Grouping:
    """`Groups` of each request's candidates. They are mostly the same pairs, in the very same tuples, as the
    request's before: then so are the groups."""

    def __init__(self) -> None:
        self._pairs: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self._groups: Groups | None = None

    def of(self, candidates: Candidates) -> Groups:
        decode, site = self._pairs
        if self._groups is None or candidates.decode is not decode or candidates.site is not site:
            self._pairs = (candidates.decode, candidates.site)
            self._groups = Groups.of(candidates)
        return self._groups


class Where:
    """The sites that a policy considers: the name of a group of `Groups`.

    Raises:
        ValueError: there is no such group.
    """

    def __init__(self, where: str) -> None:
        if where not in WHERE:
            raise ValueError(f"where must be one of {', '.join(WHERE)}, is `{where}`")
        self._where = where
        self._grouping = Grouping()

    def rows(self, candidates: Candidates) -> Ints:
        """Rows of these sites; where there are none, all: policies that take a `where` know no refusal."""
        groups = self._grouping.of(candidates)
        rows: Ints = getattr(groups, self._where)
        return rows if len(rows) else groups.all


def site_requests(candidates: Candidates, view: FleetView) -> Floats:
    """Requests queued or running at each row's site."""
    return gather(view.waiting, candidates.site) + gather(view.running, candidates.site)


def decode_requests(candidates: Candidates, view: FleetView) -> Floats:
    """Requests on each row's decode worker, those whose KV is still to come included."""
    return gather(view.waiting, candidates.decode) + gather(view.running, candidates.decode)


def decode_occupancy(candidates: Candidates, view: FleetView) -> Floats:
    """Share of each row's decode worker's KV pool that is in use or promised; of equal ones, fewer requests
    count as a little less."""
    free = gather(view.free_pages, candidates.decode) / gather(view.total_pages, candidates.decode)
    occupancy: Floats = 1 - free + 1e-9 * decode_requests(candidates, view)
    return occupancy


def same(numbers: Floats, rows: Ints, row: int) -> Ints:
    """Those of `rows` whose worker is that of `row`.

    Args:
        numbers: `view.number` of each candidate's site or decode worker.
    """
    kept: Ints = rows[numbers[rows] == numbers[row]]
    return kept


def site_then_decode(
    site_value: Floats,
    decode_value: Floats,
    candidates: Candidates,
    view: FleetView,
    rng: np.random.Generator,
    rows: Ints,
) -> int:
    """The row with the least site value, of those of its site the one with the least decode value.

    Equal sites are chosen among by chance, and equal decode workers too, so that they share the load.
    """
    best = pick(rows, rng, site_value)
    return pick(same(gather(view.number, candidates.site), rows, best), rng, decode_value)

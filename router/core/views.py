"""Read-only pictures of the scheduler's state, for policies, metrics and debugging."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from policies.types import FleetView, Floats, Ints
from router.core import tables as t
from router.core.config import SchedulerConfig
from router.core.fleet import Fleet, WorkerState
from router.core.network import Network
from router.core.prefix_index import PrefixIndex

Number = TypeVar("Number")
Fact = TypeVar("Fact")


class Slots:
    """Table columns of whole tuples of names. The tuples of a `Candidates` are mostly those of the topology,
    the same objects for every request, so looking them up by identity saves a policy most of its time."""

    KEPT = 8

    def __init__(self, owner: Fleet | Network) -> None:
        self.owner = owner
        self._known: dict[int, tuple[tuple[str, ...], Mapping[str, int], Ints]] = {}

    def of(self, names: tuple[str, ...]) -> Ints:
        columns = self.owner.columns
        known = self._known.get(id(names))
        if known is not None and known[0] is names and known[1] is columns:
            return known[2]
        slots: Ints = np.fromiter(map(columns.__getitem__, names), np.int64, len(names))
        if len(self._known) >= self.KEPT:
            self._known.clear()
        self._known[id(names)] = (names, columns, slots)
        return slots


class TableRow(Mapping[str, Number]):
    """One quantity of all workers or links by name, read from the table when asked for."""

    def __init__(self, slots: Slots, row: int, cast: Callable[[np.float64], Number]) -> None:
        self._slots, self._row = slots, row
        self._cast: Callable[[np.float64], Number] = cast

    def __getitem__(self, name: str) -> Number:
        owner = self._slots.owner
        return self._cast(owner.table.values[self._row, owner.columns[name]])

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots.owner.columns)

    def __len__(self) -> int:
        return len(self._slots.owner.columns)

    def take(self, names: tuple[str, ...]) -> Floats:
        """The values of `names`, see `policies.base.gather`."""
        values: Floats = self._slots.owner.table.values[self._row].take(self._slots.of(names))
        return values


class SlotNumbers(Mapping[str, int]):
    """Each worker's column in the table."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots

    def __getitem__(self, name: str) -> int:
        return self._slots.owner.columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots.owner.columns)

    def __len__(self) -> int:
        return len(self._slots.owner.columns)

    def take(self, names: tuple[str, ...]) -> Ints:
        """The numbers of `names`, see `policies.base.gather`."""
        return self._slots.of(names)


class WorkerFacts(Mapping[str, Fact]):
    """What `read` tells of each worker, by name."""

    def __init__(self, fleet: Fleet, read: Callable[[WorkerState], Fact]) -> None:
        self._fleet, self._read = fleet, read

    def __getitem__(self, name: str) -> Fact:
        worker = self._fleet.get(name)
        if worker is None:
            raise KeyError(name)
        return self._read(worker)

    def __iter__(self) -> Iterator[str]:
        return iter(self._fleet.columns)

    def __len__(self) -> int:
        return len(self._fleet)


class LinkUtilisation(Mapping[str, float]):
    """Booked seconds per second by direction, decayed to `now_s`."""

    def __init__(self, network: Network, window_s: float) -> None:
        self.now_s = 0.0
        self._network, self._window_s = network, window_s

    def __getitem__(self, name: str) -> float:
        column = self._network.table.values[:, self._network.columns[name]]
        decay = math.exp((float(column[t.LINK_AT]) - self.now_s) / self._window_s)
        return float(column[t.LINK_WORK]) * decay / self._window_s

    def __iter__(self) -> Iterator[str]:
        return iter(self._network.columns)

    def __len__(self) -> int:
        return len(self._network.columns)


@dataclass(frozen=True, slots=True)
class WorkerView:
    name: str
    cluster: str
    role: str
    ready: bool
    measured: bool
    """Whether its profile was measured (else the default)."""
    prefill_factor: float
    """Actual ÷ profile, of prefills lately."""
    decode_factor: float
    prefill_backlog_s: float
    queued_tokens: int
    running: int
    waiting: int
    free_pages: int
    booked_prefills: int
    booked_decodes: int
    cached_blocks: int
    needs_resync: bool


@dataclass(frozen=True, slots=True)
class LinkView:
    """One direction of a link."""

    name: str
    source: str
    target: str
    rate_bytes_per_s: float
    rtt_s: float
    confidence: float
    samples: int
    probe_due: bool
    booked_transfers: int
    backlog_bytes: float
    errors_total: int


@dataclass(slots=True)
class Counters:
    """Running totals since the start."""

    placements: dict[str, int] = field(default_factory=dict)
    """By placement kind."""
    refused: dict[str, int] = field(default_factory=dict)
    """By `NoCapacity.reason`."""
    not_least_cost: int = 0
    bookings_expired: int = 0
    index_gaps: int = 0
    index_snapshots: int = 0
    """Snapshots of a worker's cache taken in: at least one per worker, one more after each gap."""
    policy_faults: int = 0
    policy_overruns: int = 0
    policy_replaced: str = ""
    """Why, where it was."""


class FleetViews:
    """The `FleetView` that policies see: one object, whose mappings are live, so that a placement pays for
    setting its clock only."""

    def __init__(self, fleet: Fleet, network: Network, config: SchedulerConfig) -> None:
        self._fleet = fleet
        self._columns: Mapping[str, int] = fleet.columns
        self._utilisation = LinkUtilisation(network, config.rate_window_s)
        worker, link = Slots(fleet), Slots(network)
        self._view = FleetView(
            now_s=0.0,
            workers=tuple(fleet.columns),
            queued_tokens=TableRow(worker, t.QUEUED_TOKENS, int),
            running=TableRow(worker, t.RUNNING, int),
            link_bytes_per_s=TableRow(link, t.RATE, float),
            link_utilisation=self._utilisation,
            number=SlotNumbers(worker),
            cluster=WorkerFacts(fleet, lambda worker: worker.info.cluster),
            role=WorkerFacts(fleet, lambda worker: worker.info.role),
            ready=WorkerFacts(fleet, lambda worker: worker.ready),
            waiting=TableRow(worker, t.WAITING, int),
            free_pages=TableRow(worker, t.FREE_PAGES, int),
            total_pages=TableRow(worker, t.TOTAL_PAGES, int),
            page_tokens=TableRow(worker, t.PAGE_TOKENS, int),
            running_context_tokens=TableRow(worker, t.RUNNING_CONTEXT, int),
            max_running=TableRow(worker, t.MAX_RUNNING, int),
            decode_base_s=TableRow(worker, t.DECODE_BASE, float),
            decode_sequence_s=TableRow(worker, t.DECODE_SEQUENCE, float),
            decode_context_s=TableRow(worker, t.DECODE_CONTEXT, float),
            prefill_ends_s=TableRow(worker, t.FREE_AT, float),
            link_drains_s=TableRow(link, t.DRAINED_AT, float),
        )

    def at(self, now_s: float) -> FleetView:
        """The fleet at `now_s`: the same object as before."""
        self._utilisation.now_s = now_s
        object.__setattr__(self._view, "now_s", now_s)  # frozen for policies, not for us
        if self._fleet.columns is not self._columns:
            self._columns = self._fleet.columns
            object.__setattr__(self._view, "workers", tuple(self._columns))
        return self._view


def worker_views(fleet: Fleet, index: PrefixIndex, now_s: float) -> Iterator[WorkerView]:
    for worker in fleet:
        column = fleet.table.values[:, worker.slot]
        yield WorkerView(
            name=worker.name,
            cluster=worker.info.cluster,
            role=worker.info.role,
            ready=worker.ready,
            measured=worker.measured,
            prefill_factor=worker.profile.prefill_factor,
            decode_factor=worker.profile.decode_factor,
            prefill_backlog_s=max(0.0, float(column[t.FREE_AT]) - now_s),
            queued_tokens=int(column[t.QUEUED_TOKENS]),
            running=int(column[t.RUNNING]),
            waiting=int(column[t.WAITING]),
            free_pages=int(column[t.FREE_PAGES]),
            booked_prefills=len(worker.prefills),
            booked_decodes=len(worker.decodes),
            cached_blocks=index.blocks(worker.slot),
            needs_resync=index.needs_resync(worker.slot),
        )


def link_views(network: Network, now_s: float) -> Iterator[LinkView]:
    for link in network:
        estimator = link.estimator
        yield LinkView(
            name=link.name,
            source=link.source,
            target=link.target,
            rate_bytes_per_s=estimator.rate(now_s),
            rtt_s=estimator.rtt_s,
            confidence=estimator.confidence(now_s),
            samples=estimator.samples,
            probe_due=estimator.probe_due(now_s),
            booked_transfers=len(link.transfers),
            backlog_bytes=link.backlog_bytes(now_s),
            errors_total=estimator.errors_total,
        )

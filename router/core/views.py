"""Read-only pictures of the scheduler's state, for policies, metrics and debugging."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from policies.types import FleetView, Floats
from router.core import tables as t
from router.core.config import SchedulerConfig
from router.core.fleet import Fleet
from router.core.network import Network
from router.core.prefix_index import PrefixIndex

Number = TypeVar("Number")


class ColumnMapping(Mapping[str, Number]):
    """One row of a table by name, read when asked for; cheap to make for every placement."""

    def __init__(
        self, columns: Mapping[str, int], values: Floats, cast: Callable[[np.float64], Number]
    ) -> None:
        self._columns, self._values = columns, values
        self._cast: Callable[[np.float64], Number] = cast

    def __getitem__(self, name: str) -> Number:
        return self._cast(self._values[self._columns[name]])

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


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


def fleet_view(fleet: Fleet, network: Network, now_s: float, config: SchedulerConfig) -> FleetView:
    """The fleet as policies see it; its mappings are live."""
    columns, links = fleet.columns, network.columns
    workers, rows = fleet.table.values, network.table.values
    weight = np.exp((rows[t.LINK_AT] - now_s) / config.rate_window_s) / config.rate_window_s
    return FleetView(
        now_s=now_s,
        workers=tuple(columns),
        queued_tokens=ColumnMapping(columns, workers[t.QUEUED_TOKENS], int),
        running=ColumnMapping(columns, workers[t.RUNNING], int),
        link_bytes_per_s=ColumnMapping(links, rows[t.RATE], float),
        link_utilisation=ColumnMapping(links, rows[t.LINK_WORK] * weight, float),
    )


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

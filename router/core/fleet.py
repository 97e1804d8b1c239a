"""Workers as the scheduler knows them: what they are, what they last said, what is booked on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from prfaas.engine.interface import StepProfile
from prfaas.protocol.messages import WorkerInfo, WorkerStatus
from router.core import tables as t
from router.core.bookings import Booking, pages_pinned
from router.core.config import SchedulerConfig
from router.core.profiles import RefinedProfile

FOREIGN_WAIT_S = 1.0
"""Guess where a worker is full of what this router has not placed."""


@dataclass(slots=True)
class DecodeLoad:
    running: int = 0
    """Sequences decoding."""
    context_tokens: int = 0
    awaiting_kv: int = 0
    """Booked requests whose prompt is prefilled elsewhere."""
    held_s: float = 0.0
    """Booked page-seconds over the pool's size."""
    ends_s: list[float] = field(default_factory=list)
    """When each booked answer is expected to end."""


@dataclass(slots=True, eq=False)
class WorkerState:
    info: WorkerInfo
    slot: int
    """Column in the worker table and bit in the prefix index."""
    profile: RefinedProfile
    ready: bool
    measured: bool = False
    """Whether the profile was sent by the worker."""
    status: WorkerStatus | None = None
    status_at_s: float = 0.0
    prefills: dict[str, Booking] = field(default_factory=dict)
    decodes: dict[str, Booking] = field(default_factory=dict)
    decodes_changed_s: float = 0.0

    @property
    def name(self) -> str:
        return self.info.worker

    @property
    def decodes_here(self) -> bool:
        return self.info.role == "decode"

    def fresh_status(self, now_s: float, config: SchedulerConfig) -> WorkerStatus | None:
        return self.status if now_s - self.status_at_s <= config.status_fresh_s else None

    def shown(self, booking: Booking) -> bool:
        """Whether the last status would show this booking: one made after it must not be erased by it."""
        return booking.visible_s <= self.status_at_s

    def prefill_free_at(self, now_s: float, config: SchedulerConfig) -> float:
        """When the prefill work queued here ends: what the worker says is left, then what it cannot know."""
        status = self.fresh_status(now_s, config)
        free_at_s = 0.0
        waiting = list(self.prefills.values())
        if status is not None:
            shown = [b for b in waiting if self.shown(b)]
            waiting = [b for b in waiting if not self.shown(b)]
            # What the worker has beyond the shown bookings may be unseen ones that it has by now.
            beyond = max(0, status.waiting_prefill_tokens - sum(b.tokens for b in shown))
            left = status.waiting_prefill_tokens - min(beyond, sum(b.tokens for b in waiting))
            free_at_s = self.status_at_s + left * self._seconds_per_token(shown)
        for booking in waiting:
            free_at_s = max(free_at_s, booking.arrive_s) + booking.work_s
        return free_at_s

    def _seconds_per_token(self, bookings: list[Booking]) -> float:
        tokens = sum(b.tokens for b in bookings)
        if tokens:
            return sum(b.work_s for b in bookings) / tokens
        chunk = self.profile.profile.chunk_tokens
        return self.profile.prefill_s(chunk, 0) / chunk

    def decode_load(self, now_s: float, config: SchedulerConfig) -> DecodeLoad:
        """What runs here: by our bookings, or by the worker's word where that is newer."""
        load = DecodeLoad()
        total_pages = max(1, self.info.layout.num_pages)
        for booking in self.decodes.values():
            end_s = self._end(booking, now_s)
            load.ends_s.append(end_s)
            load.held_s += (end_s - now_s) * booking.decode_pages / total_pages
            if booking.decoding:
                load.running += 1
                load.context_tokens += booking.context_tokens
            elif booking.site is not self:
                load.awaiting_kv += 1
        status = self.fresh_status(now_s, config)
        if status is not None and self.status_at_s > self.decodes_changed_s:
            prefilling = len(self.decodes) - load.running - load.awaiting_kv
            load.running = max(load.running, status.running - prefilling)
            load.context_tokens = max(load.context_tokens, status.running_context_tokens)
        return load

    def slot_at(self, load: DecodeLoad, now_s: float) -> float:
        """When one more sequence may decode here; 0 = now."""
        full_by = max(load.running, len(self.decodes)) - self.info.max_running
        if full_by < 0:
            return 0.0
        if not load.ends_s:
            return now_s + FOREIGN_WAIT_S
        return sorted(load.ends_s)[min(full_by, len(load.ends_s) - 1)]

    def free_pages(self, now_s: float, config: SchedulerConfig) -> int:
        """Pages a new request can have: free and evictable ones, less what is booked and not yet seen."""
        mine = [*self.decodes.values(), *(b for b in self.prefills.values() if b.decode is not self)]
        status = self.fresh_status(now_s, config)
        if status is None or status.total_pages == 0:
            return self.info.layout.num_pages - pages_pinned(self, mine)
        unseen = [b for b in mine if not self.shown(b)]
        return status.free_pages - pages_pinned(self, unseen)

    def pages_at(self, needed: int, now_s: float, free: float) -> float:
        """When `needed` pages are free here, taking bookings to end as predicted."""
        releases = [(self._end(b, now_s), b.decode_pages) for b in self.decodes.values()]
        releases += [
            (max(b.transfer_end_s, now_s), b.site_pages)
            for b in self.prefills.values()
            if b.decode is not self
        ]
        at_s = now_s
        for end_s, pages in sorted(releases):
            if free >= needed:
                break
            at_s, free = end_s, free + pages
        return at_s if free >= needed else at_s + FOREIGN_WAIT_S

    def _end(self, booking: Booking, now_s: float) -> float:
        """Expected end of a booked answer; an overdue one is given a quarter of its length again."""
        if booking.end_s > now_s:
            return booking.end_s
        return now_s + 0.25 * max(booking.end_s - booking.booked_s, 0.1)


class Fleet:
    """All workers, by name, and their table of numbers."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._workers: dict[str, WorkerState] = {}
        self.table = t.Table(t.WORKER_ROWS)
        self.columns: dict[str, int] = {}
        """Column of each worker in the table, by name."""
        self.version = 0
        """Counts changes of membership and readiness."""

    def __iter__(self) -> Iterator[WorkerState]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, name: str) -> WorkerState | None:
        return self._workers.get(name)

    def join(self, info: WorkerInfo, ready: bool, now_s: float) -> WorkerState:
        profile = RefinedProfile(self._config.default_profile, self._config.overhead_window)
        worker = WorkerState(info, self.table.take(), profile, ready)
        self._workers[info.worker] = worker
        self.columns = {**self.columns, info.worker: worker.slot}
        self.version += 1
        self._write_constants(worker)
        self.refresh(worker, now_s)
        return worker

    def leave(self, worker: WorkerState) -> None:
        del self._workers[worker.name]
        self.columns = {name: column for name, column in self.columns.items() if name != worker.name}
        self.table.give_back(worker.slot)
        self.version += 1

    def set_profile(self, worker: WorkerState, profile: StepProfile, now_s: float) -> None:
        worker.profile = RefinedProfile(profile, self._config.overhead_window)
        worker.measured = True
        self.refresh(worker, now_s)

    def set_status(self, worker: WorkerState, status: WorkerStatus, now_s: float) -> None:
        worker.status, worker.status_at_s = status, now_s
        ready = status.state == "ready"
        if ready != worker.ready:
            worker.ready = ready
            self.version += 1
        if status.running > 0 and status.waiting_prefill_tokens == 0:
            worker.profile.observe_decode_step(
                status.running, status.running_context_tokens, status.decode_step_s
            )
        self.refresh(worker, now_s)

    def _write_constants(self, worker: WorkerState) -> None:
        info, column = worker.info, self.table.values[:, worker.slot]
        column[t.TOTAL_PAGES] = info.layout.num_pages
        column[t.PAGE_TOKENS] = info.layout.page_size
        column[t.PAGE_BYTES] = info.layout.page_bytes * info.layout.num_layers
        column[t.LAYERS] = info.layout.num_layers
        column[t.MAX_QUEUE] = info.max_queue
        column[t.MAX_RUNNING] = info.max_running

    def refresh(self, worker: WorkerState, now_s: float) -> None:
        """Write what is derived from profile, status and bookings into the worker's column."""
        config, column = self._config, self.table.values[:, worker.slot]
        profile = worker.profile.profile
        prefill, decode = worker.profile.prefill_factor, worker.profile.decode_factor
        column[t.CHUNK : t.RUNNING] = (
            profile.chunk_tokens,
            prefill * profile.prefill_base_s,
            prefill * profile.prefill_token_s,
            prefill * profile.prefill_context_s,
            decode * profile.decode_base_s,
            decode * profile.decode_sequence_s,
            decode * profile.decode_context_s,
        )
        load = worker.decode_load(now_s, config)
        status = worker.fresh_status(now_s, config)
        waiting = len(worker.prefills) + load.awaiting_kv
        column[t.FREE_AT] = worker.prefill_free_at(now_s, config)
        column[t.RUNNING : t.FREE_PAGES] = (
            load.running,
            load.context_tokens if load.running else 0,
            worker.slot_at(load, now_s),
        )
        column[t.FREE_PAGES] = worker.free_pages(now_s, config)
        column[t.WAITING] = max(waiting, status.waiting if status else 0)
        column[t.QUEUED_TOKENS] = sum([b.tokens for b in worker.prefills.values()])
        column[t.PAGES_IDLE_AT] = now_s + load.held_s

"""Workers as the scheduler knows them: what they are, what they last said, what is booked on them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from prfaas.engine.interface import StepProfile
from prfaas.protocol.messages import WorkerInfo, WorkerStatus
from router.core import tables as t
from router.core.bookings import Booking
from router.core.config import SchedulerConfig
from router.core.profiles import RefinedProfile


@dataclass(slots=True, eq=False)
class WorkerState:
    info: WorkerInfo
    slot: int
    """Column in the worker table and bit in the prefix index."""
    profile: RefinedProfile
    ready: bool
    measured: bool = False
    """Whether the profile was sent by the worker."""
    prefills: dict[str, Booking] = field(default_factory=dict)
    decodes: dict[str, Booking] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.info.worker

    @property
    def decodes_here(self) -> bool:
        return self.info.role == "decode"


class Fleet:
    """All workers, by name, and their table of numbers. What depends on bookings is written into the table
    by `tally.tally`."""

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

    def join(self, info: WorkerInfo, ready: bool) -> WorkerState:
        profile = RefinedProfile(self._config.default_profile, self._config.overhead_window)
        worker = WorkerState(info, self.table.take(), profile, ready)
        self._workers[info.worker] = worker
        self.columns = {**self.columns, info.worker: worker.slot}
        self.version += 1
        self._write_constants(worker)
        self._write_profile(worker)
        return worker

    def leave(self, worker: WorkerState) -> None:
        del self._workers[worker.name]
        self.columns = {name: column for name, column in self.columns.items() if name != worker.name}
        self.table.give_back(worker.slot)
        self.version += 1

    def set_profile(self, worker: WorkerState, profile: StepProfile) -> None:
        worker.profile = RefinedProfile(profile, self._config.overhead_window)
        worker.measured = True
        self._write_profile(worker)

    def set_status(self, worker: WorkerState, status: WorkerStatus, now_s: float) -> None:
        # One by one: quicker than a slice, which would make an array of them first.
        values, slot = self.table.values, worker.slot
        values[t.STATUS_AT, slot] = now_s
        values[t.STATUS_WAITING, slot] = status.waiting
        values[t.STATUS_RUNNING, slot] = status.running
        values[t.STATUS_CONTEXT, slot] = status.running_context_tokens
        values[t.STATUS_PREFILL_TOKENS, slot] = status.waiting_prefill_tokens
        values[t.STATUS_FREE_PAGES, slot] = status.free_pages
        values[t.STATUS_PAGES, slot] = status.total_pages
        ready = status.state == "ready"
        if ready != worker.ready:
            worker.ready = ready
            self.version += 1
        if status.running > 0 and status.waiting_prefill_tokens == 0:
            before = worker.profile.decode_factor
            worker.profile.observe_decode_step(
                status.running, status.running_context_tokens, status.decode_step_s
            )
            if worker.profile.decode_factor != before:
                self._write_profile(worker)

    def observe_prefill(
        self, worker: WorkerState, new_tokens: int, cached_tokens: int, mixed_step_s: float, actual_s: float
    ) -> None:
        """Learn from a prefill on this worker, see `RefinedProfile.observe_prefill`.

        Args:
            mixed_step_s: what decodes that shared each of its chunks' steps are held to have taken.
        """
        before = worker.profile.prefill_factor
        chunks = math.ceil(new_tokens / worker.profile.profile.chunk_tokens)
        worker.profile.observe_prefill(new_tokens, cached_tokens, chunks * mixed_step_s, actual_s)
        if worker.profile.prefill_factor != before:
            self._write_profile(worker)

    def decodes_changed(self, worker: WorkerState, now_s: float) -> None:
        """A booked answer has begun or ended: statuses from before know less."""
        self.table.values[t.DECODES_CHANGED_AT, worker.slot] = now_s

    def _write_constants(self, worker: WorkerState) -> None:
        info, column = worker.info, self.table.values[:, worker.slot]
        column[t.TOTAL_PAGES] = info.layout.num_pages
        column[t.PAGE_TOKENS] = info.layout.page_size
        column[t.PAGE_BYTES] = info.layout.page_bytes * info.layout.num_layers
        column[t.STATE_BYTES] = info.layout.state_bytes
        column[t.LAYERS] = info.layout.num_layers
        column[t.MAX_QUEUE] = info.max_queue
        column[t.MAX_RUNNING] = info.max_running
        column[t.STATUS_AT] = -math.inf

    def _write_profile(self, worker: WorkerState) -> None:
        profile = worker.profile.profile
        prefill, decode = worker.profile.prefill_factor, worker.profile.decode_factor
        values, slot = self.table.values, worker.slot
        values[t.CHUNK, slot] = profile.chunk_tokens
        values[t.PREFILL_BASE, slot] = prefill * profile.prefill_base_s
        values[t.PREFILL_TOKEN, slot] = prefill * profile.prefill_token_s
        values[t.PREFILL_CONTEXT, slot] = prefill * profile.prefill_context_s
        values[t.DECODE_BASE, slot] = decode * profile.decode_base_s
        values[t.DECODE_SEQUENCE, slot] = decode * profile.decode_sequence_s
        values[t.DECODE_CONTEXT, slot] = decode * profile.decode_context_s

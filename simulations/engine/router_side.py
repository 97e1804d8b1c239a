"""What the router knows, as late as live: an inbox of delayed inputs in front of the live scheduler.

Inputs are applied right before the scheduler is asked something: nothing between two decisions can tell
whether it was applied earlier, and each carries the time at which it arrived.

Statuses. A live worker sends one every period; most repeat the former one. Here a worker sends one at the
first period after something has changed on it, with its content as of that moment. Where a worker has work
but nothing changes (a long answer alone), one is sent every `KEEP_FRESH_S`, so that the scheduler, which does
not trust statuses older than `status_fresh_s`, sees the same freshness as live.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import floor, inf

import numpy as np

from policies.types import Command
from prfaas.protocol.messages import KVRemoved, KVSnapshot, KVStored, LinkCounters, WorkerStatus
from router.core.decision import Decision
from router.core.events import (
    KVReceived,
    PlaceRequest,
    SchedulerEvent,
    StatusReceived,
    WorkerJoined,
    WorkerLost,
    WorkerProfile,
)
from router.core.scheduler import Scheduler
from simulations.engine.decode_worker import DecodeWorker
from simulations.engine.loop import Loop
from simulations.engine.prefill_worker import PrefillWorker

Worker = DecodeWorker | PrefillWorker
KEEP_FRESH_S = 2.0


class _Feed:
    """One worker's stream of events to the router."""

    __slots__ = ("kv_sequence", "last_status_s", "next_status_s", "phase_s", "worker")

    def __init__(self, worker: Worker, phase_s: float) -> None:
        self.worker = worker
        self.phase_s = phase_s
        self.next_status_s = inf
        """When the next status is due; infinity while there is nothing new to say."""
        self.last_status_s = -inf
        self.kv_sequence = 0


class RouterSide:
    """The scheduler and its inbox.

    Args:
        period_s, delay_s: of statuses; from any event to its arrival at the router.
    """

    def __init__(self, scheduler: Scheduler, loop: Loop, period_s: float, delay_s: float) -> None:
        self.scheduler = scheduler
        self._loop = loop
        self._period_s = period_s
        self._delay_s = delay_s
        self._floor_s = 0.0
        self._inbox: list[tuple[float, int, SchedulerEvent]] = []
        self._count = 0
        self._feeds: dict[str, _Feed] = {}
        self._planned: list[tuple[float, int, _Feed]] = []
        """Heap of statuses to come: an entry holds while it says when its feed's next one is due."""

    # ------------------------------------------------------------ asking the scheduler

    def place(self, request: PlaceRequest) -> Decision:
        """Ask for a placement now.

        Raises:
            NoCapacity: as the scheduler says.
        """
        self.drain(request.now_s)
        return self.scheduler.place(request)

    def control(self, now_s: float) -> list[Command]:
        """The tick."""
        for feed in self._feeds.values():
            if feed.worker.live and feed.next_status_s == inf and now_s - feed.last_status_s >= KEEP_FRESH_S:
                self._send_status(feed, now_s)
        self.drain(now_s)
        return self.scheduler.control(now_s)

    def drain(self, now_s: float) -> None:
        """Apply what has arrived by `now_s`."""
        until_s, planned = now_s - self._delay_s, self._planned
        while planned and planned[0][0] <= until_s:
            at_s, _, feed = heappop(planned)
            if feed.next_status_s == at_s:
                self._send_status(feed, until_s)
        inbox, apply = self._inbox, self.scheduler.apply
        while inbox and inbox[0][0] <= now_s:
            apply(heappop(inbox)[2])

    def finish(self) -> None:
        """The run is over: what is still under way arrives."""
        while self._inbox:
            self.scheduler.apply(heappop(self._inbox)[2])

    # ------------------------------------------------------------ what it hears

    def due_s(self, at_s: float) -> float:
        """When the router hears of something that happens at `at_s`."""
        due_s = at_s + self._delay_s
        return due_s if due_s > self._floor_s else self._floor_s

    def hear(self, event: SchedulerEvent) -> None:
        """Put an event into the inbox; its `now_s` is `due_s` of when it happened."""
        self._count += 1
        heappush(self._inbox, (event.now_s, self._count, event))

    def lag(self, delay_s: float) -> None:
        """From now on everything takes `delay_s` to the router; nothing overtakes what is under way."""
        self._floor_s = self._loop.now_s + self._delay_s
        self._delay_s = delay_s

    def joined(self, worker: Worker, phase: float) -> None:
        """A worker, or another incarnation of it, says hello: what it is, how fast, and what it caches.
        Those of the begin are known before the first request.

        Args:
            phase: 0 … 1, where in the period its statuses are sent.
        """
        now_s = self.due_s(self._loop.now_s) if self._loop.now_s > 0 else 0.0
        info = worker.spec.info(worker.role, worker.incarnation)
        self._feeds[worker.name] = _Feed(worker, phase * self._period_s)
        self.hear(WorkerJoined(info=info, ready=True, now_s=now_s))
        self.hear(WorkerProfile(worker=worker.name, profile=worker.spec.times.router_profile(), now_s=now_s))
        snapshot = KVSnapshot(
            generation=worker.incarnation, sequence=0, page_size=worker.spec.page_size, block_hashes=[]
        )
        self.hear(KVReceived(worker=worker.name, event=snapshot, now_s=now_s))

    def lost(self, worker: Worker, noticed_s: float) -> None:
        """The worker is gone; the router notices at `noticed_s`."""
        feed = self._feeds.pop(worker.name, None)
        if feed is not None:
            feed.next_status_s = inf
        self.hear(WorkerLost(worker=worker.name, now_s=noticed_s))

    def before_change(self, worker: Worker) -> None:
        """Something is about to happen on the worker: a status that was due before shows it as it is."""
        feed = self._feeds.get(worker.name)
        if feed is None or feed.worker is not worker:
            return
        now_s = self._loop.now_s
        if feed.next_status_s <= now_s:
            self._send_status(feed, now_s)
        elif feed.next_status_s < inf:
            return
        periods = floor((now_s - feed.phase_s) / self._period_s) + 1
        feed.next_status_s = at_s = feed.phase_s + periods * self._period_s
        self._count += 1
        heappush(self._planned, (at_s, self._count, feed))

    def tell_now(self, worker: Worker) -> None:
        """The worker's state has changed: its status is sent at once, as live."""
        feed = self._feeds[worker.name]
        self._emit(feed, self._loop.now_s)

    def kv_changed(self, worker: Worker) -> None:
        """Tell what the worker's cache has evicted and published since the last call, in this order."""
        cache = worker.cache
        if not (cache.stored or cache.removed):
            return
        feed = self._feeds.get(worker.name)
        removed, cache.removed = cache.removed, []
        stored, cache.stored = cache.stored, []
        if feed is None or feed.worker is not worker:
            return
        now_s = self.due_s(self._loop.now_s)
        for kind, runs in ((KVRemoved, removed), (KVStored, stored)):
            if runs:
                feed.kv_sequence += 1
                blocks = np.concatenate(runs) if len(runs) > 1 else np.ascontiguousarray(runs[0])
                event = kind(generation=worker.incarnation, sequence=feed.kv_sequence, block_hashes=blocks)
                self.hear(KVReceived(worker=worker.name, event=event, now_s=now_s))

    def _send_status(self, feed: _Feed, until_s: float) -> None:
        """Send the status of the last period that ends by `until_s`."""
        at_s = feed.phase_s + floor((until_s - feed.phase_s) / self._period_s) * self._period_s
        self._emit(feed, at_s)

    def _emit(self, feed: _Feed, at_s: float) -> None:
        feed.next_status_s = inf
        feed.last_status_s = at_s
        due_s = self.due_s(at_s)
        self._count += 1
        status = StatusReceived(status=status_of(feed.worker, at_s), now_s=due_s)
        heappush(self._inbox, (due_s, self._count, status))


def status_of(worker: Worker, at_s: float) -> WorkerStatus:
    """What the worker would say of itself at `at_s`, nothing having changed on it since."""
    cache = worker.cache
    links: list[LinkCounters] = []
    if isinstance(worker, DecodeWorker):
        started = left = context = 0
        step_s = 0.0
        batch, live = worker.batch, len(worker.live)
        if worker.waiting:
            started = sum([r.first_chunk_s >= 0 for r in worker.waiting])
            left = worker.prefill_left(at_s)
        waiting, running = live - batch - started, batch + started
        if batch:
            context = worker.context_at(at_s)
            step_s = worker.step_s(context)
    else:
        running, context, step_s = int(worker.running is not None), 0, 0.0
        waiting, live = len(worker.queue), len(worker.live)
        left = worker.prefill_left(at_s)
        links = [
            LinkCounters(
                cluster=cluster,
                bytes_total=int(meter.moved),
                sampled_bytes_total=int(meter.sampled),
                sampled_s_total=meter.sampled_s,
                rtt_s=meter.rtt_s,
            )
            for cluster, meter in worker.meters.items()
        ]
    available, total = cache.free + cache.idle_pages, cache.total
    return WorkerStatus(
        worker=worker.name,
        incarnation=worker.incarnation,
        role=worker.role,
        state="ready" if worker.ready else "draining",
        waiting=waiting,
        running=running,
        waiting_prefill_tokens=left,
        running_context_tokens=context,
        total_pages=total,
        free_pages=available,
        cached_pages=cache.idle_pages,
        pinned_pages=total - available,
        live_grants=live,
        decode_step_s=step_s,
        links=links,
    )

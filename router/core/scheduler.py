"""The brain: events in, decisions out, load booked in the same call as the choice.

A synchronous state machine without clock or I/O. The gateway and the simulator drive the same object, and
its inputs, written down in order, reproduce every decision.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import numpy as np
from msgspec.structs import replace

from policies.cost_model import CostModel
from policies.types import Command, FleetView, Outcome, PlacementKind, Policy, RequestView
from router.core import block_table, book, costs
from router.core.block_table import Hashes, as_hashes
from router.core.bookings import Booking, Bookings
from router.core.candidates import Weighed, candidates_of
from router.core.config import SchedulerConfig
from router.core.decision import Decision, NoCapacity
from router.core.events import (
    Failed,
    Finished,
    FirstToken,
    KVReceived,
    LinkConfigured,
    PlaceRequest,
    PolicyOverran,
    PrefillReported,
    Released,
    SchedulerEvent,
    SchedulerInput,
    StatusReceived,
    Tick,
    WorkerJoined,
    WorkerLost,
    WorkerProfile,
)
from router.core.feasibility import avoided, no_worker, refusal, wanted
from router.core.feedback import PathOverheads, outcome, overhead_sample_s
from router.core.fleet import Fleet, WorkerState
from router.core.network import Network
from router.core.policy_host import PolicyHost
from router.core.prefix_index import PrefixIndex
from router.core.topology import Topology, build_topology
from router.core.views import Counters, FleetViews, LinkView, WorkerView, link_views, worker_views
from router.core.weigh import take_stock, weigh

log = logging.getLogger(__name__)
_LABELS = tuple(kind.label for kind in PlacementKind)
OUTPUT_WEIGHT = 0.1
"""Weight of the newest answer's length in the expected one."""


class Scheduler:
    """Places requests on (decode worker, prefill site) pairs.

    Args:
        policy: chooses among priced candidates; guarded, replaced by `CostModel` when it keeps failing.
        seed: of the generator that policies are handed.
        policy_name: for logs and decisions.
        record: called with every input that changes state, before it is applied (the journal).
        on_outcome: called with what became of each placed request that finished or failed.
        timer: seconds of a clock, to time the policy with; None in replays and simulations.
        policy_budget_s: a longer `choose` is an overrun.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        seed: int = 0,
        config: SchedulerConfig | None = None,
        policy_name: str = "",
        record: Callable[[SchedulerInput], None] | None = None,
        on_outcome: Callable[[Outcome], None] | None = None,
        timer: Callable[[], float] | None = None,
        policy_budget_s: float = 0.005,
    ) -> None:
        self.config = config or SchedulerConfig()
        self._record = record
        self.on_outcome: Callable[[Outcome], None] = on_outcome or _ignore
        self._policy_budget_s = policy_budget_s
        self._rng = np.random.default_rng(seed)
        name = policy_name or type(policy).__name__
        self._host = PolicyHost(policy, name, CostModel(), "cost_model", self.config, timer)
        self._fleet = Fleet(self.config)
        self._network = Network(self.config)
        self._views = FleetViews(self._fleet, self._network, self.config)
        self._index = PrefixIndex()
        self._bookings = Bookings(self.config.booking_deadline_s)
        self._output_tokens = self.config.expected_output_tokens
        self._numbers = numbers = costs.request_numbers(self.config)
        measured_s = numbers[costs.OVERHEAD_REUSE : costs.OVERHEAD_REMOTE + 1]
        self._overheads = PathOverheads(self.config.overhead_window, measured_s)
        self._now_s = 0.0
        self._topology: tuple[tuple[int, int], Topology] | None = None
        self._commands: list[Command] = []
        self._counters = Counters(placements={kind.label: 0 for kind in PlacementKind})
        self._handlers: dict[type, Callable[..., None]] = {
            WorkerJoined: self._on_joined,
            WorkerProfile: self._on_profile,
            WorkerLost: self._on_lost,
            StatusReceived: self._on_status,
            KVReceived: self._on_kv,
            LinkConfigured: self._on_link,
            PrefillReported: self._on_prefilled,
            FirstToken: self._on_first_token,
            Finished: self._on_finished,
            Failed: self._on_failed,
            Released: self._on_released,
            PolicyOverran: self._on_overran,
            Tick: self._on_tick,
        }
        book.warm_up()
        block_table.warm_up()
        self._take_stock()

    # ------------------------------------------------------------ the interface

    def apply(self, event: SchedulerEvent) -> None:
        """Take note of an event. Events about unknown workers or requests, and repeats, change nothing."""
        if self._record is not None:
            self._record(event)
        if event.now_s > self._now_s:
            self._now_s = event.now_s
        self._handlers[type(event)](event)

    def place(self, request: PlaceRequest) -> Decision:
        """Choose and book.

        Raises:
            NoCapacity: nothing can take the request; nothing is booked.
        """
        if self._record is not None:
            self._record(request)
        if request.now_s > self._now_s:
            self._now_s = request.now_s
        request = self._not_before_now(request)
        former = self._bookings.get(request.request_id)
        if former is not None:
            self._give_up(former)
        self._sweep()
        try:
            decision, weighed = self._decide(request, self._host.choose)
        except NoCapacity as refusal:
            self._counters.refused[refusal.reason] = self._counters.refused.get(refusal.reason, 0) + 1
            raise
        finally:
            self._watch_budget()
        self._book(request, decision, weighed)
        self._counters.placements[_LABELS[decision.kind]] += 1
        self._counters.not_least_cost += not decision.least_cost
        return decision

    def preview(self, request: PlaceRequest) -> Decision:
        """What `place` would decide now; changes nothing.

        Raises:
            NoCapacity: as `place`.
        """
        return self._decide(self._not_before_now(request), self._host.preview)[0]

    def control(self, now_s: float) -> list[Command]:
        """Apply a `Tick` and return the policy's slow-timescale orders."""
        self.apply(Tick(now_s=now_s))
        return self._commands

    # ------------------------------------------------------------ read-only views

    def view(self) -> FleetView:
        """The fleet as policies see it."""
        self._take_stock()
        return self._views.at(self._now_s)

    def workers(self) -> Iterator[WorkerView]:
        self._take_stock()
        return worker_views(self._fleet, self._index, self._now_s)

    def links(self) -> Iterator[LinkView]:
        return link_views(self._network, self._now_s)

    def counters(self) -> Counters:
        counters = self._counters
        counters.bookings_expired = self._bookings.expired_total
        counters.index_gaps = self._index.gaps_total
        counters.index_snapshots = self._index.snapshots_total
        counters.policy_faults = self._host.faults_total
        counters.policy_overruns = self._host.overruns_total
        counters.policy_replaced = self._host.replaced_reason
        return counters

    @property
    def bookings(self) -> int:
        """Placements in flight."""
        return len(self._bookings)

    @property
    def policy(self) -> str:
        """Name of the policy that decides now."""
        return self._host.name

    def path_overhead_s(self, kind: PlacementKind) -> float:
        """Measured overhead of the path that `kind` takes."""
        return float(self._overheads.by_kind_s[kind])

    def needs_resync(self, worker: str) -> bool:
        """Whether this worker's KV events had a gap, so that a new snapshot is to be fetched."""
        state = self._fleet.get(worker)
        return state is not None and self._index.needs_resync(state.slot)

    # ------------------------------------------------------------ deciding

    def _decide(
        self, request: PlaceRequest, choose: Callable[..., tuple[int, str]]
    ) -> tuple[Decision, Weighed]:
        weighed = self._weigh(request)
        candidates = weighed.candidates
        if request.pair is None:
            seen = RequestView(
                request.request_id, request.arrival_s, request.prompt_tokens, request.max_tokens,
                request.attempt, request.session,
            )  # fmt: skip
            chosen, policy = choose(seen, candidates, self._views.at(self._now_s), self._rng)
        else:
            chosen, policy = 0, "pair"
        if chosen < 0:
            message = f"policy {policy} accepts none of {len(candidates)} feasible placements"
            raise NoCapacity("policy_refused", 1.0, message)
        least_cost = bool(weighed.floats[costs.COST, chosen] <= weighed.least_cost_s)
        decision = Decision(
            request.request_id, request.attempt, request.now_s, request.prompt_tokens, policy,
            candidates, chosen, least_cost,
        )  # fmt: skip
        return decision, weighed

    def _weigh(self, request: PlaceRequest) -> Weighed:
        """Price every pair that can take the request.

        Raises:
            NoCapacity: there is none.
        """
        workers, topology = self._fleet.table.values, self._current_topology()
        hashes = as_hashes(request.block_hashes)
        blocks = self._index.match(hashes, self._fleet.table.columns, request.now_s)
        numbers, pairs = self._numbers, len(topology.decode)
        if not pairs:
            raise no_worker()
        numbers[costs.NOW] = request.now_s
        numbers[costs.PROMPT_TOKENS] = request.prompt_tokens
        numbers[costs.ELAPSED] = max(0.0, request.now_s - request.arrival_s)
        numbers[costs.OUTPUT_TOKENS] = max(1.0, min(request.max_tokens, self._output_tokens))
        keep = np.empty(pairs, np.bool_)
        floats, ints = np.empty((costs.FLOAT_ROWS, pairs)), np.empty((costs.INT_ROWS, pairs), np.int64)
        kept = weigh(
            workers, self._network.table.values, self._bookings.values, self._bookings.count, topology.pairs,
            blocks, numbers, avoided(request, topology), wanted(request, topology), self._host.shortlist,
            keep, floats, ints,
        )  # fmt: skip
        if kept < 0:
            raise refusal(kept, request, topology, workers)
        if kept < pairs:
            floats, ints = floats[:, :kept], ints[:, :kept]
        candidates = candidates_of(topology, keep, floats, ints)
        return Weighed(floats, ints, hashes, candidates, numbers.item(costs.LEAST_COST))

    def _current_topology(self) -> Topology:
        version = (self._fleet.version, self._network.version)
        if self._topology is None or self._topology[0] != version:
            self._topology = (version, build_topology(self._fleet, self._network.links))
        return self._topology[1]

    def _watch_budget(self) -> None:
        elapsed_s = self._host.elapsed_s
        self._host.elapsed_s = 0.0
        if elapsed_s > self._policy_budget_s:
            self.apply(PolicyOverran(now_s=self._now_s, elapsed_s=elapsed_s))

    # ------------------------------------------------------------ booking

    def _book(self, request: PlaceRequest, decision: Decision, weighed: Weighed) -> None:
        chosen, candidates = decision.chosen, decision.candidates
        decode, site = map(self._fleet.get, candidates.pair(chosen))
        if decode is None or site is None:
            raise AssertionError(f"candidates come from the fleet, {decision.header} does not")
        link = None if site is decode else self._network.links[site.info.cluster, decode.info.cluster]
        row = self._bookings.next_row()
        book.book(
            self._fleet.table.values, self._network.table.values, self._bookings.values, row,
            weighed.floats, weighed.ints, chosen, decode.slot, site.slot,
            -1 if link is None else link.row, self._numbers, self.config.status_lag_s,
        )  # fmt: skip
        booking = Booking(
            request.request_id, request.attempt, decision.kind, decode, site, link, row, request.now_s,
            self._numbers.item(costs.ELAPSED), self._numbers.item(costs.OUTPUT_TOKENS),
            weighed.floats[:, chosen].tolist(), weighed.ints.item(costs.KV_BYTES, chosen),
        )  # fmt: skip
        self._bookings.add(booking)
        self._predict(booking, weighed.hashes)

    def _predict(self, booking: Booking, hashes: Hashes) -> None:
        """Hold the prompt's blocks to be cached where they are computed and where they land."""
        if not len(hashes):
            return
        at_once, ttl_s = self.config.predicted_from == "placed", self.config.predicted_ttl_s
        found = []
        ready_at = {booking.site.slot: booking.computed_s, booking.decode.slot: booking.landed_s}
        for slot, ready_s in ready_at.items():
            from_s = booking.booked_s if at_once else ready_s
            found.append(self._index.predict(slot, hashes, from_s, ready_s + ttl_s))
        booking.predictions = tuple(found)

    def _give_up(self, booking: Booking) -> None:
        """Release a booking whose prompt may never have been computed."""
        if not booking.prefilled:
            self._withdraw(booking)
        self._release(booking)

    def _withdraw(self, booking: Booking) -> None:
        for prediction in booking.predictions:
            self._index.withdraw(prediction)

    def _release(self, booking: Booking) -> None:
        self._bookings.release(booking)
        self._fleet.decodes_changed(booking.decode, self._now_s)

    def _take_stock(self) -> None:
        """Bring what the tables say of load up to now."""
        take_stock(
            self._fleet.table.values, self._network.table.values, self._bookings.values,
            self._bookings.count, self._numbers, self._now_s,
        )  # fmt: skip

    def _sweep(self) -> None:
        for booking in self._bookings.expired(self._now_s):
            log.warning("booking expired request_id=%s kind=%s", booking.request_id, booking.kind.label)
            self._give_up(booking)

    def _not_before_now(self, request: PlaceRequest) -> PlaceRequest:
        return request if request.now_s >= self._now_s else replace(request, now_s=self._now_s)

    # ------------------------------------------------------------ events

    def _on_joined(self, event: WorkerJoined) -> None:
        known = self._fleet.get(event.info.worker)
        if known is not None:
            if known.info == event.info:
                return
            self._forget(known)
        worker = self._fleet.join(event.info, event.ready)
        self._index.add_worker(worker.slot)
        self._network.add_cluster(event.info.cluster, self._now_s)

    def _on_profile(self, event: WorkerProfile) -> None:
        worker = self._fleet.get(event.worker)
        if worker is not None:
            self._fleet.set_profile(worker, event.profile)

    def _on_lost(self, event: WorkerLost) -> None:
        worker = self._fleet.get(event.worker)
        if worker is not None:
            self._forget(worker)

    def _forget(self, worker: WorkerState) -> None:
        """The worker is gone with everything booked on it; what only its prefill is lost of keeps its
        decode side until the request's failure is reported."""
        self._fleet.leave(worker)
        self._index.remove_worker(worker.slot)
        self._network.forget_sender(worker.name)
        for booking in list(worker.decodes.values()):
            self._give_up(booking)
        for booking in list(worker.prefills.values()):
            self._bookings.end_prefill(booking)
            self._withdraw(booking)

    def _on_status(self, event: StatusReceived) -> None:
        status = event.status
        worker = self._fleet.get(status.worker)
        if worker is None or worker.info.incarnation != status.incarnation:
            return
        self._fleet.set_status(worker, status, self._now_s)
        for counters in status.links:
            self._network.observe(worker.info.cluster, worker.name, counters, self._now_s)

    def _on_kv(self, event: KVReceived) -> None:
        worker = self._fleet.get(event.worker)
        if worker is not None:
            self._index.apply(worker.slot, event.event)

    def _on_link(self, event: LinkConfigured) -> None:
        rate, rtt_s = event.capacity_bytes_per_s, event.rtt_s
        self._network.configure(event.name, event.clusters, rate, rtt_s, self._now_s)

    def _on_prefilled(self, event: PrefillReported) -> None:
        booking = self._bookings.get(event.request_id)
        if booking is None or booking.attempt != event.attempt or booking.report is not None:
            return
        report = booking.report = event.report
        if report.site == booking.site.name:
            mixed_step_s = booking.terms[costs.MIXED_STEP]
            self._fleet.observe_prefill(
                booking.site, report.computed_tokens, report.cached_tokens, mixed_step_s, report.prefill_s
            )
        self._learn_overhead(booking)
        self._bookings.end_prefill(booking)

    def _on_first_token(self, event: FirstToken) -> None:
        booking = self._bookings.get(event.request_id)
        if booking is None or booking.decoding:
            return
        self._bookings.begin_answer(booking, event.ttft_s, self._now_s)
        self._fleet.decodes_changed(booking.decode, self._now_s)
        self._learn_overhead(booking)
        self._bookings.end_prefill(booking)

    def _learn_overhead(self, booking: Booking) -> None:
        """Once both the report and the first token are known; either may come first."""
        overhead_s = overhead_sample_s(booking)
        if overhead_s is not None:
            self._overheads.observe(booking.kind, overhead_s)

    def _on_finished(self, event: Finished) -> None:
        booking = self._bookings.get(event.request_id)
        if booking is None:
            return
        if event.ok:
            self._output_tokens += OUTPUT_WEIGHT * (event.completion_tokens - self._output_tokens)
        self._release(booking)
        self._tell(booking, event.ok)

    def _on_failed(self, event: Failed) -> None:
        booking = self._bookings.get(event.request_id)
        if booking is not None and booking.attempt == event.attempt:
            self._give_up(booking)
            self._tell(booking, False)

    def _on_released(self, event: Released) -> None:
        booking = self._bookings.get(event.request_id)
        if booking is not None:
            self._give_up(booking)

    def _tell(self, booking: Booking, ok: bool) -> None:
        if self._host.learns or self.on_outcome is not _ignore:
            result = outcome(booking, ok)
            self._host.observe(result)
            self.on_outcome(result)

    def _on_overran(self, event: PolicyOverran) -> None:
        self._host.overran(event.elapsed_s, self._now_s)

    def _on_tick(self, event: Tick) -> None:
        self._sweep()
        self._index.sweep(self._now_s)
        for link in self._network:
            self._network.refresh(link, self._now_s)
        heeded = self._host.commands
        self._commands = self._host.control(self.view(), self._now_s) if heeded else []


def _ignore(_: object) -> None:
    """Nobody listens."""

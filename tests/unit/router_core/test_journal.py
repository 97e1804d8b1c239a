"""Random event streams: bookings always come back to zero, and a replay decides the same, bit for bit."""

from __future__ import annotations

import io
from dataclasses import dataclass, field

import msgspec
import pytest
from brain_fleet import FAST, PAGE, PROFILE, counters, info, reported, request, status
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.round_robin import RoundRobin
from prfaas.protocol.messages import KVRemoved, KVSnapshot, KVStored
from router.core.decision import Decision, NoCapacity
from router.core.events import (
    Failed,
    Finished,
    FirstToken,
    KVReceived,
    LinkConfigured,
    Released,
    Tick,
    WorkerJoined,
    WorkerLost,
    WorkerProfile,
)
from router.core.journal import JournalError, JournalHeader, JournalWriter, replay
from router.core.policy_loader import load_policy
from router.core.scheduler import Scheduler

WORKERS = [
    info("decode-0", "decode", "pd", max_queue=6),
    info("decode-1", "decode", "pd", pages=90),
    info("pool-0", "prefill", "pd"),
    info("remote-0", "prefill", "far"),
    info("remote-1", "prefill", "far", pages=80),
]
ACTIONS = ["place"] * 6 + ["report", "token", "finish"] * 3
ACTIONS += ["fail", "release", "lose", "join", "status", "kv", "tick"]
STEP = st.tuples(st.sampled_from(ACTIONS), st.integers(0, 9), st.integers(0, 2000))


@dataclass
class Run:
    """Drives a scheduler with a made-up but plausible stream of events."""

    policy: str
    outcomes: list[object] = field(default_factory=list)
    file: io.BytesIO = field(default_factory=io.BytesIO)
    live: dict[str, Decision] = field(default_factory=dict)

    def __post_init__(self) -> None:
        header = JournalHeader(seed=7, policy=self.policy)
        self.scheduler = Scheduler(
            load_policy(self.policy), seed=7, policy_name=self.policy, record=JournalWriter(self.file, header)
        )
        self.now_s = 0.0
        self.kv_sequence = 0
        self.scheduler.apply(
            LinkConfigured(now_s=0, name="wan", clusters=("pd", "far"), capacity_bytes_per_s=1e6, rtt_s=0.04)
        )
        for worker in WORKERS:
            self.join(worker)

    def join(self, worker) -> None:
        self.scheduler.apply(WorkerJoined(now_s=self.now_s, info=worker, ready=True))
        profile = FAST if worker.cluster == "far" else PROFILE
        self.scheduler.apply(WorkerProfile(now_s=self.now_s, worker=worker.worker, profile=profile))

    def step(self, action: str, which: int, number: int) -> None:
        self.now_s += number / 4000
        worker = WORKERS[which % len(WORKERS)]
        if action == "place":
            return self.place(which, number)
        if action == "lose":
            self.scheduler.apply(WorkerLost(now_s=self.now_s, worker=worker.worker))
        elif action == "join":
            self.join(worker)
        elif action == "status":
            self.status(worker, number)
        elif action == "kv":
            self.kv(worker.worker, which, number)
        elif action == "tick":
            self.scheduler.control(self.now_s)
        elif self.live:
            self.progress(action, list(self.live)[which % len(self.live)], number)

    def place(self, which: int, number: int) -> None:
        request_id = f"r{len(self.outcomes)}"
        ask = request(
            request_id, tokens=number + 1, now_s=self.now_s, arrival_s=self.now_s - 0.01,
            block_hashes=tuple(1000 * (which % 3) + i for i in range((number + 1) // PAGE)),
        )  # fmt: skip
        try:
            self.live[request_id] = self.scheduler.place(ask)
            self.outcomes.append(self.live[request_id])
        except NoCapacity as refusal:
            self.outcomes.append(refusal)

    def status(self, worker, number: int) -> None:
        links = [counters(number * 1000, number * 900, number / 1000, rtt_s=0.05)]
        self.scheduler.apply(
            status(
                worker.worker,
                worker.role,
                self.now_s,
                waiting_prefill_tokens=number,
                running=number % 5,
                running_context_tokens=number,
                decode_step_s=0.03,
                free_pages=number % 1000,
                links=links,
            )
        )

    def kv(self, worker: str, which: int, number: int) -> None:
        self.kv_sequence += 1
        kind = (KVSnapshot, KVStored, KVRemoved)[number % 3]
        extra = {"page_size": PAGE} if kind is KVSnapshot else {}
        hashes = [1000 * (which % 3) + i for i in range(number // PAGE)]
        event = kind(generation="g", sequence=self.kv_sequence, block_hashes=hashes, **extra)
        self.scheduler.apply(KVReceived(now_s=self.now_s, worker=worker, event=event))

    def progress(self, action: str, request_id: str, number: int) -> None:
        decision, now_s = self.live[request_id], self.now_s
        if action == "report":
            took_s = 0.01 + number / 1000
            self.scheduler.apply(reported(request_id, decision.site, now_s, queue_s=0.01, prefill_s=took_s))
        elif action == "token":
            self.scheduler.apply(FirstToken(now_s=now_s, request_id=request_id, ttft_s=number / 1000))
        else:
            del self.live[request_id]
            self.scheduler.apply(
                {
                    "finish": Finished(now_s=now_s, request_id=request_id, completion_tokens=number % 300),
                    "fail": Failed(now_s=now_s, request_id=request_id, attempt=1, site=decision.site),
                    "release": Released(now_s=now_s, request_id=request_id),
                }[action]
            )

    def drain(self) -> None:
        for request_id in list(self.live):
            self.progress("finish", request_id, 20)


def plain(outcome: object) -> object:
    return outcome.as_record(None) if isinstance(outcome, Decision) else (outcome.reason, str(outcome))


@settings(deadline=None, max_examples=40)
@given(st.lists(STEP, min_size=20, max_size=80))
def test_when_all_requests_are_over_every_booking_is_zero(steps: list[tuple[str, int, int]]) -> None:
    run = Run("cost_model")
    for step in steps:
        run.step(*step)
    run.drain()
    assert run.scheduler.bookings == 0
    for worker in run.scheduler.workers():
        assert (worker.booked_prefills, worker.booked_decodes, worker.queued_tokens) == (0, 0, 0)
    for link in run.scheduler.links():
        assert (link.booked_transfers, link.backlog_bytes) == (0, 0)


@settings(deadline=None, max_examples=30)
@given(st.lists(STEP, min_size=20, max_size=60), st.sampled_from(["cost_model", "round_robin", "threshold"]))
def test_a_replay_reproduces_every_decision_bit_for_bit(
    steps: list[tuple[str, int, int]], policy: str
) -> None:
    run = Run(policy)
    for step in steps:
        run.step(*step)
    replayed = list(replay(run.file.getvalue().splitlines()))
    assert [plain(outcome) for outcome in replayed] == [plain(outcome) for outcome in run.outcomes]


@settings(deadline=None, max_examples=20)
@given(st.lists(STEP, min_size=20, max_size=60))
def test_every_prediction_is_finite_and_no_term_but_the_overhead_is_negative(
    steps: list[tuple[str, int, int]],
) -> None:
    run = Run("cost_model")
    for step in steps:
        run.step(*step)
    for outcome in run.outcomes:
        if isinstance(outcome, Decision):
            assert outcome.least_cost
            for row in outcome.as_record(None)["candidates"]:
                terms = {name: value for name, value in row.items() if name.endswith("_s")}
                assert all(abs(value) < 1e6 for value in terms.values()), row
                assert min(value for name, value in terms.items() if name != "overhead_s") >= 0, row


def test_previews_between_inputs_do_not_change_what_follows() -> None:
    with_previews, without = Run("cost_model"), Run("cost_model")
    for i in range(20):
        with_previews.scheduler.preview(request(f"p{i}", now_s=with_previews.now_s + 0.1))
        for run in (with_previews, without):
            run.step("place", i, 37 * i)
    assert [plain(o) for o in with_previews.outcomes] == [plain(o) for o in without.outcomes]


def test_another_policy_can_be_replayed_over_the_same_inputs() -> None:
    run = Run("cost_model")
    for i in range(10):
        run.step("place", i, 500)
    replayed = list(replay(run.file.getvalue().splitlines(), RoundRobin()))
    assert {outcome.policy for outcome in replayed} == {"RoundRobin"}


def test_a_damaged_journal_names_the_line() -> None:
    run = Run("cost_model")
    run.step("tick", 0, 0)
    lines = [*run.file.getvalue().splitlines(), b'{"type":"nonsense"}']
    with pytest.raises(JournalError, match=f"line {len(lines)}"):
        list(replay(lines))
    with pytest.raises(JournalError, match="not a header"):
        list(replay([]))
    newer = msgspec.json.encode(JournalHeader(version=99, seed=0, policy="cost_model"))
    with pytest.raises(JournalError, match="version 99"):
        list(replay([newer]))


def test_a_tick_may_come_at_any_time() -> None:
    scheduler = Scheduler(load_policy("cost_model"))
    scheduler.apply(Tick(now_s=5.0))
    assert scheduler.control(4.0) == []

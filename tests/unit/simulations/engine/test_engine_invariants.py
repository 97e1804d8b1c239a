"""What must hold of every run, whatever the fleet (docs/invariants.md, INV-S)."""

from __future__ import annotations

import io
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from small_cases import Spread, small_fleet, small_trace, with_outputs

import simulations.engine.run as run_module
from policies.cost_model import CostModel
from policies.round_robin import RoundRobin
from policies.types import RequestView
from router.core.decision import Decision
from router.core.events import PlaceRequest
from router.core.journal import JournalHeader, JournalWriter, replay
from router.core.scheduler import Scheduler
from simulations.engine.build import scheduler_config
from simulations.engine.run import RunOptions, simulate
from simulations.engine.world import World
from simulations.fleet import Fleet
from simulations.result import FAILED, REFUSED, SERVED, RunResult
from simulations.workload.trace import Trace

FLEETS = {
    "local": small_fleet(decode=2),
    "colocated, few pages": small_fleet(decode=2, kv_pages=26),
    "pool": small_fleet(decode=2, prefill=2, kv_pages=60),
    "remote": small_fleet(decode=2, prefill=1, remote=2, link="10MB/s", state_bytes=20_000),
}


def equal(one: RunResult, other: RunResult) -> bool:
    """Whether two results are the same in every byte but the CPU time."""
    for field in fields(RunResult):
        if field.name == "cpu_s":
            continue
        a, b = getattr(one, field.name), getattr(other, field.name)
        if field.name == "resources":
            for x, y in zip(a, b, strict=True):
                if (x.name, x.kind, x.busy_s) != (y.name, y.kind, y.busy_s):
                    return False
                if any(x.samples[key].tobytes() != y.samples[key].tobytes() for key in x.samples):
                    return False
        elif isinstance(a, np.ndarray):
            if a.tobytes() != b.tobytes():
                return False
        elif a != b:
            return False
    return True


def world_of(
    monkeypatch: pytest.MonkeyPatch, trace: Trace, fleet: Fleet, policy: Any
) -> tuple[World, RunResult]:
    """A run, and the world that it leaves behind."""
    kept: list[World] = []
    build = run_module.build_world
    monkeypatch.setattr(run_module, "build_world", lambda *a, **k: kept.append(build(*a, **k)) or kept[-1])
    found = simulate(trace, fleet, policy)
    return kept[-1], found


@pytest.mark.parametrize("name", FLEETS)
def test_every_request_ends_once_and_every_page_is_given_back(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = small_trace(1, requests=60, prompt_pages=10, output=60)
    world, found = world_of(monkeypatch, trace, FLEETS[name], Spread(1))
    assert found.complete
    assert world.unfinished == 0
    assert world.recorder.ended == len(trace)
    assert set(found.state) <= {SERVED, REFUSED, FAILED}
    for worker in world.workers.values():
        assert not worker.live
        assert worker.cache.available == worker.cache.total
        worker.cache.check()


@pytest.mark.parametrize("name", ["pool", "remote"])
def test_links_carry_exactly_what_was_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = small_trace(2, requests=60, prompt_pages=10)
    fleet = FLEETS[name]
    world, found = world_of(monkeypatch, trace, fleet, Spread(2, only="elsewhere"))
    page = fleet.page_size
    lacking = -(-(found.prompt_tokens - 1) // page) - found.decode_cached_tokens // page
    fetched = found.kv_bytes > 0
    asked = lacking * page * fleet.model.kv_bytes_per_token + fleet.model.state_bytes
    np.testing.assert_array_equal(found.kv_bytes[fetched], asked[fetched])
    assert fetched.sum() > len(trace) / 2
    meters = [meter for worker in world.workers.values() for meter in getattr(worker, "meters", {}).values()]
    assert sum(meter.moved for meter in meters) == pytest.approx(float(found.kv_bytes.sum()), abs=len(trace))


@pytest.mark.parametrize("name", FLEETS)
def test_times_are_in_order(name: str) -> None:
    found = simulate(small_trace(3, requests=50), FLEETS[name], CostModel())
    assert (found.ttft_s > 0).all()
    assert (found.end_s >= found.arrival_s + found.ttft_s - 1e-9).all()
    assert (np.diff(found.times_s) > 0).all()


def test_the_scheduler_hears_in_order_of_time() -> None:
    heard: list[float] = []
    options = RunOptions(journal=lambda item: heard.append(item.now_s))
    simulate(small_trace(3, requests=50), FLEETS["remote"], CostModel(), options)
    assert heard == sorted(heard)


@pytest.mark.parametrize("name", FLEETS)
def test_equal_seeds_give_equal_bytes(name: str) -> None:
    trace = small_trace(4, requests=40)
    assert equal(simulate(trace, FLEETS[name], CostModel()), simulate(trace, FLEETS[name], CostModel()))


def test_the_journal_of_a_run_replays_to_the_same_decisions() -> None:
    trace, fleet = small_trace(5, requests=60), FLEETS["remote"]
    file = io.BytesIO()
    header = JournalHeader(seed=7, policy="cost_model", config=scheduler_config(fleet))
    found = simulate(trace, fleet, CostModel(), RunOptions(seed=7, journal=JournalWriter(file, header)))
    decisions = list(replay(file.getvalue().splitlines()))
    assert len(decisions) == len(trace)
    for decision in decisions:
        assert isinstance(decision, Decision)
        row = int(decision.request_id)
        assert decision.decode == found.workers[found.decode[row]]
        assert decision.site == found.workers[found.site[row]]
        assert decision.ttft_s == found.predicted_ttft_s[row]


class Watching(CostModel):
    """Remembers all that a policy is told before each choice."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def choose(self, request: Any, candidates: Any, view: Any, rng: Any) -> int:
        row = super().choose(request, candidates, view, rng)
        self.told.append((request, candidates.cost_s.tolist(), candidates.decode[row], candidates.site[row]))
        return row


def test_no_decision_knows_how_long_an_answer_will_be() -> None:
    # The same trace with other lengths of answers that none has reached when the last request is placed.
    trace = small_trace(6, requests=40, rate_per_s=400, output=1)
    short, long = Watching(), Watching()
    fleet = small_fleet(decode=2, prefill=1, max_running=64)
    simulate(with_outputs(trace, [900] * 39 + [1000]), fleet, short)
    simulate(with_outputs(trace, [1000] * 40), fleet, long)
    assert short.told == long.told
    assert {request.max_tokens for request, *_ in short.told} == {1024}


def test_what_a_policy_sees_of_a_request_has_no_room_for_its_answer() -> None:
    assert set(RequestView.__struct_fields__) == {
        "request_id", "arrival_s", "prompt_tokens", "max_tokens", "attempt", "session",
    }  # fmt: skip
    assert "output" not in " ".join(PlaceRequest.__struct_fields__)


def test_a_run_that_is_stopped_says_so_and_keeps_what_is_known() -> None:
    trace = small_trace(7, requests=600, rate_per_s=100, output=4)
    found = simulate(trace, FLEETS["local"], CostModel(), RunOptions(stop=lambda: True))
    assert not found.complete
    assert 0 < (found.state == SERVED).sum() < len(trace)


def test_the_dropped_part_warms_the_caches() -> None:
    trace = small_trace(8, requests=60)
    whole = simulate(trace, FLEETS["local"], CostModel())
    part = simulate(trace, FLEETS["local"], CostModel(), RunOptions(drop_first=0.5))
    np.testing.assert_array_equal(part.ttft_s, whole.ttft_s[30:])
    np.testing.assert_array_equal(part.prompt_tokens, trace.prompt_tokens[30:])


def test_one_status_in_time_is_as_good_as_many() -> None:
    """Statuses that no decision could have seen are left out; the rest arrive when live ones do."""
    heard: list[tuple[float, str]] = []

    def note(item: Any) -> None:
        if type(item).__name__ == "StatusReceived":
            heard.append((item.now_s, item.status.worker))

    fleet = replace(FLEETS["pool"], event_delay=0.01)
    simulate(small_trace(9, requests=60), fleet, RoundRobin(), RunOptions(journal=note))
    workers = sorted({worker for _, worker in heard})
    assert len(workers) == 4
    for worker in workers:
        times = [at_s for at_s, its in heard if its == worker]
        phases = {round((at_s - 0.01) % 0.25, 6) for at_s in times}
        assert len(phases) <= 2, "every period at the same phase (0 and 0.25 are one)"
        assert len(times) == len(set(times))


def test_the_scheduler_is_the_live_one(monkeypatch: pytest.MonkeyPatch) -> None:
    world, _ = world_of(monkeypatch, small_trace(1, requests=3), FLEETS["local"], CostModel())
    assert type(world.router.scheduler) is Scheduler
    assert world.router.scheduler.bookings == 0

"""Deaths, outages, lag, roles, conversations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from small_cases import Spread, small_fleet, small_trace

from policies.cost_model import CostModel
from policies.types import Command
from prfaas.errors import ConfigError
from router.core.events import Failed, StatusReceived, WorkerJoined, WorkerLost
from simulations.engine.run import RunOptions, simulate
from simulations.fleet import ScheduledChange
from simulations.result import FAILED, SERVED
from simulations.workload.trace import Trace


def run(trace: Trace, fleet: Any, policy: Any, **options: Any) -> tuple[Any, list[Any]]:
    heard: list[Any] = []
    found = simulate(trace, fleet, policy, RunOptions(journal=heard.append, **options))
    return found, heard


def test_when_a_decode_worker_dies_its_waiting_requests_are_placed_again() -> None:
    trace = small_trace(1, requests=80, rate_per_s=40, output=60)
    fleet = small_fleet(decode=3, schedule=[ScheduledChange(at=1.0, worker="decode-1")])
    found, heard = run(trace, fleet, Spread(1))
    assert found.complete
    again = found.attempts > 1
    assert again.any()
    assert (found.state[again] == SERVED).all()
    # Whoever had got text already gets the failure: it cannot be taken back.
    failed = found.state == FAILED
    assert failed.any()
    assert set(np.array(found.refusal)[failed]) == {"peer_lost"}
    assert (found.ttft_s[failed] > 0).all()
    assert (found.end_s[failed] == 1.0).all()
    dead = found.workers.index("decode-1")
    assert not (found.decode[found.arrival_s > 1.5] == dead).any()
    assert [item.worker for item in heard if isinstance(item, WorkerLost)] == ["decode-1"]


def test_when_a_prefill_worker_dies_nobody_fails_and_it_comes_back_empty() -> None:
    trace = small_trace(2, requests=80, rate_per_s=30)
    changes = [
        ScheduledChange(at=0.8, worker="prefill-0"),
        ScheduledChange(at=1.6, worker="prefill-0", up=True),
    ]
    fleet = small_fleet(decode=2, prefill=2, schedule=changes)
    found, heard = run(trace, fleet, Spread(2, only="elsewhere"))
    assert (found.state == SERVED).all()
    assert (found.attempts > 1).any()
    joins = [item for item in heard if isinstance(item, WorkerJoined) and item.info.worker == "prefill-0"]
    assert [join.info.incarnation for join in joins] == ["prefill-0#0", "prefill-0#1"]
    back = found.workers.index("prefill-0")
    sites = found.site[found.arrival_s > 1.7]
    assert (sites == back).any()


def test_an_outage_sends_requests_elsewhere_and_ends() -> None:
    trace = small_trace(3, requests=80, rate_per_s=20)
    changes = [
        ScheduledChange(at=1.0, link="wan", capacity="0"),
        ScheduledChange(at=3.5, link="wan", capacity="20MB/s"),
    ]
    fleet = small_fleet(decode=2, remote=2, schedule=changes)
    found, heard = run(trace, fleet, Spread(3, only="elsewhere"))
    assert found.complete
    failures = [item for item in heard if isinstance(item, Failed)]
    assert failures
    assert {item.reason for item in failures} == {"peer_lost"}
    assert min(item.now_s for item in failures) >= 1.0 + 1.5
    assert (found.state == SERVED).mean() > 0.7


def test_a_slower_link_makes_first_tokens_later() -> None:
    trace = small_trace(4, requests=40, rate_per_s=10, prompt_pages=16)
    fast = small_fleet(decode=2, remote=2)
    slow = small_fleet(decode=2, remote=2, schedule=[ScheduledChange(at=0.0, link="wan", capacity="1MB/s")])
    policy = Spread(4, only="elsewhere")
    assert simulate(trace, slow, policy).ttft_s.mean() > 1.5 * simulate(trace, fast, policy).ttft_s.mean()


def test_a_lagging_router_hears_the_same_later_and_in_order() -> None:
    trace = small_trace(5, requests=60, rate_per_s=20)
    changes = [ScheduledChange(at=0.5, router_lag=0.7), ScheduledChange(at=1.5)]
    found, heard = run(trace, small_fleet(decode=2, prefill=1, schedule=changes), Spread(5))
    assert found.complete
    times = [item.now_s for item in heard]
    assert times == sorted(times)
    statuses = [item.now_s for item in heard if isinstance(item, StatusReceived)]
    assert not [at_s for at_s in statuses if 0.51 < at_s < 1.2]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (ScheduledChange(at=1.0, worker="nobody"), "no worker is called `nobody`"),
        (ScheduledChange(at=1.0, link="lan", capacity="1Gbit"), "no link is called `lan`"),
        (ScheduledChange(at=1.0, link="wan", capacity="fast"), "not a data rate"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(change: ScheduledChange, says: str) -> None:
    fleet = small_fleet(decode=1, remote=1, schedule=[change])
    with pytest.raises(ConfigError, match=says):
        simulate(small_trace(1, requests=3), fleet, CostModel())


class Turning(Spread):
    """Orders roles at given seconds."""

    def __init__(self, orders: dict[int, tuple[str, str]]) -> None:
        super().__init__(9)
        self.orders = dict(orders)

    def control(self, view: Any, now_s: float) -> list[Command]:
        order = self.orders.pop(round(now_s), None)
        return [Command("set_role", {"worker": order[0], "role": order[1]})] if order else []


def test_a_role_changes_through_drain_and_a_new_incarnation() -> None:
    trace = small_trace(6, requests=120, rate_per_s=25, output=60)
    policy = Turning({1: ("decode-0", "prefill"), 3: ("prefill", "decode")})
    found, heard = run(trace, small_fleet(decode=2, prefill=1), policy)
    assert (found.state == SERVED).all()
    joins = [
        (item.info.worker, item.info.role, item.now_s) for item in heard if isinstance(item, WorkerJoined)
    ]
    assert ("decode-0", "prefill") in [(name, role) for name, role, _ in joins]
    assert ("prefill", "decode") in [(name, role) for name, role, _ in joins]
    draining = [i for i in heard if isinstance(i, StatusReceived) and i.status.state == "draining"]
    assert "decode-0" in {item.status.worker for item in draining}
    worker = found.workers.index("decode-0")
    assert (found.site == worker)[found.arrival_s > 2.5].any()
    assert not (found.decode == worker)[found.arrival_s > 1.1].any()


def test_the_last_decode_worker_keeps_its_role() -> None:
    trace = small_trace(7, requests=40)
    policy = Turning({1: ("decode", "prefill")})
    found, heard = run(trace, small_fleet(decode=1, prefill=1), policy)
    assert (found.state == SERVED).all()
    assert len([item for item in heard if isinstance(item, WorkerJoined)]) == 2


def test_a_turn_waits_for_the_answer_before_it_and_the_time_to_think() -> None:
    trace = small_trace(8, requests=12, rate_per_s=100, output=50)
    trace = replace(
        trace, session=np.arange(12, dtype=np.int64) % 3, think_s=np.full(12, 0.5, dtype=np.float64)
    )
    found = simulate(trace, small_fleet(decode=1), CostModel(), RunOptions(causal=True))
    assert found.complete
    np.testing.assert_allclose(found.arrival_s[:3], trace.arrival_s[:3])
    np.testing.assert_allclose(found.arrival_s[3:], found.end_s[:-3] + 0.5)
    as_recorded = simulate(trace, small_fleet(decode=1), CostModel())
    np.testing.assert_allclose(as_recorded.arrival_s, trace.arrival_s)


def test_a_fleet_without_room_for_any_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="no decode worker can hold a single request"):
        simulate(
            small_trace(1, requests=3, prompt_pages=3), small_fleet(decode=1, kv_pages=1, page=1), CostModel()
        )


def test_a_prompt_that_fits_no_worker_is_refused_and_the_others_are_served() -> None:
    trace = small_trace(1, requests=10, prompt_pages=2, output=5)
    prompts = trace.prompt_tokens.copy()
    prompts[4] = 10_000
    found = simulate(replace(trace, prompt_tokens=prompts), small_fleet(decode=1), CostModel())
    assert found.refusal[4] == "prompt_too_long"
    assert (np.delete(found.state, 4) == SERVED).all()


def test_an_answer_that_outgrows_the_pool_ends_in_an_error() -> None:
    trace = small_trace(1, requests=1, prompt_pages=2)
    trace = replace(trace, output_tokens=np.array([500], dtype=np.int64))
    found = simulate(trace, small_fleet(decode=1, kv_pages=10), CostModel())
    assert found.complete
    assert found.refusal == ("engine_failed",)


def test_pages_of_another_size_than_the_blocks_see_the_same_prefixes() -> None:
    trace = small_trace(10, requests=30, page=16, prompt_pages=12)
    for page in (4, 16, 64):
        found = simulate(trace, small_fleet(decode=1, page=page, kv_pages=6400 // page), CostModel())
        assert (found.state == SERVED).all()
        assert found.decode_cached_tokens.sum() > 0
        assert (found.decode_cached_tokens % page == 0).all()
    with pytest.raises(ConfigError, match="do not divide"):
        simulate(trace, small_fleet(decode=1, page=24), CostModel())

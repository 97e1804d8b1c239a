from __future__ import annotations

import logging

import pytest
from brain_fleet import fleet, request

from policies.base import BasePolicy
from policies.cost_model import CostModel
from policies.round_robin import RoundRobin
from policies.types import Command
from router.core.events import Finished, PolicyOverran


class Raises(BasePolicy):
    def choose(self, request, candidates, view, rng):
        raise ZeroDivisionError("oops")


class OutOfRange(BasePolicy):
    def choose(self, request, candidates, view, rng):
        return len(candidates)


class BadObserver(CostModel):
    def observe(self, outcome):
        raise RuntimeError("cannot learn")


class Controller(CostModel):
    def control(self, view, now_s):
        return [Command("set_threshold", {"tokens": len(view.workers)})]


class Slow(BasePolicy):
    def choose(self, request, candidates, view, rng):
        return 0


@pytest.mark.parametrize("policy", [Raises(), OutOfRange()])
def test_a_faulty_policy_is_answered_by_the_default_then_replaced(
    policy: BasePolicy, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = fleet(1, 1, 1, policy=policy, policy_name="faulty")
    with caplog.at_level(logging.ERROR):
        decisions = [scheduler.place(request(f"r{i}")) for i in range(5)]
    assert {decision.policy for decision in decisions} == {"cost_model"}
    assert all(decision.least_cost for decision in decisions)
    counters = scheduler.counters()
    assert counters.policy_faults == 3
    assert "3 faults" in counters.policy_replaced
    assert scheduler.policy == "cost_model"
    assert sum("policy replaced" in record.message for record in caplog.records) == 1


def test_faults_outside_choose_count_too() -> None:
    scheduler = fleet(1, 0, 0, policy=BadObserver(), policy_name="bad")
    for i in range(3):
        scheduler.place(request(f"r{i}"))
        scheduler.apply(Finished(now_s=2.0, request_id=f"r{i}", completion_tokens=1))
    assert scheduler.policy == "cost_model"


def test_a_preview_of_a_faulty_policy_is_served_and_not_counted() -> None:
    scheduler = fleet(1, 0, 0, policy=Raises(), policy_name="faulty")
    assert scheduler.preview(request()).policy == "cost_model"
    assert scheduler.counters().policy_faults == 0


def test_overruns_again_and_again_replace_the_policy_and_are_journalled() -> None:
    inputs, ticks = [], iter(range(1000))
    scheduler = fleet(
        1, 1, 1, policy=Slow(), policy_name="slow", record=inputs.append, timer=lambda: float(next(ticks))
    )
    for i in range(4):
        scheduler.place(request(f"r{i}"))
    assert scheduler.policy == "slow"
    scheduler.place(request("r4"))
    assert scheduler.policy == "cost_model"
    assert sum(isinstance(item, PolicyOverran) for item in inputs) == 5


def test_rare_overruns_are_only_counted() -> None:
    scheduler = fleet(1, 0, 0, policy=Slow(), policy_name="slow")
    for minute in range(10):
        scheduler.apply(PolicyOverran(now_s=100.0 * minute, elapsed_s=0.01))
    assert scheduler.policy == "slow"
    assert scheduler.counters().policy_overruns == 10


def test_a_preview_does_not_move_a_stateful_policy() -> None:
    scheduler = fleet(1, 1, 1, policy=RoundRobin())
    sites = []
    for i in range(3):
        scheduler.preview(request("p"))
        sites.append(scheduler.place(request(f"r{i}")).site)
    assert sorted(sites) == ["decode-0", "pool-0", "remote-0"]


def test_control_returns_the_policys_orders() -> None:
    (command,) = fleet(1, 1, 1, policy=Controller()).control(2.0)
    assert command == Command("set_threshold", {"tokens": 3})

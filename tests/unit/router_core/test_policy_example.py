"""The documented third-party policy places requests like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
from brain_fleet import fleet, request

from router.core.policy_loader import load_policy

ROOT = Path(__file__).parents[3]


def test_the_example_spreads_equal_requests_and_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    policy = load_policy("examples.policy_example:LMetric")
    scheduler = fleet(2, 1, 2, policy=policy, policy_name="lmetric")
    decisions = [scheduler.place(request(f"r{i}")) for i in range(5)]
    assert len({decision.site for decision in decisions}) == 5
    assert {decision.policy for decision in decisions} == {"lmetric"}
    assert scheduler.counters().policy_faults == 0

"""Each policy drives a simulated fleet: the paper's, with prompts of its distribution."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from policies.dual_timescale import DualTimescale
from policies.types import PlacementKind
from router.core.policy_loader import GROUP
from simulations.engine.run import simulate
from simulations.fleet import Fleet
from simulations.fleet_load import load_fleet
from simulations.result import SERVED
from simulations.workload.load import load_trace
from simulations.workload.trace import Trace

POLICIES = {point.name: point for point in entry_points(group=GROUP)}


@pytest.fixture(scope="module")
def fleet() -> Fleet:
    return load_fleet("hybrid")


@pytest.fixture(scope="module")
def few() -> Trace:
    return load_trace("generate:lognormal?requests=40&rate=2")


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_it_serves_every_request_and_is_never_replaced(name: str, few: Trace, fleet: Fleet) -> None:
    result = simulate(few, fleet, POLICIES[name].load()())
    assert result.complete
    assert (result.state == SERVED).all()
    assert result.policy != "cost_model" or name == "cost_model"


def test_dual_timescale_finds_the_papers_threshold_by_itself(fleet: Fleet) -> None:
    """19,400 tokens, Λ = 3.24, 49.6 % going, from what it sees of 400 requests."""
    policy = DualTimescale(convert=False)
    result = simulate(load_trace("generate:lognormal?requests=400&rate=3&seed=2"), fleet, policy)
    assert policy.solution is not None
    assert policy.solution.threshold_tokens == pytest.approx(19_400, rel=0.15)
    assert policy.solution.rate == pytest.approx(3.24, rel=0.1)
    assert policy.solution.offload_share == pytest.approx(0.496, abs=0.05)
    assert not policy.bandwidth_scarce
    assert (result.kind == PlacementKind.REMOTE).mean() == pytest.approx(0.496, abs=0.08)

"""The cheapest fleet: the same as trying every fleet in order of price, with far fewer simulations."""

from __future__ import annotations

from itertools import product

import msgspec
import numpy as np
import pytest
from bound_fleets import make_fleet

from prfaas.errors import ConfigError
from simulations.bound import fluid_bound
from simulations.commands.policy_spec import parse_policies
from simulations.engine.run import simulate
from simulations.experiments.capacity import counted
from simulations.experiments.cheapest import cheapest_fleet, price, price_list, with_counts
from simulations.fleet import SLO, Fleet
from simulations.workload.trace import Trace

RATE = 18.0
SPEC = parse_policies("cost_model")[0]
LEVELS = SLO(ttft_p90=0.6)


def priced_fleet(near: float = 1.0, far: float = 2.5) -> Fleet:
    fleet = make_fleet(prefill=1, decode=1, remote=1, max_running=8)
    hardware = {
        "near": msgspec.structs.replace(fleet.hardware["near"], price_per_hour=near),
        "far": msgspec.structs.replace(fleet.hardware["far"], price_per_hour=far),
    }
    return msgspec.structs.replace(fleet, hardware=hardware)


def trace() -> Trace:
    rng = np.random.default_rng(4)
    arrival_s = np.cumsum(rng.exponential(0.1, 60))
    return Trace("t", arrival_s, rng.integers(100, 1500, 60), rng.integers(2, 20, 60))


def test_it_finds_what_trying_every_fleet_finds():
    fleet = priced_fleet()
    found = cheapest_fleet(trace(), fleet, SPEC, RATE, LEVELS, most_per_group=3)
    groups = price_list(fleet, 3)
    assert found.found is not None
    at_rate = trace().at_rate(RATE / counted(trace(), 0.0).rate_per_s)
    for counts in product(range(4), repeat=3):
        cheaper = price(groups, counts) < found.found.price_per_hour
        decodes = counts[[g.path for g in groups].index("pd/d")] > 0
        if cheaper and decodes:
            run = simulate(at_rate, with_counts(fleet, groups, counts), SPEC.make())
            assert not run.meets(LEVELS), counts
    chosen = tuple(found.found.counts[g.path] for g in groups)
    assert simulate(at_rate, with_counts(fleet, groups, chosen), SPEC.make()).meets(LEVELS)
    assert [option.price_per_hour for option in found.tried] == sorted(o.price_per_hour for o in found.tried)
    assert found.ruled_out > 0


def test_the_bound_of_a_tried_fleet_is_its_own_bound_or_above_it():
    """The bound comes from an enlarged fleet's prices; one of a group that is not there counts for little."""
    fleet = priced_fleet()
    found = cheapest_fleet(trace(), fleet, SPEC, RATE, LEVELS, most_per_group=3)
    groups = price_list(fleet, 3)
    for option in found.tried:
        own = fluid_bound(trace(), with_counts(fleet, groups, tuple(option.counts[g.path] for g in groups)))
        assert own.rate_per_s * (1 - 1e-6) <= option.bound_per_s <= own.rate_per_s * 1.1


def test_fleets_leave_out_what_has_no_workers():
    groups = price_list(priced_fleet(), 3)
    by_path = {"pd/d": 2, "pd/p": 0, "far/t": 0}
    small = with_counts(priced_fleet(), groups, tuple(by_path[g.path] for g in groups))
    assert list(small.clusters) == ["pd"]
    assert list(small.clusters["pd"].workers) == ["d"]
    assert small.clusters["pd"].workers["d"].count == 2
    assert not small.links


def test_a_missing_price_and_a_hopeless_rate_are_named():
    with pytest.raises(ConfigError, match="`far` of far/t has no price"):
        cheapest_fleet(trace(), priced_fleet(far=0.0), SPEC, RATE, LEVELS)
    with pytest.raises(ConfigError, match="no fleet of up to 1 workers a group"):
        cheapest_fleet(trace(), priced_fleet(), SPEC, 1e6, LEVELS, most_per_group=1)

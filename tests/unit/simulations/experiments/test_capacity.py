"""The search for a policy's capacity, on made-up policies with a known edge and on small real runs."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from bound_fleets import make_fleet
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import ConfigError, PrfaasError
from simulations.commands.capacity import command
from simulations.commands.policy_spec import parse_policies
from simulations.experiments.capacity import (
    HIGHEST,
    LOWEST,
    Trial,
    capacity,
    next_rate,
    summed_up,
)
from simulations.experiments.levels import missed, parse_slo
from simulations.fleet import SLO
from simulations.fleet_load import dump_fleet
from simulations.workload.trace import Trace


def searched(edge: float, bound: float = 10.0, tolerance: float = 0.02) -> list[Trial]:
    """Trials of a policy that meets its levels up to `edge`."""
    trials: list[Trial] = []
    while (rate := next_rate(trials, bound, tolerance)) is not None:
        trials.append(Trial(rate, rate <= edge, {} if rate <= edge else {"ttft_p90": 9.0}, rate, {}, 0.0))
    return trials


@given(st.floats(LOWEST * 20, HIGHEST * 7), st.sampled_from([0.01, 0.02, 0.1]))
def test_the_search_ends_within_the_tolerance_under_the_edge(edge, tolerance):
    trials = searched(edge, tolerance=tolerance)
    best = max(t.rate_per_s for t in trials if t.met)
    assert edge / (1 + tolerance) <= best <= edge
    assert len(trials) <= 20


def test_a_policy_that_always_fails_is_given_up_on_near_the_lowest_rate():
    trials = searched(0.0)
    assert not any(t.met for t in trials)
    assert LOWEST * 10 <= min(t.rate_per_s for t in trials) < 2 * LOWEST * 10


def test_a_policy_that_always_meets_is_given_up_on_near_the_highest_rate():
    trials = searched(1e9)
    assert HIGHEST * 10 / 1.25 < max(t.rate_per_s for t in trials) <= HIGHEST * 10


def test_the_median_seed_counts_and_an_unfinished_search_says_so():
    by_seed = (tuple(searched(5.0)), tuple(searched(7.5)), tuple(searched(6.2)))
    found = summed_up("p", by_seed, 10.0, 0.02)
    assert found.rate_per_s == pytest.approx(6.2, rel=0.02)
    assert found.complete
    assert found.best is not None
    assert found.best.rate_per_s == found.rate_per_s
    assert found.first_miss is not None
    assert found.rate_per_s < found.first_miss.rate_per_s <= found.rate_per_s * 1.02
    assert not summed_up("p", (*by_seed[:2], by_seed[2][:2]), 10.0, 0.02).complete
    assert summed_up("p", ((), ()), 10.0, 0.02).rate_per_s == 0.0


# ---------------------------------------------------------------- real runs

FLEET = msgspec.structs.replace(
    make_fleet(prefill=1, decode=2, max_running=8), slo=SLO(ttft_p90=0.5, tpot_p90=0.2)
)


def trace(count: int = 80) -> Trace:
    rng = np.random.default_rng(2)
    arrival_s = np.cumsum(rng.exponential(0.1, count))
    return Trace("t", arrival_s, rng.integers(50, 1500, count), rng.integers(2, 20, count))


def test_capacity_is_met_just_below_and_missed_just_above():
    study = capacity(trace(), FLEET, parse_policies("cost_model,round_robin"), tolerance=0.05)
    for found in study.capacities:
        assert found.complete
        assert found.best is not None
        assert found.first_miss is not None
        assert found.first_miss.rate_per_s <= found.rate_per_s * 1.05
        assert found.best.throughput_per_s <= study.bound.rate_per_s
        assert found.best.figures["ttft_p90_s"] <= 0.5
        assert found.first_miss.missed


def test_warm_caches_and_rates_are_of_the_counted_half():
    whole = trace()
    study = capacity(whole, FLEET, parse_policies("cost_model"), drop_first=0.5, tolerance=0.3)
    best = study.capacities[0].best
    assert best is not None
    assert best.figures["requests"] == 40
    assert best.rate_per_s == study.capacities[0].rate_per_s


def test_a_trace_without_a_rate_and_a_search_without_levels_are_refused():
    at_once = Trace("t", np.zeros(3), np.full(3, 100), np.ones(3, dtype=np.int64))
    with pytest.raises(ConfigError, match="arrive at once"):
        capacity(at_once, FLEET, parse_policies("cost_model"))
    with pytest.raises(ConfigError, match="no service level"):
        capacity(trace(), FLEET, parse_policies("cost_model"), SLO())


def test_levels_are_parsed_with_units_and_mistakes_are_named():
    assert parse_slo("ttft_p90=2s, tpot_p50=50ms") == SLO(ttft_p90=2.0, tpot_p50=0.05)
    for text, problem in (
        ("ttft_p95=2s", "unknown level `ttft_p95`"),
        ("ttft_p90", "level=duration"),
        ("ttft_p90=fast", "fast"),
        ("ttft_p90=0s", "above 0"),
        ("ttft_p90=1s,ttft_p90=2s", "each given once"),
    ):
        with pytest.raises(ConfigError, match=problem):
            parse_slo(text)


def test_missed_names_the_levels_and_the_unserved():
    from run_results import make_result

    result = make_result()
    assert missed(result, SLO()) in ({}, {"unserved": float((result.state != 0).sum())})
    assert "ttft_p50" in missed(result, SLO(ttft_p50=1e-9))
    assert "ttft_p50" not in missed(result, SLO(ttft_p50=1e9))


# ---------------------------------------------------------------- the command


@pytest.fixture
def arguments(tmp_path):
    path = tmp_path / "fleet.yaml"
    path.write_text(dump_fleet(FLEET))
    return ["--trace", "generate:lognormal?requests=60&mu=6&sigma=0.5&output_tokens=5", "--fleet", str(path)]


def test_the_command_prints_json_with_the_bound_and_each_policy(arguments):
    run = CliRunner().invoke(
        command, [*arguments, "--policies", "cost_model,always_local", "--tolerance", "0.2", "--json"]
    )
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout)
    assert [p["policy"] for p in found["policies"]] == ["cost_model", "always_local"]
    assert found["bound"]["rate_per_s"] > 0
    for policy in found["policies"]:
        assert policy["complete"]
        assert policy["over_bound"] == pytest.approx(policy["rate_per_s"] / found["bound"]["rate_per_s"])


def test_levels_that_nobody_can_meet_end_in_a_clear_error(arguments):
    run = CliRunner().invoke(command, [*arguments, "--policies", "cost_model", "--slo", "ttft_p90=1ms"])
    assert isinstance(run.exception, PrfaasError)
    assert "no policy meets TTFT P90 ≤ 1 ms at any rate" in str(run.exception)


def test_options_that_contradict_are_refused(arguments):
    run = CliRunner().invoke(command, [*arguments, "--policies", "cost_model", "--cheapest"])
    assert "--cheapest needs --rate" in str(run.exception)
    run = CliRunner().invoke(command, [*arguments, "--policies", "cost_model", "--rate", "3"])
    assert "--rate" in str(run.exception)

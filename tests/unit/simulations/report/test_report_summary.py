"""A run's figures against values worked out by hand or another way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from run_results import make_fleet, make_result

from prfaas.units import Seconds
from simulations.fleet import SLO
from simulations.report.summary import (
    duration,
    is_good,
    limits,
    price_per_hour,
    spread,
    summarize,
    utilisation,
)
from simulations.result import REFUSED, SERVED, UNFINISHED, ResourceUse, RunResult


def four_requests() -> RunResult:
    """Arrivals at 0, 10, 20, 30 s; the second is refused; a third has one token only."""
    return replace(
        make_result(requests=4),
        state=np.array([SERVED, REFUSED, SERVED, SERVED]),
        refusal=("", "queues_full", "", ""),
        arrival_s=np.array([0.0, 10.0, 20.0, 30.0]),
        ttft_s=np.array([1.0, np.nan, 3.0, 6.0]),
        tpot_s=np.array([0.05, np.nan, np.nan, 0.02]),
        end_s=np.array([6.0, 10.0, 23.0, 40.0]),
        prompt_tokens=np.array([1000, 500, 2000, 3000]),
        output_tokens=np.array([101, 50, 1, 201]),
        kind=np.array([1, -1, 0, 3]),
        decode_cached_tokens=np.array([0, 0, 1500, 0]),
        site_cached_tokens=np.array([0, 0, 1500, 600]),
        kv_bytes=np.array([0, 0, 0, 2_000_000_000]),
        regret_s=np.array([0.0, np.nan, 0.0, 0.5]),
        attempts=np.array([1, 1, 2, 1]),
    )


def test_rates_are_over_first_arrival_to_last_end_and_count_served_requests_only() -> None:
    found = summarize(four_requests(), make_fleet())
    assert (found["requests"], found["served"], found["refused"], found["retried"]) == (4, 3, 1, 1)
    assert found["duration_s"] == 40.0
    assert found["offered_rps"] == pytest.approx(3 / 30)
    assert found["request_throughput_rps"] == pytest.approx(3 / 40)
    assert found["output_token_throughput_tps"] == pytest.approx((101 + 1 + 201) / 40)
    assert found["total_token_throughput_tps"] == pytest.approx((6000 + 303) / 40)
    assert found["e2e_s"]["max"] == 10.0
    assert found["ttft_s"]["p50"] == 3.0
    assert found["kv_gbytes"] == 2.0


def test_prefix_reuse_and_placement_count_what_was_placed() -> None:
    found = summarize(four_requests(), make_fleet())
    assert found["prefix_reuse_ratio"] == pytest.approx((1500 + 600) / 6000)
    assert found["placement"] == pytest.approx({"reuse": 1 / 3, "local": 1 / 3, "pool": 0.0, "remote": 1 / 3})
    assert found["least_cost_share"] == pytest.approx(2 / 3)


def test_a_good_request_was_served_within_both_limits_and_one_token_has_no_tpot_to_miss() -> None:
    slo = SLO(ttft_p90=Seconds(5.0), tpot_p90=Seconds(0.04))
    # The first misses TPOT, the second was refused, the last misses TTFT.
    assert is_good(four_requests(), slo).tolist() == [False, False, True, False]
    assert is_good(four_requests(), SLO()).tolist() == [True, False, True, True]
    found = summarize(four_requests(), make_fleet(slo))
    assert found["good_share"] == 0.25
    assert found["goodput_rps"] == pytest.approx(1 / 40)


def test_one_request_is_held_to_the_level_of_the_highest_percentile() -> None:
    slo = SLO(ttft_p50=Seconds(1.0), ttft_p99=Seconds(9.0), tpot_p50=Seconds(0.03))
    assert limits(slo) == (9.0, 0.03)


def test_the_verdict_names_every_reason() -> None:
    found = summarize(four_requests(), make_fleet(SLO(ttft_p90=Seconds(5.0), tpot_p90=Seconds(1.0))))
    # P90 of 1, 3, 6 lies at 1.8 of the way: 3 + 0.8 * 3.
    assert found["slo"]["ttft_p90"] == {"asked_s": 5.0, "found_s": pytest.approx(5.4), "met": False}
    assert found["slo"]["tpot_p90"]["met"] is True
    assert found["slo_met"] is False
    assert found["slo_words"] == "TTFT P90 is 5.40 s, above 5 s; 1 request was refused"


def test_a_stopped_run_neither_meets_nor_misses_levels() -> None:
    found = summarize(make_result(complete=False), make_fleet())
    assert found["slo_met"] is None
    assert "stopped" in found["slo_words"]


def test_cost_is_the_price_of_the_fleet_over_the_run_by_million_tokens() -> None:
    fleet = make_fleet(SLO(ttft_p90=Seconds(5.0), tpot_p90=Seconds(0.04)))
    assert price_per_hour(fleet) == 2 * 2.0 + 4 * 1.0 + 6.0
    cost = summarize(four_requests(), fleet)["cost"]
    spent = 14.0 * 40 / 3600
    assert cost["per_million_tokens"] == pytest.approx(spent / 6303e-6)
    assert cost["per_million_output_tokens"] == pytest.approx(spent / 303e-6)
    assert cost["per_million_good_tokens"] == pytest.approx(spent / 2001e-6)


def test_achieved_over_bound_is_the_served_rate_by_the_bound() -> None:
    found = summarize(four_requests(), make_fleet(), bound_rps=0.1)
    assert found["achieved_over_bound"] == pytest.approx(0.75)
    assert "achieved_over_bound" not in summarize(four_requests(), make_fleet())


def test_a_run_without_any_served_request_has_no_latency_and_does_not_fail() -> None:
    nothing = replace(
        four_requests(),
        state=np.full(4, REFUSED),
        kind=np.full(4, -1),
        ttft_s=np.full(4, np.nan),
        tpot_s=np.full(4, np.nan),
        regret_s=np.full(4, np.nan),
    )
    found = summarize(nothing, make_fleet())
    assert set(found["ttft_s"].values()) == {None}
    assert found["prefix_reuse_ratio"] is None
    assert found["slo_met"] is False


def test_spread_agrees_with_sorting() -> None:
    values = np.random.default_rng(1).exponential(size=1001)
    ordered = np.sort(values)
    found = spread(values)
    assert [found["p50"], found["p90"], found["max"]] == [ordered[500], ordered[900], ordered[1000]]


def test_equal_workers_are_one_group_and_links_stay_apart() -> None:
    groups = {group.name: group for group in utilisation(make_result())}
    assert list(groups) == ["prefill", "decode", "fast", "remote->pd", "pd->remote"]
    assert len(groups["decode"].members) == 4


def test_a_group_averages_shares_and_adds_up_queues() -> None:
    run = replace(
        make_result(),
        resources=(
            ResourceUse(
                "w-0", "decode", 1.0, {"utilisation": np.array([1.0, 0.0]), "queue": np.array([2.0, 0.0])}
            ),
            ResourceUse(
                "w-1", "decode", 1.0, {"utilisation": np.array([0.5, 0.0]), "queue": np.array([3.0, 1.0])}
            ),
        ),
    )
    (group,) = utilisation(run)
    utilisation_over_time, queue = group.over_time("utilisation"), group.over_time("queue")
    assert utilisation_over_time is not None
    assert utilisation_over_time.tolist() == [0.75, 0.0]
    assert queue is not None
    assert queue.tolist() == [5.0, 1.0]
    assert group.over_time("pages") is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0041, "4.1 ms"),
        (0.041, "41 ms"),
        (1.239, "1.24 s"),
        (12.44, "12.4 s"),
        (1234.0, "1,234 s"),
        (None, "unknown"),
    ],
)
def test_durations_read_as_people_write_them(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_unfinished_requests_of_a_stopped_run_are_neither_good_nor_bad() -> None:
    part = replace(four_requests(), state=np.array([SERVED, UNFINISHED, SERVED, UNFINISHED]), complete=False)
    assert summarize(part, make_fleet(SLO(ttft_p90=Seconds(2.0))))["good_share"] == 0.5

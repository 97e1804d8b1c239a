"""Charts carry the run's figures, thinned to what a page can hold."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_results import make_fleet, make_result

from simulations.report.chart import Chart
from simulations.report.comparison import CUT_AT, comparison_charts, quantile_curve
from simulations.report.inside import TIME_BINS, inside_charts
from simulations.report.samples import SLOWEST, sample_rows
from simulations.report.study import Study
from simulations.report.summary import summarize
from simulations.result import RunResult


def by_key(charts: list[Chart]) -> dict[str, Chart]:
    return {chart.key: chart for chart in charts}


def compared(*runs: RunResult, **study: object) -> dict[str, Chart]:
    whole = Study(make_fleet(), runs, **study)  # type: ignore[arg-type]
    return by_key(comparison_charts(whole, [summarize(run, whole.fleet, whole.bound_rps) for run in runs]))


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=50))
def test_a_quantile_curve_starts_at_the_least_ends_at_the_most_and_never_falls(values: list[float]) -> None:
    x, y = quantile_curve(np.array(values))
    assert len(x) == 200
    assert (x[0], x[-1]) == (min(values), max(values))
    assert (y[0], y[-1]) == (0.0, 1.0)
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(x))


def test_latency_curves_cross_the_p90_of_the_summary() -> None:
    run = make_result()
    chart = compared(run)["ttft"]
    at = np.interp(0.9, chart.series[0].y, np.array(chart.series[0].x, dtype=float))  # type: ignore[arg-type]
    assert at == pytest.approx(summarize(run, make_fleet())["ttft_s"]["p90"], rel=0.01)
    assert [(mark.axis, mark.at) for mark in chart.marks] == [("y", 0.9), ("x", 5.0)]


def test_a_single_run_has_no_bars_to_compare() -> None:
    assert {chart.kind for chart in compared(make_result()).values()} == {"curve"}


def test_what_is_not_known_has_no_chart() -> None:
    runs = (make_result("a"), make_result("b"))
    assert {"capacity", "bound"}.isdisjoint(compared(*runs))
    known = compared(*runs, bound_rps=7.0, capacity_rps={"a": 5.0})
    assert {"capacity", "bound"} <= set(known)
    assert [series.y for series in known["capacity"].series] == [[5.0], [None]]


def test_placement_bars_add_up_to_one() -> None:
    chart = compared(make_result("a"), make_result("b", seed=4))["placement"]
    assert np.sum([series.y for series in chart.series], axis=0) == pytest.approx([1.0, 1.0])


def test_a_policy_that_always_takes_the_least_cost_has_no_regret() -> None:
    run = make_result()
    chart = compared(run, replace(run, policy="least", regret_s=np.zeros(len(run.state))))["regret"]
    assert set(chart.series[1].y) == {0.0}
    assert chart.series[0].y[0] == pytest.approx((run.regret_s > 1e-3).mean())


def test_a_cost_out_of_proportion_is_cut() -> None:
    quick, hopeless = make_result("quick"), make_result("hopeless", slowness=2.6)
    chart = compared(quick, hopeless)["cost"]
    lengths = [series.y[0] for series in chart.series]
    assert lengths[0] is not None
    assert chart.x.high == CUT_AT * lengths[0]
    assert compared(quick, make_result("also", slowness=1.1))["cost"].x.high is None


def test_many_policies_differ_in_colour_or_dash() -> None:
    chart = compared(*(make_result(f"p{i}", requests=200) for i in range(17)))["ttft"]
    assert len({(series.colour, series.dash) for series in chart.series}) == 17


@settings(max_examples=15, deadline=None)
@given(st.integers(3, 3000), st.integers(0, 3))
def test_the_mix_over_time_is_made_of_shares_and_stays_small(requests: int, seed: int) -> None:
    chart = by_key(inside_charts(make_result(requests=requests, seed=seed)))["mix"]
    shares = np.sum([series.y for series in chart.series], axis=0)
    assert len(shares) <= TIME_BINS
    assert all(share == pytest.approx(1.0) or share == 0.0 for share in shares)


def test_inside_charts_stay_small_and_leave_out_what_was_not_sampled() -> None:
    run = make_result()
    charts = by_key(inside_charts(run))
    assert set(charts) == {
        "mix", "ttft-over-time", "stages", "links", "pages", "queues", "caches", "prediction",
    }  # fmt: skip
    assert all(len(s.x) <= TIME_BINS for c in charts.values() if c.key != "prediction" for s in c.series)
    bare = by_key(inside_charts(replace(run, resources=())))
    assert {"stages", "links", "pages", "queues"}.isdisjoint(bare)


def test_thinning_keeps_the_mean() -> None:
    run = make_result()
    chart = by_key(inside_charts(run))["links"]
    link = next(resource for resource in run.resources if resource.name == "remote->pd")
    shown = next(series for series in chart.series if series.name == "remote->pd")
    assert np.mean([value for value in shown.y if value is not None]) == pytest.approx(
        float(link.samples["utilisation"].mean())
    )


def test_requests_that_never_arrived_do_not_break_a_partial_run() -> None:
    run = make_result(complete=False)
    gone = np.arange(len(run.state)) > 1900
    partial = replace(
        run,
        arrival_s=np.where(gone, np.nan, run.arrival_s),
        kind=np.where(gone, -1, run.kind),
        end_s=np.where(gone, np.nan, run.end_s),
    )
    charts = by_key(inside_charts(partial))
    assert all(np.isfinite(np.array(series.x, dtype=float)).all() for series in charts["mix"].series)
    assert sample_rows(partial)[-1]["arrival_s"] is None


def test_the_sample_holds_the_slowest_requests() -> None:
    run = make_result(failed=5)
    rows = sample_rows(run)
    slowest = np.argsort(np.nan_to_num(run.ttft_s, nan=-1))[-SLOWEST:]
    assert {row["request"] for row in rows if row["why"] == "slowest"} == set(slowest.tolist())
    assert [row["request"] for row in rows] == sorted(row["request"] for row in rows)

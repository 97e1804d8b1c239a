"""The analytic model against the paper's figures, against brute force and against sampling."""

from __future__ import annotations

from dataclasses import asdict, replace
from math import inf

import numpy as np
import pytest

from simulations.paper.case import decode_slots, fit_h20, paper_case
from simulations.paper.model import Split, best_split, demand, figures, paper_splits
from simulations.paper.published import DEPLOYMENTS, LENGTHS, PUBLISHED, DeploymentName
from simulations.paper.report import BARS, analytic_figures, relative, relative_errors

CASE = paper_case()
ANALYTIC = analytic_figures(CASE)


@pytest.mark.parametrize(
    ("name", "figure"),
    [(n, f) for n in DEPLOYMENTS for f in BARS if asdict(PUBLISHED[n])[f] is not None],
)
def test_published_figure_comes_out_within_its_bar(name: DeploymentName, figure: str) -> None:
    expected = asdict(PUBLISHED[name])[figure]
    assert asdict(ANALYTIC[name])[figure] == pytest.approx(expected, rel=BARS[figure], abs=0)


@pytest.mark.parametrize(
    ("name", "mean_within", "p90_within"),
    [("prfaas_pd", 0.02, 0.01), ("homogeneous", 0.02, 0.01), ("naive", 0.04, 0.01)],
)
def test_ttft_is_off_by_no_more_than_docs_state(
    name: DeploymentName, mean_within: float, p90_within: float
) -> None:
    errors = relative_errors(ANALYTIC[name], PUBLISHED[name])
    assert abs(errors["ttft_mean_s"] or 1) < mean_within
    assert abs(errors["ttft_p90_s"] or 1) < p90_within


def test_the_gains_are_the_papers() -> None:
    mixed, plain, naive = (ANALYTIC[name] for name in DEPLOYMENTS)
    assert mixed.lambda_max / plain.lambda_max == pytest.approx(1.54, abs=0.01)
    assert naive.lambda_max / plain.lambda_max == pytest.approx(1.16, abs=0.02)
    assert 1 - mixed.ttft_mean_s / plain.ttft_mean_s == pytest.approx(0.50, abs=0.01)
    assert 1 - mixed.ttft_p90_s / plain.ttft_p90_s == pytest.approx(0.64, abs=0.01)


def test_fit_is_the_line_worked_out_from_the_two_rates() -> None:
    fit = fit_h20(LENGTHS, CASE.remote_prefill_s)
    assert (fit.slope, fit.offset_s) == pytest.approx((2.946, -0.590), abs=2e-3)
    assert decode_slots() == 20
    assert 9 / LENGTHS.mean(CASE.home_prefill_s) == pytest.approx(2.11)
    assert 3 / LENGTHS.mean(CASE.home_prefill_s, up_to=19_400) == pytest.approx(1.64)


def test_h20_times_stay_above_h200_times() -> None:
    tokens = np.arange(128, 131_073, 64.0)
    assert (CASE.home_prefill_s(tokens) > CASE.remote_prefill_s(tokens)).all()
    assert (CASE.home_ttft_s(tokens) > CASE.remote_ttft_s(tokens)).all()


@pytest.mark.parametrize("link_gbps", [2.0, 6.0, 10.0, 100.0])
def test_grid_optimum_is_the_brute_force_optimum(link_gbps: float) -> None:
    case = paper_case(link_gbps)
    thresholds = np.append(np.arange(0, 131_072, 5000.0), inf)
    found = figures(case, best_split(case, 4, 8, demand(case, thresholds))).lambda_max
    tried = [
        figures(case, Split(4, n_p, 8 - n_p, float(t))).lambda_max for n_p in range(9) for t in thresholds
    ]
    assert found == pytest.approx(max(tried))


def test_no_random_split_beats_the_grid_by_more_than_its_step() -> None:
    rng = np.random.default_rng(7)
    best = figures(CASE, paper_splits(CASE)["prfaas_pd"]).lambda_max
    for _ in range(300):
        n_p = int(rng.integers(9))
        split = Split(4, n_p, 8 - n_p, float(rng.uniform(0, 131_072)))
        assert figures(CASE, split).lambda_max <= best * 1.005


def test_figures_agree_with_sampled_lengths() -> None:
    lengths = LENGTHS.sample(200_000, np.random.default_rng(3)).astype(float)
    long = lengths > 19_400
    mixed = ANALYTIC["prfaas_pd"]
    assert mixed.offload_share == pytest.approx(long.mean(), abs=0.005)
    assert mixed.theta_prfaas == pytest.approx(4 / CASE.remote_prefill_s(lengths[long]).mean(), rel=0.01)
    assert mixed.theta_pd_p == pytest.approx(3 / CASE.home_prefill_s(lengths[~long]).mean(), rel=0.01)
    egress_gbps = mixed.lambda_max * np.where(long, CASE.kv_bytes(lengths), 0).mean() * 8e-9
    assert mixed.egress_gbps == pytest.approx(egress_gbps, rel=0.01)
    ttft_s = np.where(long, CASE.remote_ttft_s(lengths), CASE.home_ttft_s(lengths))
    assert mixed.ttft_mean_s == pytest.approx(ttft_s.mean(), rel=0.01)
    assert mixed.ttft_p90_s == pytest.approx(np.quantile(ttft_s, 0.9), rel=0.01)


def test_optimum_balances_both_prefill_stages_as_the_paper_says() -> None:
    mixed = ANALYTIC["prfaas_pd"]
    assert mixed.theta_prfaas
    assert mixed.theta_pd_p
    assert mixed.offload_share
    home, remote = mixed.theta_pd_p / (1 - mixed.offload_share), mixed.theta_prfaas / mixed.offload_share
    assert remote == pytest.approx(home, rel=0.01)


def test_without_decode_instances_nothing_is_served() -> None:
    assert figures(CASE, Split(4, 8, 0, 19_400.0)).lambda_max == 0.0


def test_an_unused_stage_limits_nothing() -> None:
    all_home = figures(CASE, Split(0, 6, 2, inf))
    assert all_home.lambda_max == pytest.approx(6 / LENGTHS.mean(CASE.home_prefill_s))
    assert all_home.theta_prfaas is None
    assert all_home.egress_gbps == 0.0


def test_twice_the_fleet_and_link_serve_twice_the_rate() -> None:
    double = replace(CASE, link_bytes_per_s=2 * CASE.link_bytes_per_s)
    one, two = figures(CASE, Split(4, 3, 5, 19_400.0)), figures(double, Split(8, 6, 10, 19_400.0))
    assert two.lambda_max == pytest.approx(2 * one.lambda_max)
    assert two.ttft_mean_s == one.ttft_mean_s


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [(1.1, 1.0, 0.1), (0.0, 0.0, 0.0), (1.0, 0.0, None), (None, 1.0, None), (1.0, None, None)],
)
def test_relative_error(found: float | None, expected: float | None, error: float | None) -> None:
    assert relative(found, expected) == (None if error is None else pytest.approx(error))

"""The bandwidth-bound side: monotone, with the known optima, and its three turning points."""

from __future__ import annotations

import json

import numpy as np
import pytest

from simulations.paper.case import paper_case
from simulations.paper.link_sweep import LinkSweep, sweep_link
from simulations.paper.model import best_split, figures


@pytest.fixture(scope="module")
def sweep() -> LinkSweep:
    return sweep_link(paper_case(), [1.0, 2.0, 5.0, 8.0, 10.0, 12.0, 12.5, 13.0, 40.0, 100.0], rtt_s=0.03)


def lambda_max(link_gbps: float) -> float:
    case = paper_case(link_gbps)
    return figures(case, best_split(case, 4, 8)).lambda_max


@pytest.mark.parametrize(("link_gbps", "expected"), [(10, 3.04), (8, 2.64), (5, 2.25), (2, 1.62)])
def test_known_optima_of_slow_links(link_gbps: float, expected: float) -> None:
    """Those were found on coarser grids of thresholds: ours may be better by a little, never worse."""
    assert expected <= lambda_max(link_gbps) <= expected * 1.02


def test_a_faster_link_never_serves_less(sweep: LinkSweep) -> None:
    assert (np.diff([point.figures.lambda_max for point in sweep.points]) >= 0).all()


def test_the_link_never_carries_more_than_it_can(sweep: LinkSweep) -> None:
    for point in sweep.points:
        assert point.figures.egress_gbps is not None
        assert point.figures.egress_gbps <= point.link_gbps * (1 + 1e-9)
        assert point.groups.kv_over_link == pytest.approx(point.figures.egress_gbps / point.link_gbps)


def test_threshold_falls_as_the_link_grows(sweep: LinkSweep) -> None:
    thresholds = [point.figures.threshold_tokens for point in sweep.points]
    assert thresholds == sorted(thresholds, reverse=True)


def test_optimum_moves_just_below_the_stated_rate(sweep: LinkSweep) -> None:
    assert sweep.unmoved_from_gbps == pytest.approx(12.25, abs=0.05)
    assert lambda_max(sweep.unmoved_from_gbps * 1.0001) == pytest.approx(lambda_max(1e6))
    assert lambda_max(sweep.unmoved_from_gbps * 0.98) < lambda_max(1e6)


@pytest.mark.parametrize(
    ("rate", "level"),
    [("pays_from_gbps", "homogeneous_lambda_max"), ("pays_at_equal_cost_from_gbps", "equal_cost_lambda_max")],
)
def test_remote_prefill_pays_from_the_stated_rate_on(sweep: LinkSweep, rate: str, level: str) -> None:
    link_gbps, rival = getattr(sweep, rate), getattr(sweep, level)
    assert lambda_max(link_gbps) >= rival
    assert lambda_max(link_gbps - 0.05) < rival


def test_two_gbit_are_worse_than_homogeneous(sweep: LinkSweep) -> None:
    assert lambda_max(2.0) < sweep.homogeneous_lambda_max


def test_binding_stages_are_named(sweep: LinkSweep) -> None:
    by_rate = {point.link_gbps: point.binding for point in sweep.points}
    assert by_rate[100.0] == "remote+home"
    assert by_rate[5.0] == "link+home"
    assert by_rate[1.0] == "home+decode"


def test_json_has_every_point_and_only_plain_values(sweep: LinkSweep) -> None:
    found = json.loads(json.dumps(sweep.as_dict(), allow_nan=False))
    assert found["sweep"] == "link"
    assert len(found["points"]) == len(sweep.points)
    assert found["points"][0]["groups"]["utilisation"]["decode"] == pytest.approx(1.0)

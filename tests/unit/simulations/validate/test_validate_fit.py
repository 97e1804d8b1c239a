"""Overheads are found again from made-up measurements; held-out halves share no configuration."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from simulation_data import needs_data
from test_closed_loop import case

from prfaas.errors import ConfigError
from simulations.commands.validate import command
from simulations.validate.closed_loop import Bare, Overheads, predict
from simulations.validate.fit import Validation, fit, measure, repeats, split, validate
from simulations.validate.points import read_points

TRUE = Overheads(1.7, 0.8, 0.003, 0.05, 0.3)


def measured() -> list[Bare]:
    """Points that obey `TRUE` exactly."""
    cases = [
        case(clients, inputs, answers)
        for clients in (1, 4, 16, 64)
        for inputs, answers in ((1024, 128), (1024, 1024), (8192, 256))
    ]
    return [
        replace(one, point=replace(one.point, ttft_s=predict(one, TRUE)[0], tpot_s=predict(one, TRUE)[1]))
        for one in cases
    ]


def test_the_overheads_behind_measurements_are_found() -> None:
    cases = measured()
    found = fit(cases)
    error = measure([(one, found) for one in cases])
    assert error.ttft_p90 < 0.02
    assert error.tpot_p90 < 0.02
    assert found.prefill_scale == pytest.approx(TRUE.prefill_scale, rel=0.1)
    assert found.in_step == pytest.approx(TRUE.in_step, abs=0.05)
    before = measure([(one, Overheads()) for one in cases])
    assert before.ttft_median > 0.2
    assert before.ttft_bias < 1.0


def test_halves_are_disjoint_in_configurations_and_seeded() -> None:
    cases = measured()
    repeated = [replace(one, point=replace(one.point, ttft_s=one.point.ttft_s * 1.1)) for one in cases]
    fitted, held = split(cases + repeated, seed=3)
    assert len(fitted) + len(held) == 2 * len(cases)
    assert not {one.point.configuration for one in fitted} & {one.point.configuration for one in held}
    assert len(fitted) == len(cases)
    assert split(cases + repeated, seed=3) == (fitted, held)
    assert split(cases + repeated, seed=4) != (fitted, held)


def test_repeats_say_how_far_measurements_agree() -> None:
    assert repeats([("a", 1.0), ("a", 3.0), ("b", 2.0), ("c", 2.0), ("c", 2.0), ("c", 1.0)]) == 2.5
    assert math.isnan(repeats([("a", 1.0), ("b", 2.0)]))


@needs_data
def test_points_are_read_once_each_and_skips_are_counted() -> None:
    sample = read_points()
    assert len(set(sample.points)) == len(sample.points) > 500
    assert {point.mode for point in sample.points} == {"agg", "disagg"}
    assert {point.system for point in sample.points} == {"h100_sxm", "h200_sxm"}
    assert len(sample.points) + sum(sample.skipped.values()) == 1884
    assert all(
        "bf16" in point.precision for point in sample.points if point.model == "meta-llama/Llama-3.1-70B"
    )


@pytest.fixture(scope="module")
def found() -> Validation:
    return validate(seed=0)


@needs_data
def test_fitting_helps_on_points_that_it_has_not_seen(found: Validation) -> None:
    own, common, bare = found.own_error, found.common_error, found.bare
    assert own.points == common.points
    assert own.points + 20 < bare.points < 2.2 * own.points
    assert own.ttft_median < common.ttft_median < bare.ttft_median
    assert own.tpot_median < common.tpot_median < bare.tpot_median
    assert own.ttft_median < 0.15
    assert own.tpot_median < 0.10


@needs_data
def test_the_command_prints_tables_and_says_where_it_is_bad(
    found: Validation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simulations.commands.validate.validate", lambda seed, data: found)
    shown = CliRunner().invoke(command, [])
    assert shown.exit_code == 0, shown.output
    assert "TTFT is bad even when fitted: " in shown.output
    assert "left out: " in shown.output
    printed = CliRunner().invoke(command, ["--json"])
    parsed = json.loads(printed.output, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert parsed["own_error"]["ttft_median"] == found.own_error.ttft_median
    assert {group["model"] for group in parsed["groups"]} == {group.model for group in found.groups}


def test_no_data_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"aic_silicon_sample\.csv\.gz does not exist"):
        validate(folder=tmp_path)

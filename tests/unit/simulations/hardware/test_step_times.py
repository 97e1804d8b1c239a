"""Linear, points and table step times against figures worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulations.fleet import HardwareSpec
from simulations.hardware.fit import fit_profile, relative_least_squares
from simulations.hardware.points import PointsStepTimes
from simulations.hardware.step_times import StepTimes
from simulations.hardware.table_times import TableStepTimes
from simulations.hardware.tables import CostTable

POINTS = [(1000.0, 1.0), (2000.0, 1.6), (10_000.0, 10.0)]
DECODE = {"decode_base_s": 0.02, "decode_sequence_s": 0.001, "decode_context_s": 1e-6}


def points(**fields: float) -> PointsStepTimes:
    spec = HardwareSpec(kv_tokens=1000, **{"chunk_tokens": 100_000, **fields})  # type: ignore[arg-type]
    return PointsStepTimes(POINTS, DECODE, spec)


def linear_table() -> CostTable:
    """Bilinear: prefill = 10 ms + 0.1 ms·n + 1 ns·n·c, decode = 5 ms + 1 ms·B + 1 µs·B·c."""
    new, prefix = np.array([64.0, 1024, 8192]), np.array([0.0, 2048, 32768])
    batch, context = np.array([1.0, 4, 16]), np.array([512.0, 4096, 65536])
    n, c = np.meshgrid(new, prefix, indexing="ij")
    b, x = np.meshgrid(batch, context, indexing="ij")
    return CostTable(
        "made/up/1/vllm",
        new,
        prefix,
        0.010 + 1e-4 * n + 1e-9 * n * c,
        batch,
        context,
        0.005 + 1e-3 * b + 1e-6 * b * x,
    )


def table(**fields: float) -> TableStepTimes:
    spec = HardwareSpec(kv_tokens=10**9, **{"chunk_tokens": 2048, **fields})  # type: ignore[arg-type]
    return TableStepTimes(linear_table(), spec)


PLAIN = table()


def decode_s(times: StepTimes, batch: int, context: float) -> float:
    line = times.decode_line(batch, context)
    assert context < line.until_context
    return line.base_s + line.slope_s * context


def test_points_are_met_and_joined_by_lines() -> None:
    times = points()
    for tokens, seconds in POINTS:
        assert times.prefill_s(int(tokens), 0) == pytest.approx(seconds)
    assert times.prefill_s(1500, 0) == pytest.approx(1.3)
    assert times.prefill_s(12_000, 0) == pytest.approx(10 + 2000 * 8.4 / 8000)
    # The first line meets zero tokens at 0.4 s: the part that every prompt pays, cached or not.
    assert times.prefill_s(500, 0) == pytest.approx(0.7)
    assert times.prefill_s(1000, 1000) == pytest.approx(1.6 - 1.0 + 0.4)
    assert times.prefill_s(0, 1000) == 0.0
    assert times.decode_line(3, 99.0).base_s == pytest.approx(0.023)
    assert times.shared_base_s() == pytest.approx(0.02)


def test_points_take_scales_and_overheads() -> None:
    times = points(prefill_scale=2.0, decode_scale=3.0, step_overhead_s=0.01, request_overhead_s=0.5)
    assert times.prefill_s(2000, 0) == pytest.approx(3.2 + 0.01)
    assert decode_s(times, 2, 1000) == pytest.approx(3 * (0.022 + 0.001) + 0.01)
    assert times.request_overhead_s == 0.5
    chunked = points(chunk_tokens=1000)
    assert chunked.prefill_s(2000, 0) == pytest.approx(chunked.chunk_s(1000, 0) + chunked.chunk_s(1000, 1000))


def test_points_are_told_to_the_router_nearly() -> None:
    profile = points().router_profile()
    for tokens, seconds in ((1000, 1.0), (5000, 4.75), (10_000, 10.0)):
        fit = profile.prefill_base_s + tokens * profile.prefill_token_s
        fit += tokens**2 / 2 * profile.prefill_context_s
        assert fit == pytest.approx(seconds, rel=0.15)
    assert profile.decode_base_s == 0.02


@given(st.integers(64, 2048), st.integers(0, 40_000), st.integers(1, 20), st.integers(512, 70_000))
def test_a_bilinear_table_is_met_everywhere(new: int, cached: int, batch: int, context: int) -> None:
    times = PLAIN
    assert times.chunk_s(new, cached) == pytest.approx(0.010 + 1e-4 * new + 1e-9 * new * cached)
    total = float(batch * context)
    assert decode_s(times, batch, total) == pytest.approx(0.005 + 1e-3 * batch + 1e-6 * total)


def test_a_prompt_is_the_sum_of_its_chunks() -> None:
    times = table()
    expected = times.chunk_s(2048, 100) + times.chunk_s(2048, 2148) + times.chunk_s(4, 4196)
    assert times.prefill_s(4100, 100) == pytest.approx(expected)
    assert times.chunk_s(1, 0) == times.chunk_s(64, 0)
    assert times.prefill_s(0, 100) == 0.0


def test_tables_take_scales_and_overheads() -> None:
    times = table(prefill_scale=2.0, decode_scale=0.5, step_overhead_s=0.1, request_overhead_s=0.7)
    assert times.prefill_s(4096, 0) == pytest.approx(2 * (0.02 + 4096e-4 + 1e-9 * 2048 * 2048) + 0.2)
    assert decode_s(times, 4, 4000.0) == pytest.approx(0.5 * (0.009 + 0.004) + 0.1)
    assert times.request_overhead_s == 0.7
    assert times.shared_base_s() == pytest.approx(0.5 * 0.006 + 0.1)


def test_decode_lines_hold_until_their_knot_and_join_there() -> None:
    times = TableStepTimes(bent_table(), HardwareSpec(kv_tokens=10**9))
    context, lines = 0.0, []
    while math.isfinite(context):
        lines.append(times.decode_line(3, context))
        context = lines[-1].until_context
    assert len(lines) == 2  # three knots, two segments, the outer ones going on
    knot = lines[0].until_context
    assert knot == 3 * 4096
    assert lines[0].base_s + lines[0].slope_s * knot == pytest.approx(
        lines[1].base_s + lines[1].slope_s * knot
    )
    assert lines[1].slope_s > lines[0].slope_s
    assert times.decode_line(3, 100.0) is times.decode_line(3, 200.0)


def bent_table() -> CostTable:
    made = linear_table()
    b, x = np.meshgrid(made.batch, made.context, indexing="ij")
    bent = 0.005 + 1e-3 * b + 1e-6 * b * x + 5e-6 * b * np.maximum(x - 4096, 0)
    return CostTable(
        made.name, made.new_tokens, made.prefix_tokens, made.prefill_s, made.batch, made.context, bent
    )


def test_steps_never_get_shorter_with_context() -> None:
    made = linear_table()
    wobbling = made.decode_s.copy()
    wobbling[:, 1] = wobbling[:, 0] - 1e-4
    times = TableStepTimes(
        CostTable(
            made.name, made.new_tokens, made.prefix_tokens, made.prefill_s, made.batch, made.context, wobbling
        ),
        HardwareSpec(kv_tokens=10**9),
    )
    seconds = [decode_s(times, 2, float(context)) for context in range(100, 200_000, 500)]
    assert (np.diff(seconds) >= -1e-12).all()


def test_the_fit_of_a_linear_table_is_exact() -> None:
    made = linear_table()
    n, c = np.meshgrid(made.new_tokens, made.prefix_tokens, indexing="ij")
    exact = CostTable(
        made.name, made.new_tokens, made.prefix_tokens, 0.003 + 2e-5 * n + 4e-10 * n * (c + n / 2),
        made.batch, made.context, made.decode_s,
    )  # fmt: skip
    profile, error = fit_profile(exact, chunk_tokens=8192, kv_tokens=10**9)
    assert (profile.prefill_base_s, profile.prefill_token_s) == pytest.approx((0.003, 2e-5))
    assert profile.prefill_context_s == pytest.approx(4e-10)
    assert (profile.decode_base_s, profile.decode_sequence_s) == pytest.approx((0.005, 1e-3))
    assert profile.decode_context_s == pytest.approx(1e-6)
    assert max(error.prefill_max, error.decode_max) < 1e-6


def test_no_coefficient_is_negative() -> None:
    n = np.array([1.0, 2, 3, 4])
    # 2n - 1 wants a base of -1; the best without it is found among the other subsets.
    found = relative_least_squares(np.column_stack([np.ones(4), n]), 2 * n - 1)
    assert found[0] == 0.0
    ratio = n / (2 * n - 1)
    assert found[1] == pytest.approx(ratio.sum() / (ratio**2).sum())

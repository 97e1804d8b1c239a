"""Curves and exact expectations: against quadrature, sampling and each other."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import lognorm

from simulations.paper.curves import Curve, joined_by_lines, least_squares
from simulations.paper.lengths import TruncatedLogNormal
from simulations.paper.published import KV_BYTES, LENGTHS, POINT_TOKENS, PREFILL_H200_S

QUADRATIC = least_squares(POINT_TOKENS, PREFILL_H200_S, degree=2)
LINES = joined_by_lines(POINT_TOKENS, PREFILL_H200_S)
ONE = Curve((), ((1.0,),))


def by_quadrature(lengths: TruncatedLogNormal, curve: Curve, above: float, up_to: float) -> float:
    """E[curve(L); above < L ≤ up_to] over ln L, by scipy."""
    density = lognorm(s=lengths.sigma, scale=np.exp(lengths.mu))
    whole = density.cdf(lengths.high) - density.cdf(lengths.low)
    low, high = max(above, lengths.low), min(up_to, lengths.high)
    if low >= high:
        return 0.0
    knots = [np.log(k) for k in curve.knots if low < k < high]
    value, _ = quad(
        lambda u: float(curve(np.exp(u))) * density.pdf(np.exp(u)) * np.exp(u),
        np.log(low),
        np.log(high),
        points=knots or None,
        limit=200,
    )
    return float(value / whole)


@settings(deadline=None)
@given(st.floats(0, 140_000), st.floats(0, 140_000), st.sampled_from([QUADRATIC, LINES, ONE]))
def test_expectation_over_a_range_is_the_integral(a: float, b: float, curve: Curve) -> None:
    above, up_to = min(a, b), max(a, b)
    expected = by_quadrature(LENGTHS, curve, above, up_to)
    assert LENGTHS.integral(curve, above, up_to) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@settings(deadline=None)
@given(st.floats(8, 11), st.floats(0.2, 2), st.floats(100, 200_000))
def test_the_two_sides_of_a_threshold_add_up(mu: float, sigma: float, threshold: float) -> None:
    lengths = TruncatedLogNormal(mu, sigma, 128, 131_072)
    parts = lengths.integral(LINES, up_to=threshold) + lengths.integral(LINES, above=threshold)
    assert parts == pytest.approx(lengths.mean(LINES))
    assert lengths.share(up_to=threshold) + lengths.share(above=threshold) == pytest.approx(1)


@settings(deadline=None)
@given(st.floats(0.001, 0.999))
def test_quantile_inverts_the_share(share: float) -> None:
    assert LENGTHS.share(up_to=LENGTHS.quantile(share)) == pytest.approx(share, abs=1e-9)


def test_mean_length_is_the_papers_27k() -> None:
    assert LENGTHS.mean(Curve((), ((0.0, 1.0),))) == pytest.approx(27_500, rel=0.01)


def test_long_prompts_are_44k_on_average() -> None:
    tokens = Curve((), ((0.0, 1.0),))
    assert LENGTHS.mean(tokens, above=19_400) / 1024 == pytest.approx(44, rel=0.01)


def test_samples_have_the_distributions_mean_and_bounds() -> None:
    sample = LENGTHS.sample(100_000, np.random.default_rng(0))
    assert sample.min() >= 128
    assert sample.max() <= 131_072
    assert LINES(sample.astype(float)).mean() == pytest.approx(LENGTHS.mean(LINES), rel=0.01)


def test_equal_seeds_give_equal_samples() -> None:
    first, second = (LENGTHS.sample(50, np.random.default_rng(5)) for _ in range(2))
    assert (first == second).all()


def test_empty_range_has_no_mean() -> None:
    assert np.isnan(LENGTHS.mean(LINES, above=200_000))


def test_lines_go_through_every_point_and_on_beyond() -> None:
    assert LINES(np.array(POINT_TOKENS, dtype=float)) == pytest.approx(PREFILL_H200_S)
    slope = (0.72 - 0.44) / 7168
    assert float(LINES(0)) == pytest.approx(0.44 - 1024 * slope)
    last = (7.40 - 1.84) / 98_304
    assert float(LINES(140_000)) == pytest.approx(7.40 + (140_000 - 131_072) * last)


@settings(deadline=None)
@given(st.floats(1, 140_000))
def test_inverse_of_lines(tokens: float) -> None:
    assert LINES.inverse(float(LINES(tokens))) == pytest.approx(tokens, rel=1e-9, abs=1e-6)


def test_quadratic_is_near_every_point() -> None:
    assert QUADRATIC(np.array(POINT_TOKENS, dtype=float)) == pytest.approx(PREFILL_H200_S, rel=0.021)


def test_kv_is_a_fixed_part_and_a_part_per_token() -> None:
    line = least_squares(POINT_TOKENS, KV_BYTES, degree=1)
    ((fixed, per_token),) = line.pieces
    assert fixed / 2**20 == pytest.approx(172, rel=0.01)
    assert per_token * 1024 / 2**20 == pytest.approx(16.7, rel=0.01)


@settings(deadline=None)
@given(st.floats(0.1, 5), st.floats(-1, 1), st.floats(1, 140_000))
def test_scaling_is_the_same_before_and_after(factor: float, offset: float, tokens: float) -> None:
    assert float(LINES.scaled(factor, offset)(tokens)) == pytest.approx(
        factor * float(LINES(tokens)) + offset
    )


def test_a_range_without_end_is_everything() -> None:
    assert LENGTHS.share(up_to=inf) == pytest.approx(1)

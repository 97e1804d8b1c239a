"""Waits by formula, against cases with an exact answer and a plain simulation."""

from __future__ import annotations

from dataclasses import replace
from heapq import heapify, heapreplace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulations.paper.case import paper_case
from simulations.paper.curves import joined_by_lines
from simulations.paper.event_driven import with_lines
from simulations.paper.model import Split, figures
from simulations.paper.published import LENGTHS, POINT_TOKENS, PREFILL_H200_S
from simulations.paper.queueing import erlang_c, mean_wait_s, squared, ttft_mean_s

CASE = paper_case()
LINES = joined_by_lines(POINT_TOKENS, PREFILL_H200_S)


@settings(deadline=None)
@given(st.floats(0.01, 0.99))
def test_one_server_waits_with_the_probability_of_being_busy(load: float) -> None:
    assert erlang_c(1, load) == pytest.approx(load)


def test_erlang_c_of_two_servers_by_hand() -> None:
    """a = 1, c = 2: C = (1/2 · 2) / (1 + 1 + 1/2 · 2) = 1/3."""
    assert erlang_c(2, 1.0) == pytest.approx(1 / 3)


@settings(deadline=None)
@given(st.floats(0.01, 0.95))
def test_one_server_is_pollaczek_and_khinchine(load: float) -> None:
    """Service of 1 or 3 s, one half each: mean 2, square 5; W = rate·E[S²] / 2(1 - load)."""
    rate = load / 2
    assert mean_wait_s(rate, 2.0, 5.0, 1) == pytest.approx(rate * 5 / 2 / (1 - load))


def test_overload_waits_without_end_and_idleness_not_at_all() -> None:
    assert mean_wait_s(2.0, 1.0, 1.0, 2) == inf
    assert mean_wait_s(0.0, 1.0, 1.0, 2) == 0.0


@settings(deadline=None)
@given(st.floats(1, 140_000))
def test_squared_curve(tokens: float) -> None:
    assert float(squared(LINES)(tokens)) == pytest.approx(float(LINES(tokens)) ** 2)


def test_ttft_without_load_is_the_models() -> None:
    split = Split(4, 3, 5, 19_400.0)
    assert ttft_mean_s(CASE, split, 1e-9) == pytest.approx(figures(CASE, split).ttft_mean_s)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_wait_is_that_of_a_simulated_queue(load: float) -> None:
    """Four servers, first come first served, lengths of the case."""
    rng = np.random.default_rng(11)
    service = LINES(LENGTHS.sample(100_000, rng).astype(float))
    rate = load * 4 / LENGTHS.mean(LINES)
    free, waited = [0.0] * 4, 0.0
    heapify(free)
    for now, work in zip(np.cumsum(rng.exponential(1 / rate, len(service))), service, strict=True):
        begin = max(now, free[0])
        waited += begin - now
        heapreplace(free, begin + work)
    expected = mean_wait_s(rate, LENGTHS.mean(LINES), LENGTHS.mean(squared(LINES)), 4)
    assert waited / len(service) == pytest.approx(expected, rel=0.1)


def test_lines_cost_the_model_less_than_four_percent() -> None:
    lines, split = with_lines(CASE), Split(4, 3, 5, 19_400.0)
    ratio = figures(lines, split).lambda_max / figures(CASE, split).lambda_max
    assert 0.96 < ratio < 1.0
    assert replace(lines, remote_prefill_s=CASE.remote_prefill_s, home_prefill_s=CASE.home_prefill_s) == CASE

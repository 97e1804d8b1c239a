"""Calibration: the fit finds known coefficients, resists disturbed steps, and borrows pages cleanly."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.engine.calibration import (
    DecodePoint,
    Point,
    PrefillPoint,
    fit_profile,
    measure_profile,
    nonnegative_least_squares,
)
from prfaas.engine.interface import StepProfile
from prfaas.engine.step import RunnerError, StepPlan, StepResult
from prfaas.errors import EngineFailure, OutOfPages
from prfaas.kv.pool import PagePool

TRUE = StepProfile(
    chunk_tokens=256,
    prefill_base_s=0.004,
    prefill_token_s=0.0011,
    prefill_context_s=3e-7,
    decode_base_s=0.02,
    decode_sequence_s=0.003,
    decode_context_s=2e-6,
)
POINTS: list[Point] = [
    *(PrefillPoint(n, c) for n in (64, 128, 256) for c in (0, 1000, 4000)),
    *(DecodePoint(b, c) for b in (1, 4, 8) for c in (0, 1000, 4000)),
]


def true_seconds(point: Point) -> float:
    if isinstance(point, PrefillPoint):
        work = point.tokens * (point.context + point.tokens / 2)
        return TRUE.prefill_base_s + point.tokens * TRUE.prefill_token_s + work * TRUE.prefill_context_s
    context = point.batch * point.context
    return TRUE.decode_base_s + point.batch * TRUE.decode_sequence_s + context * TRUE.decode_context_s


def coefficients(profile: StepProfile) -> list[float]:
    return [getattr(profile, name) for name in profile.__struct_fields__[1:]]


def test_exact_times_give_back_their_coefficients() -> None:
    profile = fit_profile(256, {point: [true_seconds(point)] for point in POINTS})
    assert coefficients(profile) == pytest.approx(coefficients(TRUE), rel=1e-6)


def test_one_disturbed_step_per_point_changes_nothing() -> None:
    seconds = {point: [true_seconds(point), 9 * true_seconds(point), true_seconds(point)] for point in POINTS}
    assert coefficients(fit_profile(256, seconds)) == pytest.approx(coefficients(TRUE), rel=1e-6)


def test_no_coefficient_is_negative_even_if_more_work_was_measured_faster() -> None:
    profile = fit_profile(256, {point: [1 / (1 + sum(point.features()))] for point in POINTS})
    assert min(coefficients(profile)) >= 0


def test_a_family_without_a_point_is_refused() -> None:
    with pytest.raises(ValueError, match="no DecodePoint was measured"):
        fit_profile(256, {PrefillPoint(1, 0): [1.0]})


@given(
    st.lists(st.tuples(*[st.floats(0, 10)] * 3), min_size=3, max_size=8),
    st.lists(st.floats(-10, 10), min_size=8, max_size=8),
)
@settings(deadline=None, max_examples=100)
def test_no_small_nonnegative_step_improves_the_least_squares(
    rows: list[tuple[float, float, float]], target: list[float]
) -> None:
    a, b = np.array(rows), np.array(target[: len(rows)])
    x = nonnegative_least_squares(a, b)
    assert (x >= 0).all()
    # The conditions for a minimum over x >= 0: no gradient along free columns, none inward at the bounds.
    gradient = a.T @ (a @ x - b)
    tolerance = 1e-6 * (1 + float(np.abs(a).max()) ** 2 * (1 + float(np.abs(x).max())))
    assert (gradient >= -tolerance).all()
    assert abs(float(gradient @ x)) <= tolerance * (1 + float(np.abs(x).sum()))


class Recorder:
    """Answers at once and remembers the plans."""

    def __init__(self, error: str = "") -> None:
        self.plans: list[StepPlan] = []
        self.error = error

    async def __call__(self, plan: StepPlan) -> StepResult | RunnerError:
        self.plans.append(plan)
        await asyncio.sleep(0)
        if self.error:
            return RunnerError(step=plan.step, message=self.error)
        return StepResult(step=plan.step, token_ids=[], logprobs=[], elapsed_s=0.0)


async def measure(pool: PagePool, recorder: Recorder, context_length: int = 1000) -> StepProfile:
    return await measure_profile(
        recorder,
        pool,
        chunk_tokens=64,
        context_length=context_length,
        contexts=[0, 200, 100_000],
        batches=[1, 4],
        budget_s=0.0,
    )


@pytest.mark.parametrize("pages", [8, 20, 1000])
async def test_steps_stay_within_model_and_pool_and_pages_come_back(pages: int) -> None:
    pool, recorder = PagePool(pages, 16), Recorder()
    await measure(pool, recorder)
    for sequence in (s for plan in recorder.plans for s in plan.sequences):
        end = sequence.start + len(sequence.token_ids)
        assert end <= 1000
        assert len(sequence.page_ids) * 16 >= end
        assert max(sequence.page_ids) < pages
    assert pool.counts().free == pages
    assert pool.snapshot() == []


async def test_a_spent_budget_still_measures_both_families() -> None:
    recorder = Recorder()
    await measure(PagePool(1000, 16), recorder)
    decodes = [bool(plan.sequences[0].sampling) for plan in recorder.plans]
    assert decodes.count(True) >= 4
    assert decodes.count(False) >= 4
    assert len(decodes) < 20


async def test_a_failed_step_is_reported_and_pages_come_back() -> None:
    pool = PagePool(100, 16)
    with pytest.raises(EngineFailure, match="calibration step failed: no memory"):
        await measure(pool, Recorder("no memory"))
    assert pool.counts().free == 100


async def test_an_occupied_pool_is_refused() -> None:
    pool = PagePool(4, 16)
    pool.allocate(4)
    with pytest.raises(OutOfPages):
        await measure(pool, Recorder())

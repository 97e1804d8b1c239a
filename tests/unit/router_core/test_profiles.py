from __future__ import annotations

import pytest
from brain_fleet import PROFILE
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.profiles import MovingMedian, RefinedProfile, decode_seconds, prefill_seconds


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 2000), st.integers(0, 2000))
def test_prefill_seconds_is_the_sum_over_chunks(new: int, cached: int) -> None:
    total, position, end = 0.0, cached, cached + new
    while position < end:
        n = min(PROFILE.chunk_tokens, end - position)
        total += PROFILE.prefill_base_s + n * PROFILE.prefill_token_s
        total += n * (position + n / 2) * PROFILE.prefill_context_s
        position += n
    assert prefill_seconds(PROFILE, new, cached) == pytest.approx(total)


def test_the_factor_follows_what_prefills_took_and_ignores_an_outlier() -> None:
    profile = RefinedProfile(PROFILE, window=5)
    predicted = prefill_seconds(PROFILE, 500, 0)
    for actual in (2 * predicted, 2 * predicted, 50 * predicted):
        profile.observe_prefill(500, 0, mixed_s=0.0, actual_s=actual)
    assert profile.prefill_factor == pytest.approx(2.0)
    assert profile.prefill_s(500, 0) == pytest.approx(2 * predicted)


def test_decodes_that_shared_the_steps_are_not_held_against_prefill() -> None:
    profile = RefinedProfile(PROFILE, window=5)
    predicted = prefill_seconds(PROFILE, 500, 0)
    profile.observe_prefill(500, 0, mixed_s=0.3, actual_s=predicted + 0.3)
    assert profile.prefill_factor == pytest.approx(1.0)


def test_the_factor_is_bounded_and_tiny_prefills_do_not_count() -> None:
    profile = RefinedProfile(PROFILE, window=5)
    profile.observe_prefill(1, 0, mixed_s=0.0, actual_s=9.0)
    assert profile.prefill_factor == 1.0
    profile.observe_prefill(500, 0, mixed_s=0.0, actual_s=1e6)
    assert profile.prefill_factor == 5.0


def test_an_idle_decode_step_takes_no_time_and_a_measured_one_corrects_the_next() -> None:
    assert decode_seconds(PROFILE, 0, 0) == 0.0
    profile = RefinedProfile(PROFILE, window=5)
    profile.observe_decode_step(4, 1000, actual_s=3 * decode_seconds(PROFILE, 4, 1000))
    assert profile.decode_s(4, 1000) == pytest.approx(3 * decode_seconds(PROFILE, 4, 1000))


def test_the_moving_median_forgets_old_samples() -> None:
    moving = MovingMedian(3, 1.0)
    for sample in (9.0, 9.0, 9.0, 2.0, 2.0):
        moving.add(sample)
    assert moving.value == 2.0

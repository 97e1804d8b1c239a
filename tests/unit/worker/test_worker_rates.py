"""Measured rates from running totals."""

from __future__ import annotations

import pytest

from prfaas.engine.interface import EngineLoad
from prfaas.worker.rates import RateMeter


def load(prefill: int, decode: int, steps: int, busy_s: float) -> EngineLoad:
    return EngineLoad(
        waiting=0,
        running=0,
        waiting_prefill_tokens=0,
        running_context_tokens=0,
        prefill_tokens_total=prefill,
        decode_tokens_total=decode,
        steps_total=steps,
        busy_s_total=busy_s,
    )


def test_rates_are_zero_before_anything_was_computed() -> None:
    meter = RateMeter()
    meter.sample(0.0, load(0, 0, 0, 0.0))
    assert meter.prefill_tokens_per_s == 0.0
    assert meter.decode_step_s == 0.0


def test_mixed_intervals_do_not_blur_pure_ones() -> None:
    meter = RateMeter()
    meter.sample(0.0, load(0, 0, 0, 0.0))
    meter.sample(1.0, load(500, 0, 2, 1.0))
    meter.sample(2.0, load(500, 40, 12, 1.5))
    meter.sample(3.0, load(600, 41, 13, 9.5))
    assert meter.prefill_tokens_per_s == pytest.approx(500.0)
    assert meter.decode_step_s == pytest.approx(0.05)


def test_old_intervals_are_forgotten() -> None:
    meter = RateMeter(window_s=10.0)
    meter.sample(0.0, load(0, 0, 0, 0.0))
    meter.sample(1.0, load(500, 0, 2, 1.0))
    meter.sample(20.0, load(500, 0, 2, 1.0))
    assert meter.prefill_tokens_per_s == 0.0

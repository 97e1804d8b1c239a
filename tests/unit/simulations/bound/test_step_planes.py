"""The planes under decode step times: never above a step, and as high as convexity allows."""

from __future__ import annotations

import numpy as np
import pytest
from bound_fleets import FAST
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.engine.interface import StepProfile
from simulations.bound.envelope import Steps
from simulations.hardware.step_times import LinearStepTimes, StepLine

LINEAR = LinearStepTimes(StepProfile(chunk_tokens=512, **FAST))


class Broken:
    """Any table: seconds by batch, at knots of the total context, joined by lines."""

    def __init__(self, knots: list[float], seconds: list[list[float]]) -> None:
        self.knots, self.seconds = knots, seconds

    def decode_line(self, batch: int, context_tokens: float) -> StepLine:
        row = self.seconds[batch - 1]
        left = min(max(np.searchsorted(self.knots, context_tokens, side="right") - 1, 0), len(self.knots) - 2)
        slope = (row[left + 1] - row[left]) / (self.knots[left + 1] - self.knots[left])
        last = left == len(self.knots) - 2
        end = float("inf") if last else self.knots[left + 1]
        return StepLine(row[left] - slope * self.knots[left], slope, end)


@st.composite
def tables(draw):
    batches = draw(st.integers(1, 6))
    knots = [0.0, 50.0, 200.0, 500.0]
    value = st.floats(0.001, 1.0)
    return Broken(knots, [draw(st.lists(value, min_size=4, max_size=4)) for _ in range(batches)]), batches


@settings(deadline=None)
@given(tables(), st.data())
def test_every_plane_is_under_every_step(table_and_batches, data):
    times, batches = table_and_batches
    steps = Steps.of(times, batches, context_length=80)
    batch = data.draw(st.integers(1, batches))
    context = data.draw(st.floats(0, 80 * batch))
    line = times.decode_line(batch, context)
    step_s = line.base_s + line.slope_s * context
    assert (steps.planes @ [1.0, batch, context]).max() <= step_s + 1e-9
    assert steps.least_s <= step_s + 1e-12


def test_a_linear_profile_is_its_own_only_plane():
    steps = Steps.of(LINEAR, 64, context_length=4096)
    expected = [FAST["decode_base_s"], FAST["decode_sequence_s"], FAST["decode_context_s"]]
    assert steps.planes.shape == (1, 3)
    assert steps.planes[0] == pytest.approx(expected, rel=1e-6)


def test_the_planes_touch_a_convex_table_at_its_knots():
    """Step time max(flat, memory-bound, compute-bound): convex, so nothing is lost."""

    def step_s(batch: int, context: float) -> float:
        return max(0.01, 0.004 + 2e-5 * context, 0.002 + 0.002 * batch + 1e-5 * context)

    knots = np.linspace(0, 2000, 201).tolist()
    times = Broken(knots, [[step_s(b, c) for c in knots] for b in range(1, 17)])
    steps = Steps.of(times, 16, context_length=125)
    for batch, context in ((1, 0.0), (1, 125.0), (4, 300.0), (16, 1000.0), (16, 2000.0), (8, 0.0)):
        assert (steps.planes @ [1.0, batch, context]).max() == pytest.approx(step_s(batch, context), rel=1e-4)


def test_a_worker_of_one_sequence_keeps_its_bends():
    times = Broken([0.0, 100.0, 200.0], [[0.01, 0.01, 0.03]])
    steps = Steps.of(times, 1, context_length=200)
    assert (steps.planes @ [1.0, 1.0, 50.0]).max() == pytest.approx(0.01)
    assert (steps.planes @ [1.0, 1.0, 150.0]).max() == pytest.approx(0.02)

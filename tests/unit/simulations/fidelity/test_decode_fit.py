"""Decode coefficients come out of recorded answers."""

from __future__ import annotations

import pytest

from prfaas.engine.interface import StepProfile
from prfaas.protocol.messages import PrefillReport
from simulations.fidelity.decode_fit import decode_samples, fit_decode
from simulations.fidelity.recording import Row

WRONG = StepProfile(128, 0.1, 0.001, 0.0, 0.05, 0.05, 1e-4)


def answer(begin_s: float, prompt: int, tokens: int, step_s: float) -> Row:
    return Row(
        request_id=str(begin_s),
        arrival_s=begin_s - 1.0,
        prompt_tokens=prompt,
        max_tokens=tokens,
        decode="d",
        site="p",
        ttft_s=1.0,
        end_s=1.0 + (tokens - 1) * step_s,
        completion_tokens=tokens,
    )


@pytest.mark.parametrize(
    ("base", "sequence", "context"), [(0.02, 0.002, 1e-6), (0.09, 0.009, 1.7e-5), (0.01, 0.02, 2e-6)]
)
def test_steps_of_equal_batches_are_found_again(base: float, sequence: float, context: float) -> None:
    rows, begin_s = [], 0.0
    for round_ in range(60):
        batch, prompt, tokens = 1 + round_ % 5, 200 + 700 * (round_ % 7), 41
        total = batch * (prompt + tokens / 2)
        step_s = base + batch * sequence + total * context
        rows += [answer(begin_s, prompt, tokens, step_s) for _ in range(batch)]
        begin_s += 100.0
    found = fit_decode(WRONG, decode_samples("d", rows, 128))
    for batch, total in ((1, 1000), (4, 8000), (2, 6000)):
        true_s = base + batch * sequence + total * context
        assert found[0] + batch * found[1] + total * found[2] == pytest.approx(true_s, rel=0.1)


def test_too_few_answers_leave_the_calibrated_profile() -> None:
    rows = [answer(0.0, 100, 20, 0.5), answer(50.0, 100, 20, 0.5)]
    assert fit_decode(WRONG, decode_samples("d", rows, 128)) == (0.05, 0.05, 1e-4)
    assert fit_decode(WRONG, decode_samples("other", rows * 5, 128)) == (0.05, 0.05, 1e-4)


def test_local_prefills_do_not_count_as_decode_time() -> None:
    # Ten answers of 40 steps of 0.1 s; during each, a prompt of 512 tokens takes four chunks and 8 s.
    rows = []
    for number in range(10):
        row = answer(100.0 * number, 500, 41, 0.1)
        row.end_s += 8.0 - 4 * 0.1
        other = answer(100.0 * number + 20.0, 500, 2, 0.1)
        other.site = "d"
        other.arrival_s = 100.0 * number + 1.0
        other.report = PrefillReport(
            site="d", cached_tokens=0, decode_cached_tokens=0, computed_tokens=512,
            queue_s=0.0, prefill_s=8.0, ready_s=8.0,
        )  # fmt: skip
        other.ttft_s, other.end_s = 50.0, 50.1
        rows += [row, other]
    base, sequence, context = fit_decode(WRONG, decode_samples("d", rows, 128))
    assert base + sequence + 520 * context == pytest.approx(0.1, rel=0.1)

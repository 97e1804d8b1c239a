"""Errors of one replay, and of several."""

from __future__ import annotations

import pytest

from simulations.fidelity.recording import Row
from simulations.fidelity.terms import term_errors


def rows(*ttfts: float) -> list[Row]:
    return [
        Row(str(i), float(i), 10, 4, ttft_s=ttft, end_s=ttft + 3.0, completion_tokens=4)
        for i, ttft in enumerate(ttfts)
    ]


def test_a_request_is_predicted_by_the_median_of_the_replays() -> None:
    live = rows(1.0, 2.0, 4.0)
    found = term_errors(live, rows(1.1, 1.0, 4.0), rows(0.5, 2.2, 4.0), rows(9.0, 2.4, 4.0))["ttft_s"]
    assert found.rows == 3
    assert found.median_error == pytest.approx(0.1)
    # Each replay's own percentile, on average.
    assert found.predicted_median_s == pytest.approx((1.1 + 2.2 + 4.0) / 3)


def test_a_request_that_failed_in_any_replay_does_not_count() -> None:
    again = rows(1.0, 1.0)
    again[0].failed = True
    assert term_errors(rows(1.0, 1.0), rows(1.0, 1.0), again)["ttft_s"].rows == 1

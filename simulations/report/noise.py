"""Is a difference between two runs of the same requests more than chance? A block bootstrap over time.

Neighbouring requests share queues, so blocks of consecutive requests are resampled, the same ones for both
runs (Künsch's moving-block idea with fixed blocks). It knows the chance of one trace, not of other traces.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from simulations.fleet import SLO
from simulations.report.summary import is_good
from simulations.result import SERVED, UNFINISHED, RunResult
from simulations.workload.trace import Floats

BLOCKS = 20
RESAMPLES = 400
MOST_REQUESTS = 20_000
"""Longer runs are thinned evenly."""

Interval = tuple[float, float]


def good_share_difference(first: RunResult, second: RunResult, slo: SLO) -> Interval | None:
    """95 % interval of (first - second) share of good requests; None where the runs are too short to say."""
    if len(first.state) != len(second.state):
        return None
    ended = (first.state != UNFINISHED) & (second.state != UNFINISHED)
    a, b = (is_good(run, slo)[ended].astype(float) for run in (first, second))
    return _interval(a - b, lambda picked: float(picked.mean()))


def ttft_ratio(first: RunResult, second: RunResult, quantile: float = 0.9) -> Interval | None:
    """95 % interval of the ratio of the runs' TTFT quantiles, over requests that both served."""
    if len(first.state) != len(second.state):
        return None
    both = (first.state == SERVED) & (second.state == SERVED)
    pairs = np.column_stack([first.ttft_s[both], second.ttft_s[both]])

    def ratio(picked: Floats) -> float:
        upper = np.quantile(picked, quantile, axis=0)
        return float(upper[0] / upper[1])

    return _interval(pairs, ratio)


def _interval(values: Floats, statistic: Callable[[Floats], float]) -> Interval | None:
    if len(values) < 5 * BLOCKS:
        return None
    values = values[:: max(1, -(-len(values) // MOST_REQUESTS))]
    blocks = np.array_split(values, BLOCKS)
    rng = np.random.default_rng(0)
    found = [
        statistic(np.concatenate([blocks[index] for index in rng.integers(0, BLOCKS, BLOCKS)]))
        for _ in range(RESAMPLES)
    ]
    low, high = np.percentile(found, (2.5, 97.5))
    return float(low), float(high)

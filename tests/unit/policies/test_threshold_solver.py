from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from policies.threshold_solver import Capacity, Samples, ThresholdProblem

MIB = 2**20


def samples(lengths: list[int], home: list[float], away: list[float], size: list[float]) -> Samples:
    return Samples(np.array(lengths), np.array(home, float), np.array(away, float), np.array(size, float))


def paper_samples(n: int = 20_000) -> Samples:
    """Equally likely lengths of the case study: log-normal (9.90, 1.00) between 128 and 128K. Prefill
    on 8 x H200 by the quadratic fitted to the four published points, on 8 x H20 by 2.946 T - 0.590 s."""
    low, high = stats.norm.cdf((np.log([128, 131_072]) - 9.90) / 1.00)
    share = low + (high - low) * (np.arange(n) + 0.5) / n
    lengths = np.exp(9.90 + stats.norm.ppf(share))
    grid = np.array([1, 8, 32, 128]) * 1024.0
    away_s = np.polynomial.Polynomial.fit(grid, [0.44, 0.72, 1.84, 7.40], 2)(lengths)
    kv_bytes = 172 * MIB + 16.7 * MIB * lengths / 1024
    return Samples(lengths.astype(np.int64), 2.946 * away_s - 0.590, away_s, kv_bytes)


def paper_capacity(link_gbps: float = 100.0) -> Capacity:
    return Capacity(away_workers=4, link_bytes_per_s=link_gbps * 1e9 / 8, decode_rate=20 / 0.025 / 1024)


def test_the_papers_case_gives_its_threshold_split_and_rate() -> None:
    problem = ThresholdProblem(paper_samples(), paper_capacity())
    home, solution = problem.best_split(8)
    assert home == 3
    assert solution.threshold_tokens == pytest.approx(19_400, rel=0.02)
    assert solution.rate == pytest.approx(3.24, rel=0.02)
    assert solution.offload_share == pytest.approx(0.496, rel=0.02)
    assert solution.decode_rate == pytest.approx(3.91, rel=0.02)
    assert solution.link_bound < 0.25


@pytest.mark.parametrize(("gbps", "rate"), [(10, 3.04), (8, 2.64), (5, 2.25), (2, 1.62)])
def test_a_thin_link_binds_and_fewer_requests_go(gbps: float, rate: float) -> None:
    wide = ThresholdProblem(paper_samples(), paper_capacity()).solve(3, 5)
    problem = ThresholdProblem(paper_samples(), paper_capacity(gbps))
    assert problem.best_split(8)[1].rate == pytest.approx(rate, rel=0.02)
    thin = problem.solve(3, 5)
    assert thin.link_bound > 1
    assert thin.offload_share < wide.offload_share
    assert thin.threshold_tokens > wide.threshold_tokens


def test_four_requests_by_hand() -> None:
    """Home takes twice as long. With one worker each: stay = 2 gives home (2+4)/4 s, away (3+4)/4 s per
    request, so 1/1.75; stay = 3 gives 12/4 = 3 s at home, stay = 1 gives (2+3+4)/4 s away: both slower."""
    problem = ThresholdProblem(
        samples([10, 20, 30, 40], [2, 4, 6, 8], [1, 2, 3, 4], [0, 0, 0, 0]), Capacity(1, 1.0)
    )
    solution = problem.solve(1, 1)
    assert solution.threshold_tokens == 25
    assert solution.rate == pytest.approx(4 / 7)
    assert solution.home_rate == pytest.approx(4 / 6)
    assert solution.offload_share == 0.5


def test_equal_lengths_stay_together() -> None:
    problem = ThresholdProblem(samples([5, 5, 5, 9], [1] * 4, [1] * 4, [0] * 4), Capacity(1, 1.0))
    assert problem.solve(1, 1).offload_share in (0.0, 0.25, 1.0)


def test_without_remote_workers_everything_stays_and_without_home_workers_everything_goes() -> None:
    four = samples([10, 20, 30, 40], [1] * 4, [1] * 4, [1] * 4)
    stays = ThresholdProblem(four, Capacity(0, 0.0)).solve(2, 1)
    assert (stays.threshold_tokens, stays.offload_share, stays.rate) == (40, 0.0, 2.0)
    goes = ThresholdProblem(four, Capacity(2, 100.0)).solve(0, 1)
    assert (goes.threshold_tokens, goes.offload_share, goes.rate) == (9, 1.0, 2.0)


def test_impossible_problems_say_so() -> None:
    with pytest.raises(ValueError, match="no samples"):
        ThresholdProblem(samples([], [], [], []), Capacity(1, 1.0))
    with pytest.raises(ValueError, match="cannot be split"):
        ThresholdProblem(samples([1], [1], [1], [1]), Capacity(1, 1.0)).best_split(1)


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.floats(0.01, 9), st.floats(0.01, 9), st.integers(0, 10**6)),
        min_size=1,
        max_size=25,
    ),
    st.integers(0, 3),
    st.floats(1e3, 1e6),
    st.integers(0, 3),
)
def test_no_other_threshold_serves_more(
    rows: list[tuple[int, float, float, int]], away: int, link: float, home: int
) -> None:
    """Against the model's own formula, evaluated for each threshold from 0 to beyond the longest."""
    length, home_s, away_s, size = (np.array(column, float) for column in zip(*rows, strict=True))

    def rate(threshold: float) -> float:
        stays, n = length <= threshold, len(length)
        work = ((home, home_s[stays]), (away, away_s[~stays]), (link, size[~stays]))
        return min(capacity * n / part.sum() if part.sum() > 0 else np.inf for capacity, part in work)

    problem = ThresholdProblem(Samples(length.astype(np.int64), home_s, away_s, size), Capacity(away, link))
    solution = problem.solve(home, 1)
    best = max(rate(threshold) for threshold in range(-1, 52))
    reached = rate(-1) if solution.offload_share == 1 else rate(solution.threshold_tokens)
    assert min(solution.home_rate, solution.away_rate, solution.link_rate) == pytest.approx(best)
    assert reached == pytest.approx(best)

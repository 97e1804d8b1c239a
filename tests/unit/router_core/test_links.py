from __future__ import annotations

import pytest
from brain_fleet import counters

from router.core.links import LinkEstimator


def estimator(prior: float = 10e6) -> LinkEstimator:
    link = LinkEstimator(prior, rtt_s=0.04, quiet_s=30.0)
    link.observe("w", counters(0), 0.0)
    return link


def sample(link: LinkEstimator, n: int, rate: float, worker: str = "w") -> None:
    """n statuses, a quarter second apart, each with 0.1 s of measured sending at `rate`."""
    for i in range(1, n + 1):
        moved = int(rate * 0.1 * i)
        link.observe(worker, counters(moved, moved, 0.1 * i), 0.25 * i)


@pytest.mark.parametrize("truth", [1e6, 100e6])
def test_a_prior_wrong_by_ten_is_corrected_within_four_samples(truth: float) -> None:
    link = estimator(prior=10e6)
    sample(link, 4, truth)
    assert link.rate(1.0) == pytest.approx(truth, rel=0.1)


def test_without_samples_the_prior_holds_and_bytes_are_only_a_lower_bound() -> None:
    link = estimator(prior=10e6)
    link.observe("w", counters(2_000_000), 1.0)
    assert link.rate(1.0) == 10e6
    link.observe("w", counters(42_000_000), 2.0)
    assert link.rate(2.0) == pytest.approx(40e6)
    assert link.confidence(2.0) == 0.0


def test_a_quiet_link_drifts_back_to_its_prior_and_asks_for_a_probe() -> None:
    link = estimator(prior=10e6)
    sample(link, 6, 2e6)
    assert not link.probe_due(2.0)
    assert link.probe_due(40.0)
    assert link.rate(20.0) < link.rate(60.0) < link.rate(200.0) <= 10e6
    assert link.rate(500.0) == pytest.approx(10e6, rel=0.01)


def test_counters_that_start_again_are_not_taken_for_a_sample() -> None:
    link = estimator()
    sample(link, 3, 5e6)
    before = link.samples
    link.observe("w", counters(10, 10, 0.001), 2.0)
    assert link.samples == before


def test_one_senders_sample_counts_what_the_others_took_of_the_link() -> None:
    link = estimator(prior=10e6)
    link.observe("other", counters(0), 0.0)
    for i in range(1, 9):
        now_s = 0.5 * i
        link.observe("other", counters(int(6e6 * now_s)), now_s)
        link.observe("w", counters(int(4e6 * now_s), int(4e6 * now_s), now_s), now_s)
    assert link.rate(4.0) == pytest.approx(10e6, rel=0.1)


def test_the_measured_round_trip_replaces_the_configured_one() -> None:
    link = estimator()
    assert link.rtt_s == 0.04
    link.observe("w", counters(0, rtt_s=0.07), 1.0)
    assert link.rtt_s == 0.07
    link.forget_sender("w")
    assert link.rtt_s == 0.04

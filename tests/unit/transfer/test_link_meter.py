"""Only time in which bytes waited for the link is a sample of the link."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.transfer.counters import LinkMeter

RTT = 0.04


def drive(releases: list[float], nbytes: int, rate: float, jitter: list[float] | None = None) -> LinkMeter:
    """Writes become ready at `releases` and pass a FIFO link; DONE one RTT after the last byte left."""
    meter = LinkMeter("pd", RTT)
    free_s = 0.0
    for index, ready_s in enumerate(releases):
        meter.posted(nbytes)
        free_s = max(free_s, ready_s) + nbytes / rate
        meter.done(nbytes, ready_s, free_s + RTT + (jitter[index] if jitter else 0.0))
    return meter


@given(rate=st.floats(1e5, 1e9), writes=st.integers(4, 50))
@settings(deadline=None, max_examples=50)
def test_a_saturated_link_is_measured_exactly(rate: float, writes: int) -> None:
    counters = drive([0.0] * writes, 10**6, rate).snapshot()
    assert counters.bytes_total == writes * 10**6
    assert counters.sampled_bytes_total == (writes - 2) * 10**6
    assert counters.sampled_bytes_total / counters.sampled_s_total == pytest.approx(rate, rel=1e-6)
    assert counters.inflight_bytes == 0


@given(gap=st.floats(1.05, 10), jitter=st.lists(st.floats(0, 0.002), min_size=40, max_size=40))
@settings(deadline=None, max_examples=50)
def test_a_link_that_waits_for_compute_gives_no_sample(gap: float, jitter: list[float]) -> None:
    send_s = 0.05
    counters = drive([index * send_s * gap for index in range(40)], 10**6, 10**6 / send_s, jitter).snapshot()
    assert counters.bytes_total == 40 * 10**6
    assert counters.sampled_bytes_total == 0


def test_a_late_notice_alone_is_no_sample() -> None:
    meter = LinkMeter("pd", RTT)
    for ready_s, done_s in [(0.0, 0.05), (0.1, 0.15), (0.2, 0.35), (0.3, 0.36), (0.4, 0.45)]:
        meter.posted(100)
        meter.done(100, ready_s, done_s)
    assert meter.snapshot().sampled_bytes_total == 0


def test_the_smallest_late_round_trip_replaces_the_configured_one() -> None:
    meter = LinkMeter("pd", RTT)
    assert meter.rtt_s == RTT
    assert meter.snapshot().rtt_s == 0, "not measured yet"
    for rtt_s in (0.09, 0.05, 0.07):
        meter.observe_rtt(rtt_s)
    assert meter.rtt_s == meter.snapshot().rtt_s == 0.05
    for _ in range(100):
        meter.observe_rtt(0.08)
    assert meter.rtt_s == 0.08


def test_failed_and_dropped_writes_are_in_flight_no_more() -> None:
    meter = LinkMeter("pd")
    meter.posted(10)
    meter.posted(20)
    meter.failed(10)
    meter.dropped(20)
    counters = meter.snapshot()
    assert (counters.inflight_bytes, counters.errors_total, counters.bytes_total) == (0, 1, 0)

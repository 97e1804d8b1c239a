"""Emulated links: the rate belongs to the pair of clusters, whoever sends; times as on a real long link."""

from __future__ import annotations

import fcntl
import math
import os
import struct
import time
from pathlib import Path

import pytest

from prfaas.transfer.agent import TransferError
from prfaas.transfer.link import DirectLink, EmulatedLink

RATE = 1e6


def test_a_write_lands_after_half_a_round_trip_and_its_tag_after_one_and_a_half(tmp_path: Path) -> None:
    link = EmulatedLink(RATE, 0.4, tmp_path / "new folder" / "link")
    passage = link.enter(100_000, 1000.0)
    assert passage.post_s == pytest.approx(1000.1 + 0.2)
    assert passage.done_s == pytest.approx(1000.1 + 0.4)
    assert passage.notify_s == pytest.approx(1000.1 + 0.6)
    assert link.control_delay_s == 0.2
    link.close()


def test_senders_of_a_pair_share_its_rate_and_take_turns(tmp_path: Path) -> None:
    links = [EmulatedLink(RATE, 0.0, tmp_path / "link") for _ in range(2)]
    now_s, sent = 50.0, [0, 0]
    while now_s < 60.0:
        for index, link in enumerate(links):
            if link.admit_s(now_s, 0) <= now_s:
                link.enter(100_000, now_s)
                sent[index] += 100_000
        now_s += 0.005
    assert sum(sent) == pytest.approx(10 * RATE, rel=0.03)
    assert sent[0] == pytest.approx(sent[1], rel=0.03)
    for link in links:
        link.close()


def test_an_idle_link_gives_no_credit(tmp_path: Path) -> None:
    link = EmulatedLink(RATE, 0.0, tmp_path / "link")
    assert link.enter(500_000, 10.0).done_s == pytest.approx(10.5)
    assert link.enter(500_000, 100.0).done_s == pytest.approx(100.5)
    link.close()


def test_a_booking_from_before_a_reboot_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "link").write_bytes(struct.pack("d", 1e9))
    link = EmulatedLink(RATE, 0.0, tmp_path / "link")
    assert link.enter(1_000_000, 5.0).done_s == pytest.approx(6.0)
    link.close()


def test_a_lock_that_is_never_released_is_an_error_not_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EmulatedLink, "LOCK_DEADLINE_S", 0.05)
    link = EmulatedLink(RATE, 0.0, tmp_path / "link")
    other = os.open(tmp_path / "link", os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(TransferError, match="stopped process"):
        link.enter(1, time.monotonic())
    os.close(other)  # as when its process is killed
    link.enter(1, time.monotonic())
    link.close()


@pytest.mark.parametrize(("rate", "rtt"), [(0, 0.1), (-1, 0.1), (1, -0.1)])
def test_impossible_links_are_refused(rate: float, rtt: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="emulated link"):
        EmulatedLink(rate, rtt, tmp_path / "link")


def test_a_direct_link_delays_nothing_and_bounds_what_is_in_flight() -> None:
    link = DirectLink(25e6, 0.04)
    passage = link.enter(10**9, 7.0)
    assert (passage.post_s, passage.done_s, passage.notify_s) == (7.0, 7.0, None)
    assert link.admit_s(7.0, 2 * 10**6) == 7.0, "two bandwidth-delay products must fit"
    assert link.admit_s(7.0, 64 * 10**6) == math.inf
    assert link.control_delay_s == 0

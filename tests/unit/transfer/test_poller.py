"""The polling thread sleeps when told to, wakes when told to, and survives a step that raises."""

from __future__ import annotations

import logging
import threading

import pytest

from prfaas.transfer.poller import Poller


def test_a_sleeping_poller_runs_again_when_woken() -> None:
    ran = threading.Semaphore(0)

    def step() -> None:
        ran.release()

    poller = Poller("test", step)
    assert ran.acquire(timeout=5)
    assert not ran.acquire(timeout=0.05)
    poller.wake()
    assert ran.acquire(timeout=5)
    poller.stop()
    poller.stop()
    poller.wake()
    assert not ran.acquire(timeout=0.05)


def test_a_step_that_raises_is_logged_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    ran = threading.Semaphore(0)

    def step() -> float:
        ran.release()
        raise RuntimeError("broken")

    with caplog.at_level(logging.ERROR):
        poller = Poller("test", step)
        assert ran.acquire(timeout=5)
        assert ran.acquire(timeout=5)
        poller.stop()
    assert "event=poller_step_failed name=test" in caplog.text


def test_stop_ends_the_thread() -> None:
    before = threading.active_count()
    poller = Poller("test", lambda: 0.001)
    assert threading.active_count() == before + 1
    poller.stop()
    assert threading.active_count() == before

"""What a sender learns of a link from its own writes.

With layer streaming most transfers are limited by compute, so bytes over time underrates the link. Only the
time between two consecutive DONEs in which the second write's bytes were already waiting when the first
one's last byte left (one round trip before its DONE) is a sample of the link's rate. Such intervals chain
over a busy period, so their sums are right even where writes share the link unevenly or are noticed in
batches.
"""

from __future__ import annotations

import math
import threading
from collections import deque

from prfaas.protocol.messages import LinkCounters

_RTT_WINDOW = 32


class LinkMeter:
    """Running totals towards one cluster. Thread safe."""

    def __init__(self, cluster: str, rtt_s: float = 0.0) -> None:
        """
        Args:
            rtt_s: round trip until one is measured; 0 = unknown.
        """
        self._cluster = cluster
        self._lock = threading.Lock()
        self._configured_rtt_s = rtt_s
        self._rtts_s: deque[float] = deque(maxlen=_RTT_WINDOW)
        self._last_done_s = -math.inf
        self._backlogged = False
        """Whether the last write done had been waiting for the link, too."""
        self._bytes = 0
        self._sampled_bytes = 0
        self._sampled_s = 0.0
        self._in_flight_bytes = 0
        self._errors = 0

    @property
    def rtt_s(self) -> float:
        """Smallest of the latest round trips measured, else the configured one."""
        with self._lock:
            return self._rtt_s()

    def observe_rtt(self, rtt_s: float) -> None:
        with self._lock:
            self._rtts_s.append(rtt_s)

    def posted(self, nbytes: int) -> None:
        with self._lock:
            self._in_flight_bytes += nbytes

    def dropped(self, nbytes: int) -> None:
        """A write will never be DONE: its agent is destroyed."""
        with self._lock:
            self._in_flight_bytes -= nbytes

    def failed(self, nbytes: int) -> None:
        with self._lock:
            self._in_flight_bytes -= nbytes
            self._errors += 1

    def done(self, nbytes: int, waiting_since_s: float, now_s: float) -> None:
        """A write is DONE; its bytes had been ready to go since `waiting_since_s`."""
        with self._lock:
            self._in_flight_bytes -= nbytes
            self._bytes += nbytes
            waited = waiting_since_s < self._last_done_s - self._rtt_s()
            # A write that was merely noticed late looks like a backlog of one and is followed by a short
            # interval: it takes two waiting writes in a row to tell.
            if waited and self._backlogged:
                self._sampled_bytes += nbytes
                self._sampled_s += now_s - self._last_done_s
            self._last_done_s, self._backlogged = now_s, waited

    def snapshot(self) -> LinkCounters:
        with self._lock:
            return LinkCounters(
                cluster=self._cluster,
                bytes_total=self._bytes,
                sampled_bytes_total=self._sampled_bytes,
                sampled_s_total=self._sampled_s,
                rtt_s=min(self._rtts_s, default=0.0),
                inflight_bytes=self._in_flight_bytes,
                errors_total=self._errors,
            )

    def _rtt_s(self) -> float:
        return min(self._rtts_s, default=self._configured_rtt_s)

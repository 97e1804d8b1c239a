"""What a link carries, learned only from what was measured on it.

With layer streaming most transfers are limited by compute, so a link shows its rate only in intervals in
which further bytes were waiting (`LinkCounters.sampled_*`); everything else is a lower bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from prfaas.protocol.messages import LinkCounters
from router.core import costs as c
from router.core.bookings import Booking

SMALLEST_SAMPLE_S = 0.005
SAMPLE_WEIGHT = 0.3
"""Weight of the newest sample once there are several."""
BOUND_WINDOW_S = 1.0
"""A lower bound is taken over at least this long, so that late arrivals of statuses do not inflate it."""


@dataclass(slots=True)
class _Sender:
    counters: LinkCounters
    bound_anchor_s: float
    bound_anchor_bytes: int
    rate_bytes_per_s: float = 0.0
    """Over the last bound window: what this sender took from the link."""
    rate_at_s: float = 0.0


class LinkEstimator:
    """Rate of one direction of a link: prior and samples, mixed by confidence on a logarithmic scale."""

    def __init__(self, prior_bytes_per_s: float, rtt_s: float, quiet_s: float) -> None:
        self._prior = prior_bytes_per_s
        self._configured_rtt_s = rtt_s
        self._quiet_s = quiet_s
        self._senders: dict[str, _Sender] = {}
        self._measured = 0.0
        self._samples = 0
        self._sampled_at_s = 0.0
        self._bound = 0.0
        self._bound_at_s = 0.0
        self._last_use_s = -math.inf
        self._measured_rtt_s = 0.0
        """Smallest round trip that a sender has measured; 0 where none has."""

    def configure(self, prior_bytes_per_s: float, rtt_s: float) -> None:
        self._prior, self._configured_rtt_s = prior_bytes_per_s, rtt_s

    @property
    def samples(self) -> int:
        return self._samples

    @property
    def rtt_s(self) -> float:
        """Smallest round trip that a sender has measured lately; the configured one until then."""
        return self._measured_rtt_s or self._configured_rtt_s

    @property
    def errors_total(self) -> int:
        return sum(sender.counters.errors_total for sender in self._senders.values())

    def forget_sender(self, worker: str) -> None:
        """The worker is gone; its next incarnation counts from zero."""
        self._senders.pop(worker, None)
        self._find_rtt()

    def observe(self, worker: str, counters: LinkCounters, now_s: float) -> None:
        """Take the differences to this sender's former counters."""
        sender = self._senders.get(worker)
        if sender is None or counters.bytes_total < sender.counters.bytes_total:
            self._senders[worker] = _Sender(counters, now_s, counters.bytes_total)
            self._find_rtt()
            return
        before, sender.counters = sender.counters, counters
        if counters.rtt_s != before.rtt_s:
            self._find_rtt()
        if counters.bytes_total > before.bytes_total:
            self._last_use_s = now_s
        sampled_bytes = counters.sampled_bytes_total - before.sampled_bytes_total
        sampled_s = counters.sampled_s_total - before.sampled_s_total
        if sampled_s >= SMALLEST_SAMPLE_S and sampled_bytes > 0:
            self._add_sample(sampled_bytes / sampled_s + self._taken_by_others(worker, now_s), now_s)
        self._update_bound(sender, now_s)

    def confidence(self, now_s: float) -> float:
        """Weight of the samples against the prior, 0 … 1: halves its distance to 1 with each sample,
        decays once the link has been quiet."""
        if not self._samples:
            return 0.0
        quiet_s = max(0.0, now_s - self._sampled_at_s - self._quiet_s)
        return float((1 - 0.25**self._samples) * math.exp(-quiet_s / self._quiet_s))

    def rate(self, now_s: float) -> float:
        """Bytes per second that the link carries, by prior, samples and lower bound."""
        weight = self.confidence(now_s)
        mixed = self._prior
        if weight > 0:
            mixed = math.exp((1 - weight) * math.log(self._prior) + weight * math.log(self._measured))
        bound = self._bound if now_s - self._bound_at_s <= self._quiet_s else 0.0
        return max(mixed, bound)

    def probe_due(self, now_s: float) -> bool:
        """No sample for `quiet_s`: a small transfer would tell what the link carries now."""
        return now_s - self._sampled_at_s > self._quiet_s if self._samples else True

    def _find_rtt(self) -> None:
        measured = (sender.counters.rtt_s for sender in self._senders.values())
        self._measured_rtt_s = min((rtt_s for rtt_s in measured if rtt_s > 0), default=0.0)

    def _add_sample(self, rate: float, now_s: float) -> None:
        self._samples += 1
        weight = max(SAMPLE_WEIGHT, 1 / self._samples)
        self._measured += weight * (rate - self._measured)
        self._sampled_at_s = now_s

    def _taken_by_others(self, worker: str, now_s: float) -> float:
        """The rate belongs to the pair of clusters: one sender's sample is only its share of it."""
        return sum(
            sender.rate_bytes_per_s
            for name, sender in self._senders.items()
            if name != worker and now_s - sender.rate_at_s <= BOUND_WINDOW_S
        )

    def _update_bound(self, sender: _Sender, now_s: float) -> None:
        elapsed_s = now_s - sender.bound_anchor_s
        if elapsed_s < BOUND_WINDOW_S:
            return
        moved = sender.counters.bytes_total - sender.bound_anchor_bytes
        sender.rate_bytes_per_s, sender.rate_at_s = moved / elapsed_s, now_s
        sender.bound_anchor_s, sender.bound_anchor_bytes = now_s, sender.counters.bytes_total
        if sender.rate_bytes_per_s >= self._bound or now_s - self._bound_at_s > self._quiet_s:
            self._bound, self._bound_at_s = sender.rate_bytes_per_s, now_s


@dataclass(slots=True, eq=False)
class LinkState:
    """One direction of a link: its estimate and the transfers booked on it."""

    name: str
    source: str
    target: str
    row: int
    """Column in the link table."""
    estimator: LinkEstimator
    transfers: dict[str, Booking] = field(default_factory=dict)

    def backlog_bytes(self, now_s: float) -> float:
        """Booked bytes that have not crossed yet, each transfer taken as evenly spread over its time."""
        left_bytes = 0.0
        for booking in self.transfers.values():
            begin_s = booking.booked_s + booking.terms[c.TRANSFER_BEGIN]
            left = (booking.landed_s - now_s) / max(booking.landed_s - begin_s, 1e-9)
            left_bytes += booking.kv_bytes * min(max(left, 0.0), 1.0)
        return left_bytes

"""What happened against what was predicted: the overhead of each path, and outcomes for policies."""

from __future__ import annotations

import math

import numpy as np

from policies.types import Floats, Outcome, PlacementKind
from router.core import costs as c
from router.core.bookings import Booking
from router.core.profiles import MovingMedian

OVERHEAD_RANGE_S = (-0.5, 2.0)
"""One sample's bounds: what lies beyond is another term's error, not a fixed overhead."""
_PATHS = (0, 0, 1, 2)
"""By `PlacementKind`."""


class PathOverheads:
    """Seconds of TTFT that no term explains (HTTP hops, tokenization, scheduling, noise), by path: on the
    decode worker, through a pool worker, through another cluster. Moving medians."""

    def __init__(self, window: int, by_kind_s: Floats | None = None) -> None:
        """
        Args:
            by_kind_s: where the medians are written to, by `PlacementKind`.
        """
        self._medians = [MovingMedian(window, 0.0) for _ in range(3)]
        self.by_kind_s: Floats = np.zeros(len(_PATHS)) if by_kind_s is None else by_kind_s

    def observe(self, kind: PlacementKind, seconds: float) -> None:
        low, high = OVERHEAD_RANGE_S
        path = _PATHS[kind]
        median = self._medians[path]
        median.add(min(high, max(low, seconds)))
        for each, other in enumerate(_PATHS):
            if other == path:
                self.by_kind_s[each] = median.value


def actual_start_s(booking: Booking) -> float | None:
    """Seconds from booking to the first chunk, the grant's way included; None before the report."""
    if booking.report is None:
        return None
    return booking.terms[c.GRANTED] + booking.report.queue_s


def overhead_sample_s(booking: Booking) -> float | None:
    """TTFT less what the terms explain, with measured queue and prefill times in place of predicted ones,
    so that their errors are not learned as overhead; None where it cannot be told."""
    start_s, report = actual_start_s(booking), booking.report
    if start_s is None or report is None or booking.ttft_s is None:
        return None
    ready_s = start_s + report.prefill_s + booking.terms[c.TRANSFER]
    if booking.terms[c.SLOT] > ready_s:
        return None
    return booking.ttft_s - booking.elapsed_s - ready_s - booking.terms[c.STEP]


def outcome(booking: Booking, ok: bool) -> Outcome:
    """What became of a booked request, with (predicted, actual) of each measured term."""
    report = booking.report
    ttft_s = math.nan if booking.ttft_s is None else booking.ttft_s
    terms: dict[str, tuple[float, float]] = {}
    start_s = actual_start_s(booking)
    if report is not None and start_s is not None:
        terms["start_s"] = (booking.terms[c.START], start_s)
        terms["prefill_s"] = (booking.terms[c.PREFILL], report.prefill_s)
        if booking.link is not None:
            moved_s = max(0.0, report.ready_s - start_s - report.prefill_s)
            terms["transfer_s"] = (booking.terms[c.TRANSFER], moved_s)
    overhead_s = overhead_sample_s(booking)
    if overhead_s is not None:
        terms["overhead_s"] = (booking.terms[c.OVERHEAD], overhead_s + booking.elapsed_s)
    if booking.ttft_s is not None:
        terms["ttft_s"] = (booking.terms[c.TTFT], ttft_s)
    return Outcome(
        request_id=booking.request_id,
        kind=booking.kind,
        site=booking.site.name,
        decode=booking.decode.name,
        predicted_ttft_s=booking.terms[c.TTFT],
        actual_ttft_s=ttft_s,
        ok=ok,
        terms=terms,
    )

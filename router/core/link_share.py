"""What booked transfers leave of a link: their activity over time as a function summed up once per placement,
so that each candidate asks it twice instead of looking at every transfer.
"""

from __future__ import annotations

import numpy as np

from policies.types import Floats, Ints
from router.core import tables as t
from router.core.compiled import compiled, sort

OVERDUE_S = 0.1
"""A booked transfer that should be over is held to last this much longer."""
KNOT_ROWS = 5
"""Time, then active transfers and their rates since the first knot, then the slopes of both."""


@compiled
def activity(bookings: Floats, rows: Ints, now_s: float, knots: Floats, begin: int) -> None:
    """Seconds of activity, and bytes, of the transfers `rows` up to any time: two piecewise linear functions
    by their knots, written into `knots[:, begin : begin + 2 * len(rows)]`; times relative to `now_s`.

    A transfer takes its bytes evenly from its begin to its end: it adds min(max(x, begin), end) - begin.
    """
    transfers = len(rows)
    times, ends = np.empty(2 * transfers), np.empty(2 * transfers, dtype=np.int64)
    rates = np.empty(transfers)
    for i in range(transfers):
        begin_s = bookings[rows[i], t.TRANSFER_BEGIN] - now_s
        end_s = max(bookings[rows[i], t.TRANSFER_END] - now_s, OVERDUE_S, begin_s)
        times[i], times[transfers + i] = begin_s, end_s
        ends[i], ends[transfers + i] = i, transfers + i
        rates[i] = bookings[rows[i], t.KV_BYTES] / max(end_s - begin_s, 1e-6)
    sort(times, ends)
    active = rate = seconds = total_bytes = 0.0
    for k in range(2 * transfers):
        if k > 0:
            seconds += active * (times[k] - times[k - 1])
            total_bytes += rate * (times[k] - times[k - 1])
        if ends[k] < transfers:
            active, rate = active + 1, rate + rates[ends[k]]
        else:
            active, rate = active - 1, rate - rates[ends[k] - transfers]
        knots[0, begin + k], knots[1, begin + k], knots[2, begin + k] = times[k], seconds, total_bytes
        knots[3, begin + k], knots[4, begin + k] = active, rate


@compiled
def _until(knots: Floats, at_s: float) -> tuple[float, float]:
    """(seconds of activity, bytes) up to `at_s`."""
    low, high = 0, knots.shape[1]
    while low < high:
        middle = (low + high) // 2
        if knots[0, middle] <= at_s:
            low = middle + 1
        else:
            high = middle
    if low == 0:
        return 0.0, 0.0
    k = low - 1
    passed_s = at_s - knots[0, k]
    return knots[1, k] + knots[3, k] * passed_s, knots[2, k] + knots[4, k] * passed_s


@compiled
def link_share(rate: float, knots: Floats, begin_s: float, length_s: float) -> float:
    """Bytes per second left to a transfer from `begin_s` on by those booked on the link while it lasts.

    Max-min fair sharing with capped streams: a stream that its prefill limits to r takes r, so
    max(C - Σ w·r, C / (1 + Σ w)), w being the part of the window in which the other is active: exact when
    all others are capped below the fair share or all above it, a lower bound between.
    """
    if knots.shape[1] == 0:
        return rate
    length_s = max(length_s, 1e-6)
    active_before, bytes_before = _until(knots, begin_s)
    active_after, bytes_after = _until(knots, begin_s + length_s)
    weight = max(active_after - active_before, 0.0) / length_s
    taken = max(bytes_after - bytes_before, 0.0) / length_s
    return max(rate - taken, rate / (1 + weight))

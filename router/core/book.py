"""Writes a booking's numbers, and counts the arrival at the servers that it will use."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from policies.types import Floats, Ints
from router.core import costs as c
from router.core import tables as t
from router.core.compiled import compiled, entry_point, stamp


@compiled
def count_arrival(
    table: Floats, column: int, count_row: int, work: float, now_s: float, tau_s: float
) -> None:
    """Add one arrival with `work` seconds to a decayed count, its decayed work and its time (three rows)."""
    decay = math.exp((table[count_row + 2, column] - now_s) / tau_s)
    table[count_row, column] = table[count_row, column] * decay + 1.0
    table[count_row + 1, column] = table[count_row + 1, column] * decay + work
    table[count_row + 2, column] = now_s


def _make_book(sources: int) -> Callable[..., None]:
    @entry_point
    def book(
        workers: Floats, links: Floats, bookings: Floats, row: int, floats: Floats, ints: Ints, chosen: int,
        d: int, s: int, link: int, q: Floats, status_lag_s: float,
    ) -> None:  # fmt: skip
        """Write candidate `chosen` of `weigh`'s outputs into `bookings[row]` and count its arrival.

        Args:
            d, s, link: slots of its workers, column of its link (-1 for local prefill).
            q: the request, as `weigh` got it.
            status_lag_s: how long after the booking reached its site a status may still not show it.
        """
        sources  # noqa: B018 - in the closure, see compiled.stamp
        now_s, tokens, tau_s = q[c.NOW], q[c.PROMPT_TOKENS], q[c.RATE_WINDOW]
        work_s, granted_s = floats[c.PREFILL, chosen], floats[c.GRANTED, chosen]
        first_s = now_s + floats[c.TTFT, chosen] - q[c.ELAPSED]
        booking = bookings[row]
        booking[t.HELD], booking[t.PREFILLING], booking[t.DECODING] = 1.0, 1.0, 0.0
        booking[t.DECODE_SLOT], booking[t.SITE_SLOT], booking[t.LINK_ROW] = d, s, link
        booking[t.BOOKED_AT] = now_s
        booking[t.ARRIVE_AT] = now_s + granted_s
        booking[t.VISIBLE_AT] = now_s + 2 * granted_s + status_lag_s
        booking[t.WORK], booking[t.TOKENS] = work_s, ints[c.UNCACHED, chosen]
        booking[t.KV_BYTES] = ints[c.KV_BYTES, chosen]
        booking[t.TRANSFER_BEGIN] = now_s + floats[c.TRANSFER_BEGIN, chosen]
        computed_s = floats[c.START, chosen] + work_s
        booking[t.TRANSFER_END] = now_s + computed_s + floats[c.TRANSFER, chosen]
        booking[t.DECODE_PAGES] = math.ceil((tokens + 1) / workers[t.PAGE_TOKENS, d])
        booking[t.SITE_PAGES] = 0.0 if s == d else math.ceil((tokens - 1) / workers[t.PAGE_TOKENS, s])
        booking[t.CONTEXT] = tokens
        booking[t.END_AT] = first_s + q[c.OUTPUT_TOKENS] * floats[c.TOKEN_STEP, chosen]
        if ints[c.UNCACHED, chosen] > 0:
            count_arrival(workers, s, t.PREFILL_COUNT, work_s, now_s, tau_s)
        count_arrival(workers, d, t.DECODE_COUNT, floats[c.DECODE_SHARE, chosen], now_s, tau_s)
        if link >= 0:
            count_arrival(links, link, t.LINK_COUNT, floats[c.LINK_SECONDS, chosen], now_s, tau_s)

    return book


book = _make_book(stamp())


def warm_up() -> None:
    """Compile `book`, or load it, so that the first placement need not."""
    workers, links = np.ones((t.WORKER_ROWS, 1)), np.ones((t.LINK_ROWS, 1))
    bookings = np.ones((1, t.BOOKING_COLUMNS))
    floats, ints = np.zeros((c.FLOAT_ROWS, 1)), np.zeros((c.INT_ROWS, 1), np.int64)
    book(workers, links, bookings, 0, floats, ints, 0, 0, 0, -1, np.ones(c.REQUEST_NUMBERS), 0.0)

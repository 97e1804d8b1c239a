"""The summed-up activity of a link's transfers against one overlap per transfer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core import tables as t
from router.core.link_share import KNOT_ROWS, OVERDUE_S, activity, link_share

TRANSFERS = st.lists(
    st.tuples(st.floats(-5, 20), st.floats(0, 10), st.floats(0, 1e9)), min_size=0, max_size=12
)


@settings(deadline=None, max_examples=80)
@given(TRANSFERS, st.floats(0, 20), st.floats(0.001, 20), st.floats(1e3, 1e9))
def test_the_share_equals_one_overlap_per_transfer(
    transfers: list[tuple[float, float, float]], begin_s: float, length_s: float, rate: float
) -> None:
    now_s = 100.0
    bookings = np.zeros((len(transfers) + 1, t.BOOKING_COLUMNS))
    weight = taken = 0.0
    for row, (begin, length, size) in enumerate(transfers):
        bookings[row, [t.TRANSFER_BEGIN, t.TRANSFER_END, t.KV_BYTES]] = (
            now_s + begin,
            now_s + begin + length,
            size,
        )
        begin, end = (now_s + begin) - now_s, max((now_s + begin + length) - now_s, OVERDUE_S, begin)
        overlap = max(0.0, min(end, begin_s + length_s) - max(begin, begin_s)) / length_s
        weight += overlap
        taken += overlap * size / max(end - begin, 1e-6)
    knots = np.zeros((KNOT_ROWS, 2 * len(transfers)))
    activity(bookings, np.arange(len(transfers)), now_s, knots, 0)
    expected = max(rate - taken, rate / (1 + weight))
    assert link_share(rate, knots, begin_s, length_s) == pytest.approx(expected, rel=1e-5, abs=1e-3 * rate)

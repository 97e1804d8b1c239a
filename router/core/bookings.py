"""Load that placements in flight put on workers and links, booked in the same call as the choice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from policies.types import Floats, PlacementKind
from prfaas.protocol.messages import PrefillReport
from router.core import costs as c
from router.core import tables as t

if TYPE_CHECKING:
    from router.core.fleet import WorkerState
    from router.core.links import LinkState
    from router.core.prefix_index import Prediction

SLACK_ROWS = 64
"""Ended bookings that the table may hold beyond as many as there are live ones."""


@dataclass(slots=True, eq=False)
class Booking:
    """One placed request. It stands in `site.prefills` and `link.transfers` until its KV is complete, and
    in `decode.decodes` until its answer has ended; the numbers that load is reckoned with are `row` of the
    bookings' table."""

    request_id: str
    attempt: int
    kind: PlacementKind
    decode: WorkerState
    site: WorkerState
    link: LinkState | None
    row: int
    booked_s: float
    elapsed_s: float
    """Since the request's arrival, when it was booked."""
    output_tokens: float
    """Expected length of its answer."""
    terms: list[float]
    """Of the decision, by row of `costs`."""
    kv_bytes: int
    predictions: tuple[Prediction, ...] = ()
    """What its prompt is held to leave in caches."""
    report: PrefillReport | None = None
    prefilled: bool = False
    ttft_s: float | None = None

    @property
    def decoding(self) -> bool:
        return self.ttft_s is not None

    @property
    def computed_s(self) -> float:
        """When its prompt is predicted to be computed, absolute."""
        return self.booked_s + self.terms[c.START] + self.terms[c.PREFILL]

    @property
    def landed_s(self) -> float:
        """When its KV is predicted to be complete on the decode worker, absolute."""
        return self.computed_s + self.terms[c.TRANSFER]


class Bookings:
    """All bookings, oldest first. Every method keeps workers' and links' own tables in step."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._by_request: dict[str, Booking] = {}
        self.values: Floats = np.zeros((SLACK_ROWS, t.BOOKING_COLUMNS))
        """The table, shape [rows, quantity], oldest first; rows of ended bookings stay, not `HELD`, until it
        is packed."""
        self.count = 0
        """Rows used."""
        self.expired_total = 0

    def next_row(self) -> int:
        """The row that the next booking is to be written into."""
        if self.count >= 2 * len(self._by_request) + SLACK_ROWS:
            self._pack()
        if self.count == len(self.values):
            self.values = np.concatenate([self.values, np.zeros_like(self.values)])
        return self.count

    def add(self, booking: Booking) -> None:
        """Take in a booking whose row has been written."""
        request_id = booking.request_id
        self.count += 1
        self._by_request[request_id] = booking
        booking.site.prefills[request_id] = booking
        booking.decode.decodes[request_id] = booking
        if booking.link is not None:
            booking.link.transfers[request_id] = booking

    def get(self, request_id: str) -> Booking | None:
        return self._by_request.get(request_id)

    def begin_answer(self, booking: Booking, ttft_s: float, now_s: float) -> None:
        """The first token is out: the answer is as long as expected, from now on."""
        booking.ttft_s = ttft_s
        self.values[booking.row, t.DECODING] = 1.0
        self.values[booking.row, t.END_AT] = now_s + booking.output_tokens * booking.terms[c.TOKEN_STEP]

    def end_prefill(self, booking: Booking) -> None:
        """The prompt's KV is complete, or its site is gone: nothing of it is left at site and link."""
        if booking.prefilled:
            return
        booking.prefilled = True
        self.values[booking.row, t.PREFILLING] = 0.0
        del booking.site.prefills[booking.request_id]
        if booking.link is not None:
            del booking.link.transfers[booking.request_id]

    def release(self, booking: Booking) -> None:
        self.end_prefill(booking)
        self.values[booking.row, t.HELD] = 0.0
        del booking.decode.decodes[booking.request_id]
        del self._by_request[booking.request_id]

    def expired(self, now_s: float) -> list[Booking]:
        """Bookings past their deadline; the caller releases them."""
        found: list[Booking] = []
        for booking in self._by_request.values():
            if now_s - booking.booked_s <= self._deadline_s:
                if not found:
                    return found
                break
            found.append(booking)
        self.expired_total += len(found)
        return found

    def _pack(self) -> None:
        """Close the gaps that ended bookings leave in the table."""
        rows = [booking.row for booking in self._by_request.values()]
        self.values[: len(rows)] = self.values[rows]
        self.count = len(rows)
        for row, booking in enumerate(self._by_request.values()):
            booking.row = row

    def __len__(self) -> int:
        return len(self._by_request)

    def __iter__(self) -> Iterator[Booking]:
        return iter(self._by_request.values())

"""Numbers of all workers, links and bookings as matrices: what the compiled code reads and writes.

Times are absolute (the scheduler's `now_s` scale). "As of the last tally" are quantities that `tally.tally`
derives from statuses and bookings whenever somebody wants to read them.
"""

from __future__ import annotations

import numpy as np

from policies.types import Floats

# Worker quantities. Profile rows are already multiplied by their correction factors.
(
    FREE_AT,          # as of the last tally: when the prefill work queued here ends
    CHUNK,            # tokens per prefill chunk
    PREFILL_BASE, PREFILL_TOKEN, PREFILL_CONTEXT,
    DECODE_BASE, DECODE_SEQUENCE, DECODE_CONTEXT,
    RUNNING,          # as of the last tally: sequences decoding
    RUNNING_CONTEXT,  # as of the last tally: their tokens
    SLOT_AT,          # as of the last tally: when a decode slot is free
    FREE_PAGES,       # as of the last tally
    TOTAL_PAGES,
    PAGE_TOKENS,
    PAGE_BYTES,       # of one page over all layers
    STATE_BYTES,      # fixed-size state of a sequence
    LAYERS,
    WAITING,          # as of the last tally: requests queued
    MAX_QUEUE, MAX_RUNNING,
    QUEUED_TOKENS,    # as of the last tally: prefill tokens booked and not computed
    PREFILL_COUNT, PREFILL_WORK, PREFILL_AT,  # decayed: placements, their seconds, time of the last one
    DECODE_COUNT, DECODE_WORK, DECODE_AT,
    STATUS_AT,        # when the last status came; -inf before the first
    STATUS_WAITING, STATUS_RUNNING, STATUS_CONTEXT, STATUS_PREFILL_TOKENS, STATUS_FREE_PAGES,
    STATUS_PAGES,     # 0 where the status does not speak of pages
    DECODES_CHANGED_AT,  # when a booked answer last began or ended
    # Working space of the tally.
    SHOWN_TOKENS, SHOWN_WORK, UNSHOWN_TOKENS, PREFILLS, DECODES, AWAITING_KV, PINNED, PINNED_UNSEEN,
) = range(43)  # fmt: skip
WORKER_ROWS = 43

# Link quantities.
(
    RATE,             # bytes per second
    RTT,
    DRAINED_AT,       # as of the last tally: when the booked bytes would be over at that rate
    LINK_COUNT, LINK_WORK, LINK_AT,
) = range(6)  # fmt: skip
LINK_ROWS = 6

# Booking quantities.
(
    HELD,             # 1 until the request is over
    PREFILLING,       # 1 until its prompt's KV is complete, or its site gone
    DECODING,         # 1 from the first token on
    DECODE_SLOT, SITE_SLOT,
    LINK_ROW,         # -1 for local prefill
    BOOKED_AT,
    ARRIVE_AT,        # when the site hears of it
    VISIBLE_AT,       # from when on a status that does not show it means that it is done
    WORK,             # prefill seconds
    TOKENS,           # tokens to prefill
    KV_BYTES,
    TRANSFER_BEGIN, TRANSFER_END,
    DECODE_PAGES,
    SITE_PAGES,       # 0 for local prefill, whose pages are the decode worker's
    CONTEXT,          # tokens of the prompt
    END_AT,           # when the answer is expected to end
) = range(18)  # fmt: skip
BOOKING_COLUMNS = 18


class Table:
    """A matrix [quantity, entity] that grows; freed columns are used again, lowest first."""

    def __init__(self, rows: int) -> None:
        self.values: Floats = np.zeros((rows, 8))
        self._free: list[int] = []
        self._used = 0

    @property
    def columns(self) -> int:
        """Columns ever used."""
        return self._used

    def take(self) -> int:
        """A zeroed column."""
        if self._free:
            column = min(self._free)
            self._free.remove(column)
        else:
            column = self._used
            self._used += 1
            if column == self.values.shape[1]:
                self.values = np.concatenate([self.values, np.zeros_like(self.values)], axis=1)
        self.values[:, column] = 0.0
        return column

    def give_back(self, column: int) -> None:
        self._free.append(column)

"""Numbers of all workers and all links as two matrices, one row per quantity, so that a placement gathers
its candidates' inputs with one indexing operation each.

Times are absolute (the scheduler's `now_s` scale), so rows need no refresh while time merely passes.
"""

from __future__ import annotations

import math

import numpy as np

from policies.types import Floats

# Worker quantities. Profile rows are already multiplied by their correction factors.
(
    FREE_AT,          # when the prefill work queued here ends
    CHUNK,            # tokens per prefill chunk
    PREFILL_BASE, PREFILL_TOKEN, PREFILL_CONTEXT,
    DECODE_BASE, DECODE_SEQUENCE, DECODE_CONTEXT,
    RUNNING,          # sequences decoding
    RUNNING_CONTEXT,  # their tokens
    SLOT_AT,          # when a decode slot is free
    FREE_PAGES, TOTAL_PAGES,
    PAGE_TOKENS,
    PAGE_BYTES,       # of one page over all layers
    LAYERS,
    WAITING,          # requests queued
    MAX_QUEUE, MAX_RUNNING,
    QUEUED_TOKENS,    # prefill tokens booked and not computed
    PAGES_IDLE_AT,    # when the booked page-seconds would be over, the whole pool working on them
    PREFILL_COUNT, PREFILL_WORK, PREFILL_AT,  # decayed: placements, their seconds, time of the last one
    DECODE_COUNT, DECODE_WORK, DECODE_AT,
) = range(27)  # fmt: skip
WORKER_ROWS = 27

# Link quantities.
(
    RATE,             # bytes per second
    RTT,
    DRAINED_AT,       # when the booked bytes would be over at that rate
    LINK_COUNT, LINK_WORK, LINK_AT,
) = range(6)  # fmt: skip
LINK_ROWS = 6


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


def count_arrival(
    table: Floats, column: int, count_row: int, work: float, now_s: float, tau_s: float
) -> None:
    """Add one arrival with `work` seconds to a decayed count, its decayed work and its time (three rows)."""
    count, total, at_s = table[count_row : count_row + 3, column].tolist()
    decay = math.exp((at_s - now_s) / tau_s)
    table[count_row : count_row + 3, column] = count * decay + 1.0, total * decay + work, now_s

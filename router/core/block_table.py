"""Which worker holds which block: an inverted index from block hash to masks of worker slots.

Hashes are chained, so the blocks of all prompts form a tree. A worker *holds* a block when its events say so,
and the block is *closed* there when the worker holds all blocks before it, too. Closed masks only shrink
along a chain: that is what lets `match` find depths by halving instead of walking.

Events do not say which block comes before which; prompts do. A block is linked to its parent by the first
prompt that meets it where a match ends: the match then walks on, links and closes, once per block. Until then
the block counts as not closed, so closed is never claimed too much, and a match that ends before a held block
always looks again. Removing a block takes the closed mark from everything below it at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from policies.types import Ints
from router.core import block_kernels as k

Hashes = NDArray[np.uint64]
FULLEST = 0.7
"""Share of positions in use, deleted ones included, beyond which the table is rebuilt."""
SMALLEST = 1024
MASK = 2**64 - 1


def as_hashes(blocks: Sequence[int] | Hashes) -> Hashes:
    """Block hashes as an array; one of 64-bit integers is taken as it is."""
    if isinstance(blocks, np.ndarray):
        if blocks.dtype == np.uint64 and blocks.flags.c_contiguous:
            return blocks
        wide = blocks if blocks.itemsize == 8 else blocks.astype(np.uint64)
        return np.ascontiguousarray(wide).view(np.uint64)
    try:
        return np.fromiter(blocks, np.uint64, len(blocks))
    except OverflowError:  # not from our hashing, but anybody may send events
        return np.array([block & MASK for block in blocks], dtype=np.uint64)


class BlockTable:
    """Blocks by worker slot. Removing what is unknown and storing what is known change nothing.

    Memory: 24 bytes + 16 per 64 workers for each position, of which 35 to 70 % are in use.
    """

    def __init__(self) -> None:
        self._make(SMALLEST, 1)
        self._counts: Ints = np.zeros(k.SLOTS + 64, np.int64)

    def __len__(self) -> int:
        """Distinct blocks."""
        return int(self._counts[k.LIVE])

    def blocks(self, slot: int) -> int:
        """Blocks that the worker holds."""
        return int(self._counts[k.SLOTS + slot])

    @property
    def nbytes(self) -> int:
        return self._table.nbytes + self._links.nbytes

    def add_worker(self, slot: int) -> None:
        """Make room for the worker."""
        words = slot // 64 + 1
        if words > self._words:
            self._rebuild(len(self._table), words)
            counts = np.zeros(k.SLOTS + 64 * words, np.int64)
            counts[: len(self._counts)] = self._counts
            self._counts = counts

    def store(self, slot: int, hashes: Hashes) -> None:
        counts = self._counts
        used = counts.item(k.LIVE) + counts.item(k.DEAD) + len(hashes)
        if used > FULLEST * len(self._table):
            positions = SMALLEST
            while len(self) + len(hashes) > FULLEST * positions / 1.3:
                positions *= 2
            self._rebuild(positions, self._words)
        k.store(self._table, self._links, self._counts, self._shift, slot, hashes)

    def remove(self, slot: int, hashes: Hashes) -> None:
        k.remove(self._table, self._links, self._counts, self._shift, slot, hashes)

    def clear(self, slot: int) -> None:
        """The worker holds nothing any more."""
        if self.blocks(slot):
            k.clear(self._table, self._links, self._counts, slot)

    def match(self, hashes: Hashes, slots: int) -> Ints:
        """Leading blocks of the chain that each worker holds, shape [slots]."""
        depths = np.zeros(slots, np.int64)
        if len(hashes):
            k.match(self._table, self._links, self._shift, hashes, depths)
        return depths

    def _make(self, positions: int, words: int) -> None:
        self._words = words
        self._table: Hashes = np.zeros((positions, 1 + 2 * words), np.uint64)
        self._links: NDArray[np.int32] = np.zeros((positions, 4), np.int32)
        self._shift = np.uint64(64 - positions.bit_length() + 1)

    def _rebuild(self, positions: int, words: int) -> None:
        table, links = self._table, self._links
        self._make(positions, words)
        k.rebuild(table, links, self._counts, self._table, self._links, self._shift)


def warm_up() -> None:
    """Compile what tables do, or load it, so that the first request need not."""
    table, one = BlockTable(), as_hashes([1])
    table.store(0, one)
    table.match(one, 1)
    table.remove(0, one)
    table.store(0, one)
    table.clear(0)
    table.add_worker(64)
    k.common_prefix(one, one)
    k.any_common(one, one)

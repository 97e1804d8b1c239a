"""Compiled operations on the table of cached blocks; `block_table.BlockTable` says what they keep.

Each position of the table is a block: its hash and masks in `table`, its place in the tree of chains in
`links`. Positions are found by open addressing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from policies.types import Ints
from router.core.compiled import compiled, entry_point, stamp

EMPTY, DELETED = np.uint64(0), np.uint64(1)
ZERO, ONE = np.uint64(0), np.uint64(1)
ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Columns of `table`; those of word w of the masks are CLOSED + 2 w and HELD + 2 w.
KEY, CLOSED, HELD = range(3)
# Columns of `links`; positions, or one of the two marks in PARENT.
PARENT, CHILD, NEXT, PREVIOUS = range(4)
UNKNOWN, ROOT = -1, -2
# Entries of `counts`; those of worker slots follow. READ means nothing: see `_touch`.
LIVE, DEAD, READ, SLOTS = range(4)
GROUP = 16
"""Blocks whose positions are fetched from memory at once: about as many reads as a core has under way."""


@compiled
def _place(slot: int) -> tuple[int, int, np.uint64]:
    """Columns of the closed and the held mask with this worker, and its bit there."""
    word = slot // 64
    return CLOSED + 2 * word, HELD + 2 * word, ONE << np.uint64(slot % 64)


@compiled
def _key(block: np.uint64) -> np.uint64:
    """The hash as it is stored: the two marks are no hashes."""
    return block if block > DELETED else block + GOLDEN


@compiled
def _find(table: Any, shift: np.uint64, block: np.uint64) -> Any:
    """Position of the block, or -1."""
    key, wrap = _key(block), np.uint64(len(table) - 1)
    at = (key * GOLDEN) >> shift
    while table[at, KEY] != key:
        if table[at, KEY] == EMPTY:
            return -1
        at = (at + ONE) & wrap
    return np.int64(at)


@compiled
def _touch(table: Any, links: Any, counts: Ints, shift: np.uint64, hashes: Any) -> None:
    """Read where these blocks are likely to be. These reads, which wait for nothing, overlap; what then
    looks the blocks up one after the other finds them in the cache."""
    read = ZERO
    for block in hashes:
        at = (_key(block) * GOLDEN) >> shift
        read |= table[at, KEY] | np.uint64(links[at, PARENT])
    counts[READ] = np.int64(read)  # else the compiler would leave the reads out


@compiled
def _find_or_add(table: Any, links: Any, counts: Ints, shift: np.uint64, block: np.uint64) -> Any:
    """Position of the block, which is added, unlinked and held by nobody, where it is missing."""
    key, wrap = _key(block), np.uint64(len(table) - 1)
    at, free = (key * GOLDEN) >> shift, np.int64(-1)
    while table[at, KEY] != key:
        if table[at, KEY] == DELETED and free < 0:
            free = np.int64(at)
        if table[at, KEY] == EMPTY:
            if free < 0:
                free = np.int64(at)
            else:
                counts[DEAD] -= 1
            counts[LIVE] += 1
            table[free, KEY] = key
            for column in range(CLOSED, table.shape[1]):
                table[free, column] = ZERO
            links[free, PARENT] = links[free, CHILD] = UNKNOWN
            links[free, NEXT] = links[free, PREVIOUS] = UNKNOWN
            return free
        at = (at + ONE) & wrap
    return np.int64(at)


@compiled
def _link(links: Any, at: int, parent: int) -> None:
    links[at, PARENT] = parent
    if parent >= 0:
        sibling = links[parent, CHILD]
        links[at, NEXT], links[at, PREVIOUS] = sibling, UNKNOWN
        if sibling >= 0:
            links[sibling, PREVIOUS] = at
        links[parent, CHILD] = at


@compiled
def _drop(table: Any, links: Any, counts: Ints, at: int) -> None:
    """Delete an entry that nobody holds; its children, which nobody can reach now, become unlinked."""
    child = links[at, CHILD]
    while child >= 0:
        follower = links[child, NEXT]
        links[child, PARENT] = links[child, NEXT] = links[child, PREVIOUS] = UNKNOWN
        child = follower
    before, after, parent = links[at, PREVIOUS], links[at, NEXT], links[at, PARENT]
    if before >= 0:
        links[before, NEXT] = after
    elif parent >= 0:
        links[parent, CHILD] = after
    if after >= 0:
        links[after, PREVIOUS] = before
    table[at, KEY] = DELETED
    counts[LIVE] -= 1
    counts[DEAD] += 1


@compiled
def _held_by_any(table: Any, at: int) -> bool:
    together = ZERO
    for held in range(HELD, table.shape[1], 2):
        together |= table[at, held]
    return bool(together != ZERO)


@compiled
def _repair(table: Any, links: Any, shift: np.uint64, hashes: Any, first: int) -> None:
    """Link the prompt's blocks from `first` on to those before them, and close what they close, as long as
    that changes anything."""
    parent = ROOT if first == 0 else _find(table, shift, hashes[first - 1])
    for k in range(first, len(hashes)):
        at = _find(table, shift, hashes[k])
        if at < 0:
            return
        changed = links[at, PARENT] == UNKNOWN
        if changed:
            _link(links, at, parent)
        for closed in range(CLOSED, table.shape[1], 2):
            closes = table[at, closed + 1]
            if parent >= 0:
                closes &= table[parent, closed]
            if closes & ~table[at, closed] != ZERO:
                table[at, closed] |= closes
                changed = True
        if not changed:
            return
        parent = at


@compiled
def _record(depths: Ints, word: int, workers: np.uint64, depth: int) -> None:
    for bit in range(64):
        slot = 64 * word + bit
        if slot < len(depths) and (workers >> np.uint64(bit)) & ONE:
            depths[slot] = depth


def _make(sources: int) -> tuple[Callable[..., Any], ...]:
    @entry_point
    def store(table: Any, links: Any, counts: Ints, shift: np.uint64, slot: int, hashes: Any) -> None:
        """The worker holds these blocks."""
        sources  # noqa: B018 - in the closure, see compiled.stamp
        closed, held, bit = _place(slot)
        for begin in range(0, len(hashes), GROUP):
            group = hashes[begin : begin + GROUP]
            _touch(table, links, counts, shift, group)
            for block in group:
                at = _find_or_add(table, links, counts, shift, block)
                if table[at, held] & bit == ZERO:
                    table[at, held] |= bit
                    counts[SLOTS + slot] += 1
                parent = links[at, PARENT]
                if parent == ROOT or (parent >= 0 and table[parent, closed] & bit != ZERO):
                    table[at, closed] |= bit

    @entry_point
    def remove(table: Any, links: Any, counts: Ints, shift: np.uint64, slot: int, hashes: Any) -> None:
        """The worker holds these blocks no more; what it holds below them cannot be reached there."""
        sources  # noqa: B018
        closed, held, bit = _place(slot)
        for block in hashes:
            at = _find(table, shift, block)
            if at < 0 or table[at, held] & bit == ZERO:
                continue
            table[at, held] &= ~bit
            counts[SLOTS + slot] -= 1
            if table[at, closed] & bit != ZERO:
                table[at, closed] &= ~bit
                # Depth first through the closed part of the subtree, without a stack.
                top, node = at, links[at, CHILD]
                while node >= 0:
                    if table[node, closed] & bit != ZERO:
                        table[node, closed] &= ~bit
                        if links[node, CHILD] >= 0:
                            node = links[node, CHILD]
                            continue
                    while links[node, NEXT] < 0 and links[node, PARENT] != top:
                        node = links[node, PARENT]
                    node = links[node, NEXT]
            if not _held_by_any(table, at):
                _drop(table, links, counts, at)

    @entry_point
    def clear(table: Any, links: Any, counts: Ints, slot: int) -> None:
        """The worker holds nothing."""
        sources  # noqa: B018
        closed, held, bit = _place(slot)
        for at in range(len(table)):
            if table[at, held] & bit != ZERO and table[at, KEY] > DELETED:
                table[at, held] &= ~bit
                table[at, closed] &= ~bit
                if not _held_by_any(table, at):
                    _drop(table, links, counts, at)
        counts[SLOTS + slot] = 0

    @entry_point
    def match(table: Any, links: Any, shift: np.uint64, hashes: Any, depths: Ints) -> None:
        """Fill `depths` (zeros) with the leading blocks of the prompt that each worker holds.

        Closed masks only shrink along a chain, so every depth at which they do is found by halving. `above`
        stacks positions known to have lost somebody: they bound the searches that follow.
        """
        sources  # noqa: B018
        length = len(hashes)
        above_at, above_mask = np.empty(80, np.int64), np.empty(80, np.uint64)
        for word in range((table.shape[1] - 1) // 2):
            closed, held, _ = _place(64 * word)
            low, mask, top = 0, ALL, 0
            above_at[0], above_mask[0] = length + 1, ZERO
            probe = min(1, length)
            while mask != ZERO:
                while above_at[top] - low > 1:
                    middle = probe if probe > low else (low + above_at[top]) // 2
                    probe = 0
                    at = _find(table, shift, hashes[middle - 1])
                    there = table[at, closed] & mask if at >= 0 else ZERO
                    if there == mask:
                        low = middle
                    else:
                        top += 1
                        above_at[top], above_mask[top] = middle, there
                gone = mask & ~above_mask[top]
                if low < length:
                    at = _find(table, shift, hashes[low])
                    if at >= 0 and table[at, held] & gone != ZERO:
                        _repair(table, links, shift, hashes, low)
                        top = 0
                        continue
                _record(depths, word, gone, low)
                mask, low = mask & above_mask[top], above_at[top]
                top -= 1
                while top >= 0 and above_mask[top] & mask == mask and mask != ZERO:
                    low = above_at[top]
                    top -= 1

    @entry_point
    def rebuild(
        table: Any, links: Any, counts: Ints, new_table: Any, new_links: Any, shift: np.uint64
    ) -> None:  # fmt: skip
        """Move all entries into new, zeroed arrays, which may have more positions and more words."""
        sources  # noqa: B018
        moved = np.full(len(table), UNKNOWN, np.int32)
        counts[LIVE] = counts[DEAD] = 0
        for at in range(len(table)):
            if table[at, KEY] > DELETED:
                to = _find_or_add(new_table, new_links, counts, shift, table[at, KEY])
                moved[at] = to
                for column in range(CLOSED, table.shape[1]):
                    new_table[to, column] = table[at, column]
        for at in range(len(table)):
            if table[at, KEY] > DELETED:
                for column in range(4):
                    linked = links[at, column]
                    new_links[moved[at], column] = moved[linked] if linked >= 0 else linked

    @entry_point
    def common_prefix(a: Any, b: Any) -> int:
        """Length of the common prefix of two hash chains: chains that agree on a block agree before it."""
        sources  # noqa: B018
        low, high = 0, min(len(a), len(b))
        while low < high:
            middle = (low + high + 1) // 2
            if a[middle - 1] == b[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low

    @entry_point
    def any_common(a: Any, b: Any) -> bool:
        """Whether two sets of blocks, the first a small one, have a block in common."""
        sources  # noqa: B018
        seen = ZERO
        for block in a:
            seen |= ONE << (block & np.uint64(63))
        for block in b:
            if (seen >> (block & np.uint64(63))) & ONE:
                for other in a:
                    if other == block:
                        return True
        return False

    return store, remove, clear, match, rebuild, common_prefix, any_common


store, remove, clear, match, rebuild, common_prefix, any_common = _make(stamp())

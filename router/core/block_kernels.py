"""Compiled operations on the table of cached blocks; `block_table.BlockTable` says what they keep.

Each entry of the table is a block: its hash and the closed mask in `hot`, the held mask in `held`, and its
place in the tree of chains in `links`, all at the same position, found by open addressing.
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
# Columns of `links`; positions, or one of the two marks in PARENT.
PARENT, CHILD, NEXT, PREVIOUS = range(4)
UNKNOWN, ROOT = -1, -2
# Entries of `counts`; those of worker slots follow.
LIVE, DEAD, SLOTS = range(3)


@compiled
def _key(block: np.uint64) -> np.uint64:
    """The hash as it is stored: the two marks are no hashes."""
    return block if block > DELETED else block + GOLDEN


@compiled
def _find(hot: Any, shift: np.uint64, block: np.uint64) -> Any:
    """Position of the block, or -1."""
    key, wrap = _key(block), np.uint64(len(hot) - 1)
    at = (key * GOLDEN) >> shift
    while hot[at, 0] != key:
        if hot[at, 0] == EMPTY:
            return -1
        at = (at + ONE) & wrap
    return np.int64(at)


@compiled
def _find_or_add(hot: Any, held: Any, links: Any, counts: Ints, shift: np.uint64, block: np.uint64) -> Any:
    """Position of the block, which is added, unlinked and held by nobody, where it is missing."""
    key, wrap = _key(block), np.uint64(len(hot) - 1)
    at, free = (key * GOLDEN) >> shift, np.int64(-1)
    while hot[at, 0] != key:
        if hot[at, 0] == DELETED and free < 0:
            free = np.int64(at)
        if hot[at, 0] == EMPTY:
            if free < 0:
                free = np.int64(at)
            else:
                counts[DEAD] -= 1
            counts[LIVE] += 1
            hot[free, 0] = key
            for word in range(held.shape[1]):
                hot[free, word + 1] = held[free, word] = ZERO
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
def _drop(hot: Any, links: Any, counts: Ints, at: int) -> None:
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
    hot[at, 0] = DELETED
    counts[LIVE] -= 1
    counts[DEAD] += 1


@compiled
def _held_by_any(held: Any, at: int) -> bool:
    together = ZERO
    for word in range(held.shape[1]):
        together |= held[at, word]
    return bool(together != ZERO)


@compiled
def _repair(hot: Any, held: Any, links: Any, shift: np.uint64, hashes: Any, first: int) -> None:
    """Link the prompt's blocks from `first` on to those before them, and close what they close, as long as
    that changes anything."""
    parent = ROOT if first == 0 else _find(hot, shift, hashes[first - 1])
    for k in range(first, len(hashes)):
        at = _find(hot, shift, hashes[k])
        if at < 0:
            return
        changed = links[at, PARENT] == UNKNOWN
        if changed:
            _link(links, at, parent)
        for word in range(held.shape[1]):
            closed = held[at, word]
            if parent >= 0:
                closed &= hot[parent, word + 1]
            if closed & ~hot[at, word + 1] != ZERO:
                hot[at, word + 1] |= closed
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
    def store(
        hot: Any, held: Any, links: Any, counts: Ints, shift: np.uint64, slot: int, hashes: Any
    ) -> None:
        """The worker holds these blocks."""
        sources  # noqa: B018 - in the closure, see compiled.stamp
        word, bit = slot // 64, ONE << np.uint64(slot % 64)
        for block in hashes:
            at = _find_or_add(hot, held, links, counts, shift, block)
            if held[at, word] & bit == ZERO:
                held[at, word] |= bit
                counts[SLOTS + slot] += 1
            parent = links[at, PARENT]
            if parent == ROOT or (parent >= 0 and hot[parent, word + 1] & bit != ZERO):
                hot[at, word + 1] |= bit

    @entry_point
    def remove(
        hot: Any, held: Any, links: Any, counts: Ints, shift: np.uint64, slot: int, hashes: Any
    ) -> None:
        """The worker holds these blocks no more; what it holds below them cannot be reached there."""
        sources  # noqa: B018
        word, bit = slot // 64, ONE << np.uint64(slot % 64)
        for block in hashes:
            at = _find(hot, shift, block)
            if at < 0 or held[at, word] & bit == ZERO:
                continue
            held[at, word] &= ~bit
            counts[SLOTS + slot] -= 1
            if hot[at, word + 1] & bit != ZERO:
                hot[at, word + 1] &= ~bit
                # Depth first through the closed part of the subtree, without a stack.
                top, node = at, links[at, CHILD]
                while node >= 0:
                    if hot[node, word + 1] & bit != ZERO:
                        hot[node, word + 1] &= ~bit
                        if links[node, CHILD] >= 0:
                            node = links[node, CHILD]
                            continue
                    while links[node, NEXT] < 0 and links[node, PARENT] != top:
                        node = links[node, PARENT]
                    node = links[node, NEXT]
            if not _held_by_any(held, at):
                _drop(hot, links, counts, at)

    @entry_point
    def clear(hot: Any, held: Any, links: Any, counts: Ints, slot: int) -> None:
        """The worker holds nothing."""
        sources  # noqa: B018
        word, bit = slot // 64, ONE << np.uint64(slot % 64)
        for at in range(len(hot)):
            if held[at, word] & bit != ZERO and hot[at, 0] > DELETED:
                held[at, word] &= ~bit
                hot[at, word + 1] &= ~bit
                if not _held_by_any(held, at):
                    _drop(hot, links, counts, at)
        counts[SLOTS + slot] = 0

    @entry_point
    def match(hot: Any, held: Any, links: Any, shift: np.uint64, hashes: Any, depths: Ints) -> None:
        """Fill `depths` (zeros) with the leading blocks of the prompt that each worker holds.

        Closed masks only shrink along a chain, so every depth at which they do is found by halving. `above`
        stacks positions known to have lost somebody: they bound the searches that follow.
        """
        sources  # noqa: B018
        length = len(hashes)
        above_at, above_mask = np.empty(80, np.int64), np.empty(80, np.uint64)
        for word in range(held.shape[1]):
            low, mask, top = 0, ALL, 0
            above_at[0], above_mask[0] = length + 1, ZERO
            probe = min(1, length)
            while mask != ZERO:
                while above_at[top] - low > 1:
                    middle = probe if probe > low else (low + above_at[top]) // 2
                    probe = 0
                    at = _find(hot, shift, hashes[middle - 1])
                    there = hot[at, word + 1] & mask if at >= 0 else ZERO
                    if there == mask:
                        low = middle
                    else:
                        top += 1
                        above_at[top], above_mask[top] = middle, there
                gone = mask & ~above_mask[top]
                if low < length:
                    at = _find(hot, shift, hashes[low])
                    if at >= 0 and held[at, word] & gone != ZERO:
                        _repair(hot, held, links, shift, hashes, low)
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
        hot: Any, held: Any, links: Any, counts: Ints, new_hot: Any, new_held: Any, new_links: Any,
        shift: np.uint64,
    ) -> None:  # fmt: skip
        """Move all entries into new, zeroed arrays, which may have more positions and more words."""
        sources  # noqa: B018
        moved, words = np.full(len(hot), UNKNOWN, np.int32), held.shape[1]
        counts[LIVE] = counts[DEAD] = 0
        for at in range(len(hot)):
            if hot[at, 0] > DELETED:
                to = _find_or_add(new_hot, new_held, new_links, counts, shift, hot[at, 0])
                moved[at] = to
                for word in range(words):
                    new_hot[to, word + 1] = hot[at, word + 1]
                    new_held[to, word] = held[at, word]
        for at in range(len(hot)):
            if hot[at, 0] > DELETED:
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

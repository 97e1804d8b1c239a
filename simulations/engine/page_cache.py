"""Pages of one worker and its prefix cache, by runs of blocks instead of single pages.

The rules are the live pool's (`prfaas.kv.pool`): a page is free, held, or cached; a block in use keeps its
chain in use; blocks go idle children first and are evicted in the order of going idle. Published blocks
form a tree whose nodes are runs of blocks without a branch, so a prompt of a thousand blocks costs a few
steps, not a thousand. Answers are published too (they push older blocks out, as live), under no id unless
the trace says which one a later prompt knows them by.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

Blocks = NDArray[np.uint64]
"""Chained ids of a prompt's full pages; never changed, so that runs and events can be views of it."""
NO_BLOCKS: Blocks = np.zeros(0, np.uint64)


class Run:
    """Consecutive published blocks: a node of the tree."""

    __slots__ = ("blocks", "children", "pages", "parent", "users")

    def __init__(self, parent: Run | None, blocks: Blocks, pages: int, users: int) -> None:
        self.parent = parent
        self.blocks = blocks
        self.pages = pages
        self.users = users
        """Holders of this run or of a run below it."""
        self.children: dict[int, Run] = {}
        """By first block."""


class Held:
    """What one sequence holds: a published prefix and private pages behind it."""

    __slots__ = ("private", "published", "run", "twins")

    def __init__(self, run: Run, published: int) -> None:
        self.run = run
        self.published = published
        """Pages of the prefix that ends with `run`."""
        self.private = 0
        self.twins = 0
        """Private pages whose content is in the published prefix, too: somebody else was first."""

    @property
    def pages(self) -> int:
        """Pages that the sequence's tokens fill."""
        return self.published + self.private - self.twins


class PageCache:
    """`total` pages. Ids published and evicted collect in `stored` and `removed` until they are taken."""

    __slots__ = ("_idle", "_root", "free", "idle_pages", "removed", "stored", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self.idle_pages = 0
        """Published and unused: evictable at once."""
        self.stored: list[Blocks] = []
        self.removed: list[Blocks] = []
        self._root = Run(None, NO_BLOCKS, 0, 1)
        self._idle: OrderedDict[Run, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Pages that can be taken now."""
        return self.free + self.idle_pages

    def match(self, blocks: Blocks) -> Held:
        """The longest published prefix of a prompt's blocks, held for the caller."""
        held = Held(self._root, 0)
        self.extend(held, blocks)
        return held

    def match_and_grow(self, blocks: Blocks, pages: int) -> Held | None:
        """`match`, and private pages up to `pages` in all: both, or None and nothing is touched, so that who
        has to wait for pages leaves no trace in the order of eviction."""
        if pages > self.free + self.idle_pages:
            depth, idle = self._depth(self._root, blocks, 0)
            if pages - depth > self.free + self.idle_pages - idle:
                return None
        held = self.match(blocks)
        grew = self.grow(held, pages)
        assert grew, "pages were there a moment ago"
        return held

    def extend(self, held: Held, blocks: Blocks) -> None:
        """Hold what has been published further down the same prompt; `held` has no private pages yet."""
        run, depth, end = held.run, held.published, len(blocks)
        while depth < end:
            child = run.children.get(blocks.item(depth))
            if child is None:
                break
            common = _common(child.blocks, blocks, depth)
            if common < child.pages:
                child = self._split(child, common)
            self._use(child)
            run = child
            depth += common
        held.run, held.published = run, depth

    def grow(self, held: Held, pages: int) -> bool:
        """Hold `pages` pages in all; False, and nothing changed, where too few are left."""
        lacking = pages - held.published - held.private + held.twins
        if lacking <= 0:
            return True
        if lacking > self.free:
            if lacking > self.free + self.idle_pages:
                return False
            self._evict(lacking - self.free)
        self.free -= lacking
        held.private += lacking
        return True

    def publish(self, held: Held, blocks: Blocks) -> None:
        """Publish a prompt's full pages. Where somebody else did meanwhile, our copies stay private, and what
        follows hangs on the published ones."""
        self._publish(held, blocks, followed=False)

    def publish_answer(self, held: Held, blocks: Blocks, pages: int, answer: Blocks = NO_BLOCKS) -> None:
        """Publish `pages` private pages behind the prompt's blocks: full pages of an answer, evictable once
        released. The first ones have the ids in `answer`, the rest none."""
        known = answer[: max(pages, 0)]
        if len(known):
            blocks, pages = np.concatenate([blocks, known]), pages - len(known)
            self._publish(held, blocks, followed=False)
        if pages > 0:
            self._publish(held, blocks, followed=True)
            held.run = Run(held.run, NO_BLOCKS, pages, 1)
            held.private -= pages
            held.published += pages

    def release(self, held: Held) -> None:
        """Give everything back: private pages become free, published ones evictable."""
        self.free += held.private
        run: Run | None = held.run
        root = self._root
        while run is not root and run is not None:
            run.users -= 1
            if not run.users:
                self._idle[run] = None
                self.idle_pages += run.pages
            run = run.parent
        held.run, held.published, held.private, held.twins = root, 0, 0, 0

    def check(self) -> None:
        """Verify the counts; for tests.

        Raises:
            AssertionError: pages were lost or invented, or a run is evicted before one below it.
        """
        order = {run: place for place, run in enumerate(self._idle)}
        assert self.free >= 0
        assert self.idle_pages == sum(run.pages for run in self._idle)
        for run in self._idle:
            assert run.users == 0
            assert run.pages > 0
            parent = run.parent
            assert parent is not None
            assert parent is self._root or parent.users or order[parent] > order[run]

    # ------------------------------------------------------------ inside

    def _publish(self, held: Held, blocks: Blocks, *, followed: bool) -> None:
        """
        Args:
            followed: further pages will hang on these, so that even where all are somebody else's they
                come into use.
        """
        before = held.published
        if before >= len(blocks):
            return
        if blocks.item(before) in held.run.children:
            if not followed and self._depth(held.run, blocks, before)[0] == len(blocks):
                return
            self.extend(held, blocks)
            held.twins += held.published - before
        pages = len(blocks) - held.published
        if pages:
            run, fresh = held.run, blocks[held.published :]
            held.run = run.children[fresh.item(0)] = Run(run, fresh, pages, 1)
            held.private -= pages
            held.published += pages
            self.stored.append(fresh)

    def _depth(self, run: Run, blocks: Blocks, depth: int) -> tuple[int, int]:
        """(how deep `blocks` are published below `run`, which ends at `depth`; idle pages among them)."""
        idle = 0
        while depth < len(blocks):
            child = run.children.get(blocks.item(depth))
            if child is None:
                break
            common = _common(child.blocks, blocks, depth)
            depth += common
            idle += 0 if child.users else common
            if common < child.pages:
                break
            run = child
        return depth, idle

    def _use(self, run: Run) -> None:
        if not run.users:
            del self._idle[run]
            self.idle_pages -= run.pages
        run.users += 1

    def _split(self, run: Run, pages: int) -> Run:
        """Cut a run in two; returns the upper one. The lower keeps identity and place in the queue: its
        holders need no change, and it still goes before its parent."""
        parent = run.parent
        assert parent is not None
        upper = Run(parent, run.blocks[:pages], pages, run.users)
        parent.children[upper.blocks.item(0)] = upper
        run.blocks = run.blocks[pages:]
        run.pages -= pages
        run.parent = upper
        upper.children[run.blocks.item(0)] = run
        if not upper.users:
            # It is about to be used: idle for a moment only.
            self._idle[upper] = None
        return upper

    def _evict(self, pages: int) -> None:
        idle, removed = self._idle, self.removed
        self.free += pages
        self.idle_pages -= pages
        while pages:
            run = next(iter(idle))
            blocks = run.blocks
            if run.pages > pages:
                if len(blocks):
                    removed.append(blocks[: -pages - 1 : -1])
                    run.blocks = blocks[:-pages]
                run.pages -= pages
                return
            del idle[run]
            pages -= run.pages
            if len(blocks):
                removed.append(blocks[::-1])
                assert run.parent is not None
                del run.parent.children[blocks.item(0)]


def _common(run: Blocks, blocks: Blocks, depth: int) -> int:
    """Blocks that a run and a prompt share from `depth` on (at least one). Ids are chained: where they
    differ once they differ ever after, so a bisection finds the place."""
    size = min(len(run), len(blocks) - depth)
    if run.item(size - 1) == blocks.item(depth + size - 1):
        return size
    low, high = 1, size - 1
    while low < high:
        middle = (low + high + 1) // 2
        if run.item(middle - 1) == blocks.item(depth + middle - 1):
            low = middle
        else:
            high = middle - 1
    return low

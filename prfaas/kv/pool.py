"""The page pool: who holds which page, and which pages hold a reusable prefix.

Every page is in exactly one state:

    free ──allocate──> pinned ──release──> free          (content not published)
                         │ └──quarantine─> quarantined ──unquarantine──> free
                       commit
                         v
                  pinned + published ──release──> cached (evictable) ──match/pin──> pinned + published
                                                     └──allocate evicts it──> pinned

Published pages form a tree: a block hangs on the block before it. A block that is in use keeps its whole
chain in use, even where the user's own copy of the parent is another page. So a block always goes idle
before its parent does, and evicting in the order of going idle (LRU) never leaves a hole inside a chain.

Pure bookkeeping: no I/O, no clock, one thread.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

import msgspec

from prfaas.errors import OutOfPages
from prfaas.kv.hashing import TOKEN_BYTES, chain_hashes, chain_seed, pack_tokens


class Match(msgspec.Struct, frozen=True):
    """A cached prefix, pinned once for the caller."""

    page_ids: list[int]
    tokens: int
    """Tokens in these pages: a multiple of the page size."""


class PoolCounts(msgspec.Struct, frozen=True):
    """Pages by state; the last four add up to `total`."""

    total: int
    free: int
    pinned: int
    cached: int
    """Published and unused: evictable at once."""
    quarantined: int


class _Block:
    """A published page: its content and its place in the tree."""

    __slots__ = ("block_hash", "busy_children", "page", "parent", "salt", "tokens")

    def __init__(self, page: int, block_hash: int, parent: _Block | None, tokens: bytes, salt: str) -> None:
        self.page = page
        self.block_hash = block_hash
        self.parent = parent
        self.tokens = tokens
        self.salt = salt
        self.busy_children = 0
        """Published blocks hanging on this one that are in use."""

    def holds(self, tokens: bytes, parent: _Block | None, salt: str) -> bool:
        """Whether this really is the block looked for, and not one of equal hash."""
        return self.tokens == tokens and self.parent is parent and self.salt == salt


def _ignore(_: list[int]) -> None:
    pass


class PagePool:
    """Pages 0 … num_pages - 1 of `page_size` tokens, reference counted, with a prefix cache.

    Args:
        on_stored: called with the block hashes that a `commit` published, parents first.
        on_removed: called with the block hashes that an `allocate` evicted, children first.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        on_stored: Callable[[list[int]], None] | None = None,
        on_removed: Callable[[list[int]], None] | None = None,
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool of {num_pages} pages of {page_size} tokens cannot hold anything")
        self.num_pages = num_pages
        self.page_size = page_size
        self.on_stored = on_stored or _ignore
        self.on_removed = on_removed or _ignore
        self.on_available: list[Callable[[], None]] = []
        """Called when pages became free or evictable: whoever waits for pages may try again."""
        self._pins = [0] * num_pages
        self._total_pins = 0
        self._free = list(range(num_pages))  # a heap: low ids first keeps sequences contiguous
        self._quarantined: set[int] = set()
        self._blocks: dict[int, _Block] = {}  # by block hash; parents come before their children
        self._block_of: dict[int, _Block] = {}  # by page
        self._idle: OrderedDict[int, None] = OrderedDict()  # evictable pages, next victim first

    # ------------------------------------------------------------ reading

    @property
    def available(self) -> int:
        """Pages that `allocate` can hand out now."""
        return len(self._free) + len(self._idle)

    @property
    def total_pins(self) -> int:
        """Pins held over all pages; a page pinned twice counts twice."""
        return self._total_pins

    def counts(self) -> PoolCounts:
        """Pages by state."""
        free, cached, quarantined = len(self._free), len(self._idle), len(self._quarantined)
        pinned = self.num_pages - free - cached - quarantined
        return PoolCounts(self.num_pages, free, pinned, cached, quarantined)

    def snapshot(self) -> list[int]:
        """Block hashes published now, parents before their children."""
        return list(self._blocks)

    # ------------------------------------------------------------ pins

    def allocate(self, n: int) -> list[int]:
        """`n` pages with undefined content, pinned once each, in ascending order.

        Raises:
            OutOfPages: fewer than `n` are free or evictable; nothing was taken.
        """
        if n > self.available:
            raise OutOfPages(f"{n} pages wanted, {self.available} of {self.num_pages} are free or evictable")
        if n > len(self._free):
            self._evict(n - len(self._free))
        pages = [heapq.heappop(self._free) for _ in range(n)]
        for page in pages:
            self._pins[page] = 1
        self._total_pins += n
        return pages

    def match(self, token_ids: Sequence[int], salt: str = "", max_tokens: int | None = None) -> Match:
        """The longest published prefix of `token_ids` in full pages, pinned once for the caller.

        Args:
            max_tokens: consider only so many tokens; callers that decode pass `len(token_ids) - 1`,
                because the last prompt token is always decode's first input.
        """
        usable = len(token_ids) if max_tokens is None else min(len(token_ids), max(max_tokens, 0))
        pages = [block.page for block in self._walk(pack_tokens(token_ids[:usable]), salt)]
        self.pin(pages)
        return Match(pages, len(pages) * self.page_size)

    def match_and_allocate(
        self, token_ids: Sequence[int], salt: str = "", max_tokens: int | None = None
    ) -> tuple[Match, list[int]]:
        """`match`, and fresh pages for the rest of the first `max_tokens` tokens: both or nothing, so that
        whoever has to wait for pages waits with empty hands.

        Raises:
            OutOfPages: too few pages are left beside the cached ones; nothing was taken, nobody was told.
        """
        usable = len(token_ids) if max_tokens is None else min(len(token_ids), max(max_tokens, 0))
        cached = [block.page for block in self._walk(pack_tokens(token_ids[:usable]), salt)]
        lacking = -(-usable // self.page_size) - len(cached)
        left = self.available - sum(page in self._idle for page in cached)
        if lacking > left:
            raise OutOfPages(f"{lacking} pages wanted beside {len(cached)} cached ones, {left} are left")
        self.pin(cached)
        return Match(cached, len(cached) * self.page_size), self.allocate(lacking)

    def pin(self, page_ids: Iterable[int]) -> None:
        """Add one reference to each page.

        Raises:
            ValueError: a page is neither pinned nor published, so its content is not the caller's.
        """
        for page in page_ids:
            block = self._block_of.get(page)
            if block is None and not self._pins[page]:
                raise ValueError(f"page {page} is free or quarantined and cannot be pinned")
            was_idle = page in self._idle
            self._pins[page] += 1
            self._total_pins += 1
            if block is not None and was_idle:
                self._idle.pop(page)
                self._wake_parent(block)

    def release(self, page_ids: Iterable[int]) -> None:
        """Drop one reference of each page; at zero a published page becomes evictable, others free.

        Raises:
            ValueError: a page is not pinned.
        """
        available = self.available
        for page in page_ids:
            self._unpin(page)
            if self._pins[page]:
                continue
            block = self._block_of.get(page)
            if block is None:
                heapq.heappush(self._free, page)
            elif not block.busy_children:
                self._rest(block)
        if self.available > available:
            self._tell_available()

    def quarantine(self, page_ids: Iterable[int]) -> None:
        """Set pages aside that a late write may still reach; this takes over the caller's only pin.

        Raises:
            ValueError: a page is shared or published, so others would read what the late write leaves.
        """
        pages = list(page_ids)
        for page in pages:
            if self._pins[page] != 1 or page in self._block_of:
                raise ValueError(
                    f"page {page} cannot be quarantined: {self._pins[page]} pins, "
                    f"{'published' if page in self._block_of else 'not published'} (needs 1, not published)"
                )
        for page in pages:
            self._unpin(page)
            self._quarantined.add(page)

    def unquarantine(self, page_ids: Iterable[int]) -> None:
        """Free quarantined pages: no write will reach them any more.

        Raises:
            ValueError: a page is not quarantined.
        """
        for page in page_ids:
            if page not in self._quarantined:
                raise ValueError(f"page {page} is not quarantined")
            self._quarantined.remove(page)
            heapq.heappush(self._free, page)
        self._tell_available()

    # ------------------------------------------------------------ prefix cache

    def commit(
        self, token_ids: Sequence[int], page_ids: Sequence[int], salt: str = "", start_page: int = 0
    ) -> None:
        """Publish the full pages of a sequence, whose KV is complete.

        Content that is published already keeps its first page; the caller's copy stays private, and what
        follows hangs on the published one. Two contents of equal hash: the later one stays private.

        Args:
            token_ids: tokens from position 0; only pages that they fill are published.
            page_ids: pages from position 0, pinned by the caller.
            start_page: pages before this one were committed earlier. It saves hashing them again where
                page `start_page - 1` is itself the published one.

        Raises:
            ValueError: a page to publish is not pinned, or holds other published content.
        """
        full = min(len(token_ids) // self.page_size, len(page_ids))
        parent = self._block_of.get(page_ids[start_page - 1]) if start_page else None
        first = start_page if parent is not None else 0
        packed = pack_tokens(token_ids[first * self.page_size : full * self.page_size])
        hashes = chain_hashes(
            packed, self.page_size, chain_seed(salt), parent.block_hash if parent is not None else None
        )
        stored: list[int] = []
        for block_hash, tokens, page in zip(hashes, self._split(packed), page_ids[first:full], strict=True):
            block = self._blocks.get(block_hash)
            if block is None:
                block = self._publish(_Block(page, block_hash, parent, tokens, salt))
                stored.append(block_hash)
            elif not block.holds(tokens, parent, salt):
                break
            parent = block
        if stored:
            self.on_stored(stored)

    def _walk(self, packed: bytes, salt: str) -> Iterable[_Block]:
        """Published blocks of the prefix `packed`, from the root until the first miss."""
        parent: _Block | None = None
        hashes = chain_hashes(packed, self.page_size, chain_seed(salt))
        for block_hash, tokens in zip(hashes, self._split(packed), strict=True):
            block = self._blocks.get(block_hash)
            if block is None or not block.holds(tokens, parent, salt):
                return
            yield block
            parent = block

    def _split(self, packed: bytes) -> Iterable[bytes]:
        step = self.page_size * TOKEN_BYTES
        return (packed[end - step : end] for end in range(step, len(packed) + 1, step))

    def _publish(self, block: _Block) -> _Block:
        if not self._pins[block.page] or block.page in self._block_of:
            state = "holds other published content" if self._pins[block.page] else "is not pinned"
            raise ValueError(f"page {block.page} {state} and cannot be published")
        self._blocks[block.block_hash] = block
        self._block_of[block.page] = block
        self._wake_parent(block)
        return block

    def _evict(self, n: int) -> None:
        removed: list[int] = []
        for _ in range(n):
            page, _none = self._idle.popitem(last=False)
            block = self._block_of.pop(page)
            del self._blocks[block.block_hash]
            heapq.heappush(self._free, page)
            removed.append(block.block_hash)
        self.on_removed(removed)

    def _tell_available(self) -> None:
        for listener in self.on_available:
            listener()

    # ------------------------------------------------------------ idle and busy

    def _unpin(self, page: int) -> None:
        if not self._pins[page]:
            raise ValueError(f"page {page} is not pinned: released twice?")
        self._pins[page] -= 1
        self._total_pins -= 1

    def _wake_parent(self, block: _Block) -> None:
        """`block` came into use: its ancestors up to the first busy one come into use with it."""
        parent = block.parent
        while parent is not None:
            parent.busy_children += 1
            if parent.page not in self._idle:
                return
            del self._idle[parent.page]
            parent = parent.parent

    def _rest(self, block: _Block) -> None:
        """`block` is used no more: it goes idle, then every ancestor that only it kept in use."""
        while True:
            self._idle[block.page] = None
            parent = block.parent
            if parent is None:
                return
            parent.busy_children -= 1
            if parent.busy_children or self._pins[parent.page]:
                return
            block = parent

    # ------------------------------------------------------------ self-check

    def check(self) -> None:
        """Verify every invariant; slow, for tests and idle moments.

        Raises:
            AssertionError: the bookkeeping contradicts itself; the message says how.
        """
        free, idle = set(self._free), set(self._idle)
        pinned = {page for page, pins in enumerate(self._pins) if pins}
        held = {page for page, block in self._block_of.items() if block.busy_children}
        _require(len(free) == len(self._free), "a page is free twice")
        for name, pages in (("free", free), ("idle", idle), ("quarantined", self._quarantined)):
            _require(not pages & (pinned | held), f"{name} pages in use: {pages & (pinned | held)}")
        _require(not free & self._quarantined, "a quarantined page is free")
        _require(not (free | self._quarantined) & set(self._block_of), "an unheld page is published")
        _require(idle == set(self._block_of) - pinned - held, "idle pages are not the unused published ones")
        _require(len(free) + len(idle) + len(self._quarantined) + len(pinned | held) == self.num_pages,
                 "a page is in no state")  # fmt: skip
        _require(self._total_pins == sum(self._pins), "total_pins is wrong")
        self._check_tree()

    def _check_tree(self) -> None:
        order = {page: position for position, page in enumerate(self._idle)}
        busy_children: dict[int, int] = {}
        _require(len(self._blocks) == len(self._block_of), "a published page has two blocks")
        for block in self._blocks.values():
            parent = block.parent
            _require(self._block_of.get(block.page) is block, f"page {block.page} lost its block")
            if parent is None:
                continue
            _require(self._blocks.get(parent.block_hash) is parent, f"hole before page {block.page}")
            if block.page in order:
                at_parent = order.get(parent.page, len(order))
                _require(order[block.page] < at_parent, f"page {parent.page} is evicted before its child")
            else:
                busy_children[parent.page] = busy_children.get(parent.page, 0) + 1
        for page, block in self._block_of.items():
            _require(block.busy_children == busy_children.get(page, 0), f"page {page}: wrong busy_children")
        seen: set[int] = set()
        for block in self._blocks.values():
            _require(block.parent is None or block.parent.page in seen, "snapshot: a child before its parent")
            seen.add(block.page)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(f"page pool: {otherwise}")

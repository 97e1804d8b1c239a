"""The cache by runs holds, finds and evicts exactly what the live page pool does."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.errors import OutOfPages
from prfaas.kv.pool import PagePool
from simulations.engine.page_cache import Blocks, Held, PageCache

PAGES = 12


def ids(*blocks: int) -> Blocks:
    return np.array(blocks, dtype=np.uint64)


def flat(runs: list[Blocks]) -> list[int]:
    return [block for run in runs for block in run.tolist()]


class Twin:
    """The same prompts on both; page size 1, so that a token is a block."""

    def __init__(self) -> None:
        self.cache = PageCache(PAGES)
        self.removed: list[int] = []
        self.stored: list[int] = []
        self.pool = PagePool(PAGES, 1, self.stored.extend, self.removed.extend)
        self.ids: dict[tuple[int, ...], int] = {}
        self.live: list[tuple[Held, list[int], list[int], Blocks]] = []
        self.answers = 0

    def blocks(self, tokens: list[int]) -> Blocks:
        return ids(
            *(self.ids.setdefault(tuple(tokens[: n + 1]), len(self.ids) + 1) for n in range(len(tokens)))
        )

    def begin(self, tokens: list[int], whole: bool) -> None:
        """Match and take the rest: at once, or one after the other."""
        blocks = self.blocks(tokens)
        if whole:
            held = self.cache.match_and_grow(blocks, len(tokens))
            try:
                match, fresh = self.pool.match_and_allocate(tokens)
            except OutOfPages:
                assert held is None
                return
            assert held is not None
        else:
            held = self.cache.match(blocks)
            match = self.pool.match(tokens)
            assert held.published == match.tokens
            try:
                fresh = self.pool.allocate(len(tokens) - match.tokens)
            except OutOfPages:
                assert not self.cache.grow(held, len(tokens))
                self.cache.release(held)
                self.pool.release(match.page_ids)
                return
            assert self.cache.grow(held, len(tokens))
        assert held.published == match.tokens
        self.live.append((held, tokens, match.page_ids + fresh, blocks))

    def publish(self, which: int) -> None:
        held, tokens, pages, blocks = self.live[which % len(self.live)]
        self.cache.publish(held, blocks)
        self.pool.commit(tokens, pages)

    def end(self, which: int, answer: int) -> None:
        """Publish, grow by an answer where it fits, give everything back."""
        held, tokens, pages, blocks = self.live.pop(which % len(self.live))
        self.cache.publish(held, blocks)
        self.pool.commit(tokens, pages)
        try:
            pages = pages + self.pool.allocate(answer)
        except OutOfPages:
            assert not self.cache.grow(held, len(tokens) + answer)
            answer = 0
        else:
            assert self.cache.grow(held, len(tokens) + answer)
        self.answers += 1
        self.pool.commit(tokens + [100 * self.answers + n for n in range(answer)], pages)
        self.cache.publish_answer(held, blocks, answer)
        self.cache.release(held)
        self.pool.release(pages)

    def check(self) -> None:
        counts = self.pool.counts()
        assert self.cache.free == counts.free
        assert self.cache.idle_pages == counts.cached
        self.cache.check()


operations = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.lists(st.integers(0, 1), min_size=1, max_size=6), st.booleans()),
        st.tuples(st.just("publish"), st.integers(0, 9), st.none()),
        st.tuples(st.just("end"), st.integers(0, 9), st.integers(0, 3)),
    ),
    max_size=40,
)


@settings(max_examples=80, deadline=None)
@given(operations)
def test_pages_by_state_and_matches_equal_the_live_pools(steps: list[tuple[str, Any, Any]]) -> None:
    twin = Twin()
    for name, first, second in steps:
        if name == "begin":
            twin.begin(first, second)
        elif twin.live and name == "publish":
            twin.publish(first)
        elif twin.live:
            twin.end(first, second)
        twin.check()
    while twin.live:
        twin.end(0, 0)
    assert twin.cache.available == PAGES
    stored = flat(twin.cache.stored)
    known = set(stored) - set(flat(twin.cache.removed))
    for tokens in twin.ids:
        held = twin.cache.match(twin.blocks(list(tokens)))
        assert held.published == twin.pool.match(list(tokens)).tokens
        assert (held.published == len(tokens)) <= (twin.ids[tokens] in stored)
    assert len(known) <= len(twin.ids)


def test_a_run_that_is_partly_matched_is_cut_there() -> None:
    cache = PageCache(10)
    held = cache.match_and_grow(ids(1, 2, 3, 4), 4)
    assert held is not None
    cache.publish(held, ids(1, 2, 3, 4))
    cache.release(held)
    other = cache.match(ids(1, 2, 30))
    assert other.published == 2
    assert cache.idle_pages == 2
    assert cache.available == 8
    cache.release(other)
    cache.check()


def test_eviction_takes_the_ends_of_the_longest_idle_chain_first() -> None:
    cache = PageCache(4)
    for blocks in (ids(1, 2), ids(3, 4)):
        held = cache.match_and_grow(blocks, 2)
        assert held is not None
        cache.publish(held, blocks)
        cache.release(held)
    held = cache.match_and_grow(ids(5), 1)
    assert held is not None
    assert flat(cache.removed) == [2]
    assert cache.match(ids(1, 2)).published == 1


def test_an_answer_is_found_by_the_next_turn_under_the_ids_that_are_known_of_it() -> None:
    cache = PageCache(10)
    held = cache.match_and_grow(ids(1, 2), 6)
    assert held is not None
    # Of the answer's three full pages a later prompt repeats two; the sixth page is not full.
    cache.publish_answer(held, ids(1, 2), 3, ids(3, 4))
    cache.release(held)
    assert flat(cache.stored) == [1, 2, 3, 4]
    assert (cache.idle_pages, cache.free) == (5, 5)
    cache.check()
    turn = cache.match(ids(1, 2, 3, 4, 5))
    assert turn.published == 4
    cache.release(turn)
    cache.check()


def test_an_answer_that_ended_early_has_no_more_pages_than_it_filled() -> None:
    cache = PageCache(10)
    held = cache.match_and_grow(ids(1, 2), 3)
    assert held is not None
    cache.publish_answer(held, ids(1, 2), 1, ids(3, 4))
    cache.release(held)
    assert cache.match(ids(1, 2, 3, 4)).published == 3
    again = cache.match_and_grow(ids(1, 2, 3), 4)
    assert again is not None
    cache.publish_answer(again, ids(1, 2, 3), 0, ids(4))
    assert again.published == 3

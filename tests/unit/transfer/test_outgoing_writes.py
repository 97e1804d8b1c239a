"""Which writes an attempt makes: every granted (layer, page) once, in place, not before its layer is done."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.engine.interface import ChunkPlan
from prfaas.kv.layout import CacheGroup, KVLayout
from prfaas.transfer.events import AttemptKey
from prfaas.transfer.outgoing import Outgoing, final_pages

KEY = AttemptKey("r", 1)
LAYERS, PAGE_SIZE = 3, 4
LAYOUT = KVLayout((CacheGroup("full", tuple(range(LAYERS)), 1, 8),), PAGE_SIZE, "float32", 100)


def plan(start: int, end: int, before: int, last: bool) -> ChunkPlan:
    return ChunkPlan("s", start, end, before, last)


def make(first_page: int, count: int) -> Outgoing:
    return Outgoing(KEY, "s", first_page, range(50, 50 + count), lambda event: None, 0.0)


@given(
    cached_pages=st.integers(0, 4),
    first_page=st.integers(0, 4),
    sizes=st.lists(st.integers(1, 11), min_size=1, max_size=8),
    limit_pages=st.integers(1, 5),
)
@settings(deadline=None)
def test_each_granted_page_of_each_layer_is_written_once_and_after_its_layer(
    cached_pages: int, first_page: int, sizes: list[int], limit_pages: int
) -> None:
    tokens = cached_pages * PAGE_SIZE + sum(sizes)
    pages = LAYOUT.pages_for(tokens)
    first_page = min(first_page, pages - 1)
    out = make(first_page, pages - first_page)
    source = {page: page + 10 for page in range(pages)}
    limit = limit_pages * LAYOUT.page_bytes
    cached = {page: source[page] for page in range(cached_pages)}
    out.queue(out.cached_writes(cached, LAYOUT, limit), 0.0)
    start, computed = cached_pages * PAGE_SIZE, {}
    for index, size in enumerate(sizes):
        chunk = plan(start, start + size, index * LAYERS, index == len(sizes) - 1)
        out.queue(out.chunk_writes(chunk, source, LAYOUT, limit), 0.0)
        computed |= dict.fromkeys(final_pages(chunk, PAGE_SIZE), index)
        start += size
    assert out.lacks == 0
    seen = set()
    for done in range(len(sizes) * LAYERS + 1):
        out.layers_done(done, float(done))
        while out.ready:
            write = out.ready.popleft()
            assert write.nbytes == len(write.prompt_pages) * LAYOUT.page_bytes <= limit
            for page, taken, dest in zip(
                write.prompt_pages, write.source_pages, write.dest_pages, strict=True
            ):
                assert (write.layer, page) not in seen, "written twice"
                seen.add((write.layer, page))
                assert (taken, dest) == (source[page], 50 + page - first_page)
                if page not in cached:
                    assert done >= computed[page] * LAYERS + write.layer + 1, "written before it was computed"
    assert seen == {(layer, page) for layer in range(LAYERS) for page in range(first_page, pages)}
    assert not out.waits_for_layers


def test_a_partly_filled_page_is_final_only_with_the_last_chunk() -> None:
    assert final_pages(plan(0, 6, 0, False), PAGE_SIZE) == range(0, 1)
    assert final_pages(plan(6, 7, 0, False), PAGE_SIZE) == range(1, 1)
    assert final_pages(plan(7, 9, 0, True), PAGE_SIZE) == range(1, 3)


def test_pages_of_one_layer_and_chunk_travel_in_one_write() -> None:
    out = make(0, 6)
    writes = out.chunk_writes(plan(0, 24, 0, True), {page: page for page in range(6)}, LAYOUT, 2**20)
    assert [(write.layer, write.after, len(write.prompt_pages)) for write in writes] == [
        (0, 1, 6),
        (1, 2, 6),
        (2, 3, 6),
    ]


def test_a_refused_hand_over_changes_nothing() -> None:
    out = make(0, 2)
    out.cached_writes({0: 1}, LAYOUT, 2**20)
    for bad in ({0: 1}, {1: 2, 2: 3}):
        with pytest.raises(ValueError, match=r"handed over before|behind the grant"):
            out.cached_writes(bad, LAYOUT, 2**20)
    assert out.lacks == 1
    out.cached_writes({1: 2}, LAYOUT, 2**20)
    assert out.lacks == 0


def test_stats_of_an_attempt_that_sent_nothing_are_zero() -> None:
    stats = make(0, 1).stats()
    assert (stats.kv_bytes, stats.transfer_s, stats.tail_s, stats.first_post_s) == (0, 0, 0, 0)


def test_stats_measure_from_the_first_post_and_from_the_last_layer() -> None:
    out = make(0, 1)
    out.queue(out.chunk_writes(plan(0, 4, 0, True), {0: 0}, LAYOUT, 2**20), 0.0)
    for layer in range(LAYERS):
        out.layers_done(layer + 1, 1.0 + layer)
        out.posted(1.1 + layer)
        out.landed(LAYOUT.page_bytes, 1.5 + layer)
    stats = out.stats()
    assert stats.kv_bytes == LAYERS * LAYOUT.page_bytes
    assert stats.first_post_s == pytest.approx(1.1)
    assert stats.transfer_s == pytest.approx(2.4)
    assert stats.tail_s == pytest.approx(0.5)

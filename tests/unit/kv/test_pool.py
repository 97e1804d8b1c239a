"""The page pool: states, sharing, the prefix cache's tree, and eviction that leaves no hole."""

from __future__ import annotations

from itertools import pairwise

import pytest

from prfaas.errors import OutOfPages
from prfaas.kv import pool as pool_module
from prfaas.kv.hashing import block_hashes
from prfaas.kv.pool import PagePool

PAGE = 4


def tokens(pages: int, first: int = 0) -> list[int]:
    return list(range(first, first + pages * PAGE))


def publish(pool: PagePool, token_ids: list[int], salt: str = "") -> list[int]:
    """Compute-and-release of a sequence: its pages are cached and idle afterwards."""
    pages = pool.allocate(len(token_ids) // PAGE)
    pool.commit(token_ids, pages, salt)
    pool.release(pages)
    return pages


def test_fresh_pages_are_contiguous_and_ascending() -> None:
    pool = PagePool(8, PAGE)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(5) == [3, 4, 5, 6, 7]


def test_allocating_too_many_takes_nothing() -> None:
    pool = PagePool(4, PAGE)
    publish(pool, tokens(2))
    with pytest.raises(OutOfPages, match=r"5 pages wanted, 4 of 4"):
        pool.allocate(5)
    assert pool.counts().cached == 2
    pool.check()


def test_a_match_is_the_longest_published_prefix_in_full_pages() -> None:
    pool = PagePool(8, PAGE)
    pages = publish(pool, tokens(3))
    match = pool.match([*tokens(2), 99, 99, 99, 99])
    assert (match.page_ids, match.tokens) == (pages[:2], 2 * PAGE)
    assert pool.match([7, 7, 7, 7]).page_ids == []


def test_a_match_leaves_the_last_prompt_token_to_decode() -> None:
    pool = PagePool(8, PAGE)
    publish(pool, tokens(2))
    assert pool.match(tokens(2), max_tokens=2 * PAGE - 1).tokens == PAGE
    assert pool.match(tokens(2), max_tokens=0).tokens == 0


def test_matched_pages_are_pinned_and_survive_pressure() -> None:
    pool = PagePool(4, PAGE)
    publish(pool, tokens(2))
    match = pool.match(tokens(2))
    assert pool.available == 2
    others = pool.allocate(2)
    with pytest.raises(OutOfPages):
        pool.allocate(1)
    pool.release(others)
    pool.release(match.page_ids)
    assert pool.counts().cached == 2
    pool.check()


def test_salts_share_nothing() -> None:
    pool = PagePool(8, PAGE)
    publish(pool, tokens(2), "a")
    assert pool.match(tokens(2), "b").tokens == 0
    assert pool.match(tokens(2)).tokens == 0
    assert pool.match(tokens(2), "a").tokens == 2 * PAGE


def test_a_hash_collision_neither_matches_nor_overwrites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        pool_module, "chain_hashes", lambda packed, size, *_: iter(range(len(packed) // (size * 4)))
    )
    pool = PagePool(8, PAGE)
    kept = publish(pool, tokens(2))
    publish(pool, tokens(2, first=50))
    assert pool.match(tokens(2, first=50)).tokens == 0
    assert pool.match(tokens(2)).page_ids == kept
    assert pool.match([*tokens(1), *tokens(1, first=50)]).tokens == PAGE


def test_eviction_takes_the_least_recently_used_chain_from_its_end() -> None:
    removed: list[int] = []
    pool = PagePool(4, PAGE, on_removed=removed.extend)
    publish(pool, tokens(2))
    publish(pool, tokens(2, first=100))
    pool.release(pool.match(tokens(2)).page_ids)
    pool.allocate(3)
    assert removed == [*reversed(block_hashes(tokens(2, first=100), PAGE)), block_hashes(tokens(2), PAGE)[1]]
    assert pool.match(tokens(2)).tokens == PAGE
    pool.check()


def test_releasing_in_any_order_never_evicts_a_parent_before_its_child() -> None:
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        pool = PagePool(3, PAGE)
        pages = pool.allocate(3)
        pool.commit(tokens(3), pages)
        pool.release([pages[i] for i in order])
        pool.check()
        for left in (2, 1, 0):
            taken = pool.allocate(1)
            match = pool.match(tokens(3))
            assert match.tokens == left * PAGE
            pool.release(match.page_ids)
            pool.quarantine(taken)


def test_duplicate_content_keeps_the_first_page_and_frees_the_second() -> None:
    stored: list[int] = []
    pool = PagePool(8, PAGE, on_stored=stored.extend)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.commit(tokens(2), first)
    pool.commit(tokens(2), second)
    pool.release(second)
    assert pool.counts().free == 6
    assert stored == block_hashes(tokens(2), PAGE)
    assert pool.match(tokens(2)).page_ids == first
    pool.check()


def test_a_child_of_a_duplicate_hangs_on_the_published_twin_and_keeps_it() -> None:
    pool = PagePool(4, PAGE)
    first, second = pool.allocate(1), pool.allocate(2)
    pool.commit(tokens(1), first)
    pool.commit(tokens(2), second)
    pool.release(first)
    pool.check()
    assert pool.counts().cached == 0, "the twin is in use by the child that hangs on it"
    pool.allocate(1)
    with pytest.raises(OutOfPages):
        pool.allocate(1)
    match = pool.match(tokens(2))
    assert match.page_ids == [first[0], second[1]]
    pool.release(match.page_ids)
    pool.release(second)
    pool.check()
    assert pool.counts().cached == 2


def test_commits_in_steps_equal_one_commit() -> None:
    pool = PagePool(8, PAGE)
    pages = pool.allocate(4)
    for filled in range(1, 5):
        pool.commit(tokens(4)[: filled * PAGE], pages, start_page=filled - 1)
    assert pool.snapshot() == block_hashes(tokens(4), PAGE)


def test_a_later_commit_publishes_what_an_earlier_one_left_out() -> None:
    pool = PagePool(8, PAGE)
    pages = pool.allocate(3)
    pool.commit(tokens(3), pages, start_page=2)
    assert pool.snapshot() == block_hashes(tokens(3), PAGE)
    pool.check()


def test_a_duplicate_whose_twin_was_evicted_is_published_in_its_place() -> None:
    pool = PagePool(4, PAGE)
    twin, mine = pool.allocate(1), pool.allocate(2)
    pool.commit(tokens(1), twin)
    pool.commit(tokens(1), mine)
    pool.release(twin)
    pool.allocate(2)
    pool.commit(tokens(2), mine, start_page=1)
    assert pool.match(tokens(2)).page_ids == mine
    pool.check()


def test_a_partly_filled_page_is_not_published() -> None:
    pool = PagePool(4, PAGE)
    pages = pool.allocate(2)
    pool.commit(tokens(2)[:-1], pages)
    assert pool.match(tokens(2)).tokens == PAGE


def test_snapshot_and_deltas_agree() -> None:
    known: set[int] = set()
    pool = PagePool(4, PAGE, on_stored=known.update, on_removed=known.difference_update)
    for first in (0, 100, 200):
        publish(pool, tokens(2, first=first))
        assert known == set(pool.snapshot())
    assert len(known) == 4


def test_quarantined_pages_are_neither_used_nor_free_until_confirmed() -> None:
    pool = PagePool(3, PAGE)
    pages = pool.allocate(2)
    pool.quarantine(pages)
    assert pool.available == 1
    assert pool.counts().quarantined == 2
    with pytest.raises(ValueError, match="cannot be pinned"):
        pool.pin(pages)
    pool.unquarantine(pages)
    assert pool.counts().free == 3
    pool.check()


def test_shared_or_published_pages_cannot_be_quarantined() -> None:
    pool = PagePool(3, PAGE)
    shared, published = pool.allocate(1), pool.allocate(1)
    pool.pin(shared)
    pool.commit(tokens(1), published)
    for pages in (shared, published):
        with pytest.raises(ValueError, match="cannot be quarantined"):
            pool.quarantine(pages)
    pool.check()


def test_misuse_is_refused() -> None:
    pool = PagePool(3, PAGE)
    with pytest.raises(ValueError, match="released twice"):
        pool.release([0])
    with pytest.raises(ValueError, match="cannot be pinned"):
        pool.pin([0])
    with pytest.raises(ValueError, match="not quarantined"):
        pool.unquarantine([0])
    with pytest.raises(ValueError, match="is not pinned and cannot be published"):
        pool.commit(tokens(1), [0])
    pages = pool.allocate(1)
    pool.commit(tokens(1), pages)
    with pytest.raises(ValueError, match="holds other published content"):
        pool.commit(tokens(1, first=50), pages)
    with pytest.raises(ValueError, match="cannot hold anything"):
        PagePool(0, PAGE)


def test_waiters_hear_when_pages_come_back() -> None:
    pool = PagePool(2, PAGE)
    calls: list[int] = []
    pool.on_available.append(lambda: calls.append(pool.available))
    pages = pool.allocate(2)
    pool.pin(pages[:1])
    pool.release(pages[:1])
    assert calls == []
    pool.release(pages[:1])
    pool.quarantine(pages[1:])
    pool.unquarantine(pages[1:])
    assert calls == [1, 2]


def test_freed_pages_are_handed_out_contiguously_again() -> None:
    pool = PagePool(16, PAGE)
    held = [pool.allocate(1) for _ in range(16)]
    for pages in held[3:9][::-1]:
        pool.release(pages)
    taken = pool.allocate(6)
    assert all(b == a + 1 for a, b in pairwise(taken))


def test_prefix_and_fresh_pages_come_together_or_not_at_all() -> None:
    pool = PagePool(4, PAGE)
    cached = publish(pool, tokens(2))
    told: list[int] = []
    pool.on_available.append(lambda: told.append(1))
    other = pool.allocate(1)
    with pytest.raises(OutOfPages, match="2 pages wanted beside 2 cached ones, 1 are left"):
        pool.match_and_allocate(tokens(4))
    assert pool.counts().pinned == 1
    assert not told, "a failed try must not wake those who wait for pages"
    match, fresh = pool.match_and_allocate([*tokens(2), 7, 7, 7], max_tokens=2 * PAGE + 2)
    assert (match.page_ids, match.tokens, len(fresh)) == (cached, 2 * PAGE, 1)
    pool.release(other + cached + fresh)
    assert pool.available == 4
    pool.check()

"""The block table against a plain set per worker: any event stream, also one that leaves holes in chains."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.block_table import BlockTable, as_hashes

SLOTS = (0, 1, 65)
CHAINS = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(
    lambda tokens: [hash((7, *tokens[: i + 1])) % 2**64 for i in range(len(tokens))]
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "remove", "match", "match", "clear", "rebuild"]),
        st.sampled_from(SLOTS),
        CHAINS,
        st.integers(0, 2**9 - 1),
    ),
    max_size=60,
)


def linear_depth(prompt: list[int], cache: set[int]) -> int:
    return next((i for i, block in enumerate(prompt) if block not in cache), len(prompt))


@settings(deadline=None, max_examples=150)
@given(STEPS, CHAINS)
def test_match_equals_a_linear_scan_whatever_was_removed_where(
    steps: list[tuple[str, int, list[int], int]], last: list[int]
) -> None:
    table, caches = BlockTable(), {slot: set() for slot in SLOTS}
    for slot in SLOTS:
        table.add_worker(slot)
    for action, slot, chain, chosen in [*steps, ("match", 0, last, 0)]:
        some = [block for i, block in enumerate(chain) if chosen >> i & 1]
        if action == "store":
            table.store(slot, as_hashes(some))
            caches[slot] |= set(some)
        elif action == "remove":
            table.remove(slot, as_hashes(some))
            caches[slot] -= set(some)
        elif action == "clear":
            table.clear(slot)
            caches[slot].clear()
        elif action == "rebuild":
            table._rebuild(1024 << chosen % 2, 2)
        else:
            depths = table.match(as_hashes(chain), max(SLOTS) + 1)
            assert {s: depths[s] for s in SLOTS} == {s: linear_depth(chain, caches[s]) for s in SLOTS}
            assert depths.sum() == depths[list(SLOTS)].sum()
    assert len(table) == len(set().union(*caches.values()))
    assert {slot: table.blocks(slot) for slot in SLOTS} == {slot: len(caches[slot]) for slot in SLOTS}


def test_a_hole_hides_what_is_behind_it_until_it_is_filled_again() -> None:
    table, chain = BlockTable(), as_hashes([11, 12, 13, 14])
    table.store(0, chain)
    assert table.match(chain, 1).tolist() == [4]
    table.remove(0, chain[1:2])
    assert table.match(chain, 1).tolist() == [1]
    table.store(0, chain[1:2])
    assert table.match(chain, 1).tolist() == [4]


def test_growing_loses_nothing() -> None:
    table, chain = BlockTable(), as_hashes(list(range(1, 5001)))
    for begin in range(0, 5000, 50):
        table.store(begin // 50 % 2, chain[begin : begin + 50])
        table.store(2, chain[begin : begin + 50])
    assert table.match(chain, 3).tolist() == [50, 0, 5000]
    assert len(table) == 5000


def test_the_hashes_that_mark_empty_places_are_hashes_too() -> None:
    table, chain = BlockTable(), as_hashes([0, 1, 2**64 - 1])
    table.store(0, chain)
    assert table.match(chain, 1).tolist() == [3]
    assert as_hashes([-1]).tolist() == [2**64 - 1]

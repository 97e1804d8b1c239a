from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.protocol.messages import KVRemoved, KVSnapshot, KVStored
from router.core.prefix_index import PrefixIndex


def snapshot(hashes: list[int], sequence: int = 0, generation: str = "g") -> KVSnapshot:
    return KVSnapshot(generation=generation, sequence=sequence, page_size=16, block_hashes=hashes)


def stored(hashes: list[int], sequence: int, generation: str = "g") -> KVStored:
    return KVStored(generation=generation, sequence=sequence, block_hashes=hashes)


def removed(hashes: list[int], sequence: int, generation: str = "g") -> KVRemoved:
    return KVRemoved(generation=generation, sequence=sequence, block_hashes=hashes)


def index_of(*caches: list[int]) -> PrefixIndex:
    index = PrefixIndex()
    for slot, cache in enumerate(caches):
        index.add_worker(slot)
        index.apply(slot, snapshot(cache))
    return index


def match(index: PrefixIndex, hashes: list[int], slots: int = 3, now_s: float = 0.0) -> list[int]:
    return index.match(hashes, slots, now_s).tolist()


def test_match_is_the_longest_contiguous_prefix_of_each_worker() -> None:
    index = index_of([1, 2, 3], [1, 3], [2, 3])
    assert match(index, [1, 2, 3, 4]) == [3, 1, 0]


def test_a_block_of_two_owners_goes_with_the_last_one() -> None:
    index = index_of([1], [1])
    index.apply(0, removed([1], 1))
    assert match(index, [1], 2) == [0, 1]
    assert len(index) == 1
    index.apply(1, removed([1], 1))
    assert len(index) == 0


def test_unknown_removals_do_not_stop_the_rest_of_the_batch() -> None:
    index = index_of([1, 2])
    index.apply(0, removed([99, 2], 1))
    assert match(index, [1, 2], 1) == [1]


def test_repeated_and_old_deltas_change_nothing() -> None:
    index = index_of([1])
    index.apply(0, stored([2], 1))
    index.apply(0, removed([2], 2))
    index.apply(0, stored([2], 1))
    assert match(index, [1, 2], 1) == [1]
    assert not index.needs_resync(0)


def test_a_sequence_gap_asks_for_a_resync_until_the_next_snapshot() -> None:
    index = index_of([1])
    index.apply(0, stored([2], 3))
    assert index.needs_resync(0)
    assert index.gaps_total == 1
    index.apply(0, snapshot([1], 9))
    assert not index.needs_resync(0)
    assert match(index, [1, 2], 1) == [1]


def test_a_delta_without_snapshot_asks_for_a_resync() -> None:
    index = PrefixIndex()
    index.add_worker(0)
    index.apply(0, stored([1], 5))
    assert index.needs_resync(0)


def test_a_new_generation_clears_the_worker() -> None:
    index = index_of([1, 2])
    index.apply(0, stored([5], 1, generation="h"))
    assert match(index, [1, 2], 1) == [0]
    assert match(index, [5], 1) == [1]


def test_removing_a_worker_forgets_only_its_blocks() -> None:
    index = index_of([1], [1, 2])
    index.remove_worker(1)
    assert match(index, [1, 2], 2) == [1, 0]


def test_a_prediction_counts_between_its_times_only() -> None:
    index = index_of([])
    index.predict(0, (1, 2, 3), from_s=1.0, until_s=2.0)
    assert [match(index, [1, 2, 7], 1, now_s) for now_s in (0.9, 1.0, 1.9, 2.0)] == [[0], [2], [2], [0]]
    index.sweep(2.0)
    assert index._predictions == {}


def test_events_take_over_from_a_prediction() -> None:
    index = index_of([])
    index.predict(0, (1, 2), 0.0, 10.0)
    index.apply(0, stored([1, 2], 1))
    index.apply(0, removed([2], 2))
    assert match(index, [1, 2], 1, 1.0) == [1]


def test_a_removal_ends_the_predictions_that_rely_on_the_block() -> None:
    index = index_of([1])
    index.predict(0, (1, 2), 0.0, 10.0)
    index.apply(0, removed([1], 1))
    assert match(index, [1, 2], 1, 1.0) == [0]


def test_withdrawing_twice_or_after_the_worker_left_is_harmless() -> None:
    index = index_of([], [])
    first, second = index.predict(0, (1,), 0, 9), index.predict(1, (1,), 0, 9)
    index.withdraw(first)
    index.withdraw(first)
    index.remove_worker(1)
    index.withdraw(second)
    assert index._predictions == {}


CHAINS = st.lists(st.integers(0, 3), min_size=1, max_size=6).map(
    lambda tokens: [hash(tuple(tokens[: i + 1])) for i in range(len(tokens))]
)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), CHAINS), max_size=30), CHAINS)
def test_match_equals_a_plain_set_per_worker(
    steps: list[tuple[int, bool, list[int]]], prompt: list[int]
) -> None:
    index, caches = index_of([], [], []), [set(), set(), set()]
    for sequence, (slot, store, chain) in enumerate(steps, start=1):
        event = (stored if store else removed)(chain, sequence)
        index.apply(slot, event)
        caches[slot] = caches[slot] | set(chain) if store else caches[slot] - set(chain)
    expected = []
    for cache in caches:
        depth = next((i for i, block in enumerate(prompt) if block not in cache), len(prompt))
        expected.append(depth)
    assert match(index, prompt) == expected
    assert len(index) == len(set().union(*caches))


@settings(deadline=None, max_examples=60)
@given(CHAINS, CHAINS)
def test_a_prediction_matches_as_far_as_the_chains_agree(predicted: list[int], prompt: list[int]) -> None:
    index = index_of([])
    index.predict(0, tuple(predicted), 0.0, 9.0)
    agree = next(
        (i for i, (a, b) in enumerate(zip(predicted, prompt, strict=False)) if a != b),
        min(len(predicted), len(prompt)),
    )
    assert match(index, prompt, 1) == [agree]

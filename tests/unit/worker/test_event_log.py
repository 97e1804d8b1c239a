"""KV events: snapshot first, then deltas without gaps, bounded for slow readers."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.protocol.messages import KVEvent, KVRemoved, KVSnapshot, KVStored
from prfaas.worker.events import EventLog


class Cache:
    """A prefix cache as the log sees it."""

    def __init__(self, limit: int = 8) -> None:
        self.hashes: dict[int, None] = {}
        self.log = EventLog("generation", 4, lambda: list(self.hashes), limit)

    def store(self, block_hash: int) -> None:
        self.hashes[block_hash] = None
        self.log.stored([block_hash])

    def remove(self, block_hash: int) -> None:
        self.hashes.pop(block_hash, None)
        self.log.removed([block_hash])


def replay(events: list[KVEvent], known: set[int], sequence: int) -> tuple[set[int], int]:
    """What a router that follows docs/protocol.md believes after `events`."""
    for event in events:
        match event:
            case KVSnapshot(block_hashes=hashes):
                known = set(hashes)
            case KVStored(block_hashes=hashes):
                assert event.sequence == sequence + 1
                known |= set(hashes)
            case KVRemoved(block_hashes=hashes):
                assert event.sequence == sequence + 1
                known -= set(hashes)
        sequence = event.sequence
    return known, sequence


async def test_a_new_reader_gets_a_snapshot_and_then_only_deltas() -> None:
    cache = Cache()
    cache.store(1)
    with cache.log.subscribe() as reader:
        assert reader.take() == [
            KVSnapshot(generation="generation", sequence=1, page_size=4, block_hashes=[1])
        ]
        assert reader.take() == []
        cache.store(2)
        assert reader.take() == [KVStored(generation="generation", sequence=2, block_hashes=[2])]


async def test_a_slow_reader_gets_a_fresh_snapshot_instead_of_a_long_queue() -> None:
    cache = Cache(limit=3)
    with cache.log.subscribe() as reader:
        reader.take()
        for block_hash in range(10):
            cache.store(block_hash)
        (snapshot,) = reader.take()
        assert isinstance(snapshot, KVSnapshot)
        assert snapshot.sequence == 10
        assert snapshot.block_hashes == list(range(10))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.one_of(st.tuples(st.booleans(), st.integers(0, 5)), st.none()), max_size=60))
def test_a_reader_that_reads_at_any_moments_always_believes_the_truth(
    steps: list[tuple[bool, int] | None],
) -> None:
    async def run() -> None:
        cache = Cache(limit=4)
        known: set[int] = set()
        sequence = 0
        with cache.log.subscribe() as reader:
            for step in [*steps, None]:
                if step is None:
                    known, sequence = replay(reader.take(), known, sequence)
                    assert known == set(cache.hashes)
                else:
                    stored, block_hash = step
                    (cache.store if stored else cache.remove)(block_hash)

    asyncio.run(run())


async def test_waiting_ends_at_news_at_a_wake_up_and_at_the_timeout() -> None:
    cache = Cache()
    with cache.log.subscribe() as reader:
        await asyncio.wait_for(reader.wait(60), 5)  # the snapshot is there to take
        reader.take()
        waiting = asyncio.create_task(reader.wait(60))
        await asyncio.sleep(0)
        cache.store(1)
        await asyncio.wait_for(waiting, 5)
        reader.take()
        waiting = asyncio.create_task(reader.wait(60))
        await asyncio.sleep(0)
        cache.log.wake()
        await asyncio.wait_for(waiting, 5)
        reader.take()
        await asyncio.wait_for(reader.wait(0.01), 5)


async def test_a_reader_that_has_left_is_forgotten() -> None:
    cache = Cache(limit=2)
    with pytest.raises(RuntimeError), cache.log.subscribe():
        raise RuntimeError
    assert not cache.log._readers

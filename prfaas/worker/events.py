"""KV events for the router: a snapshot, then sequenced deltas, to any number of readers.

A reader that falls behind loses its queue and gets a fresh snapshot, so memory stays bounded and nothing
is ever missed silently.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prfaas.protocol.messages import KVEvent, KVRemoved, KVSnapshot, KVStored

QUEUE_LIMIT = 1024
"""Deltas kept for one reader before it is given a new snapshot instead."""


class Subscription:
    """One reader's view of the event log; starts with a snapshot."""

    def __init__(self, log: EventLog, limit: int) -> None:
        self._log = log
        self._limit = limit
        self._deltas: deque[KVEvent] = deque()
        self._needs_snapshot = True
        self._news = asyncio.Event()

    def offer(self, event: KVEvent) -> None:
        if not self._needs_snapshot:
            self._deltas.append(event)
            if len(self._deltas) > self._limit:
                self._deltas.clear()
                self._needs_snapshot = True
        self._news.set()

    def wake(self) -> None:
        self._news.set()

    async def wait(self, timeout_s: float) -> None:
        """Return when there is something to take, `wake` was called, or `timeout_s` has passed."""
        if self._needs_snapshot or self._deltas:
            return
        try:
            await asyncio.wait_for(self._news.wait(), timeout_s)
        except TimeoutError:
            return

    def take(self) -> list[KVEvent]:
        """Everything since the last call, oldest first."""
        self._news.clear()
        if self._needs_snapshot:
            self._needs_snapshot = False
            return [self._log.snapshot()]
        events = list(self._deltas)
        self._deltas.clear()
        return events


class EventLog:
    """Numbers the changes of one worker's prefix cache. Belongs to one event loop.

    Args:
        generation: changes when numbering starts anew (the worker's incarnation).
        page_size: tokens per block.
        cached_hashes: every block hash cached now.
    """

    def __init__(
        self,
        generation: str,
        page_size: int,
        cached_hashes: Callable[[], list[int]],
        limit: int = QUEUE_LIMIT,
    ) -> None:
        self._generation = generation
        self._page_size = page_size
        self._cached_hashes = cached_hashes
        self._limit = limit
        self._sequence = 0
        self._readers: set[Subscription] = set()

    def stored(self, block_hashes: list[int]) -> None:
        self._sequence += 1
        self._publish(
            KVStored(generation=self._generation, sequence=self._sequence, block_hashes=block_hashes)
        )

    def removed(self, block_hashes: list[int]) -> None:
        self._sequence += 1
        self._publish(
            KVRemoved(generation=self._generation, sequence=self._sequence, block_hashes=block_hashes)
        )

    def wake(self) -> None:
        """Make every reader look now: the worker's state has changed."""
        for reader in self._readers:
            reader.wake()

    def snapshot(self) -> KVSnapshot:
        return KVSnapshot(
            generation=self._generation,
            sequence=self._sequence,
            page_size=self._page_size,
            block_hashes=self._cached_hashes(),
        )

    @contextmanager
    def subscribe(self) -> Iterator[Subscription]:
        reader = Subscription(self, self._limit)
        self._readers.add(reader)
        try:
            yield reader
        finally:
            self._readers.discard(reader)

    def _publish(self, event: KVEvent) -> None:
        for reader in self._readers:
            reader.offer(event)

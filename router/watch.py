"""A time limit on work that depends on a worker, which the worker's loss ends at once."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Watch:
    """One attempt's limit. The attempt runs inside `asyncio.timeout`; when `TimeoutError` comes out,
    `lost` tells a lost worker from a passed deadline."""

    def __init__(self, timeout: asyncio.Timeout) -> None:
        self._timeout = timeout
        self.lost = False

    def extend_to(self, seconds: float) -> None:
        """Move the deadline to `seconds` from now."""
        if not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time() + seconds)

    def fire(self) -> None:
        """The worker is lost: end the attempt now, without waiting for its connection to notice."""
        if not self._timeout.expired():
            self.lost = True
            self._timeout.reschedule(asyncio.get_running_loop().time())


class Watches:
    """All attempts in flight, by decode worker."""

    def __init__(self) -> None:
        self._by_worker: defaultdict[str, set[Watch]] = defaultdict(set)

    @contextmanager
    def on(self, worker: str, timeout: asyncio.Timeout) -> Iterator[Watch]:
        """Watch `worker` while the block runs."""
        watch = Watch(timeout)
        self._by_worker[worker].add(watch)
        try:
            yield watch
        finally:
            self._by_worker[worker].discard(watch)

    def fire(self, worker: str) -> int:
        """End every attempt on `worker`; returns how many."""
        watches = list(self._by_worker[worker])
        for watch in watches:
            watch.fire()
        return len(watches)

    def count(self, worker: str) -> int:
        """Attempts in flight on `worker`."""
        return len(self._by_worker[worker])

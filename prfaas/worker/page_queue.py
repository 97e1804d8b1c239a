"""First come, first served waiting for KV pages."""

from __future__ import annotations

import asyncio

from prfaas.errors import OutOfPages
from prfaas.kv.pool import PagePool

_POLL_S = 0.005


class PageQueue:
    """Hands out pages in order of asking, so that a large request is not starved by small ones.

    The pool says nothing when pages are given back, so whoever is at the head looks again every few
    milliseconds; nothing runs while nobody waits.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._turn = asyncio.Lock()

    async def allocate(self, count: int) -> list[int]:
        """`count` pages, each pinned once. The caller bounds the wait (`asyncio.timeout`).

        Raises:
            OutOfPages: the pool could never hold that many.
        """
        total = self._pool.counts().total
        if count > total:
            raise OutOfPages(f"{count} pages are needed, the pool has {total}; raise `memory` of this worker")
        async with self._turn:
            while self._pool.available < count:  # noqa: ASYNC110 - the pool has no event to wait for
                await asyncio.sleep(_POLL_S)
            return self._pool.allocate(count)

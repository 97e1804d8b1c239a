"""First come, first served waiting for the KV pages of prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from prfaas.errors import OutOfPages
from prfaas.kv.pool import Match, PagePool


class PageQueue:
    """Hands out pages in order of asking, so that a large prompt is not starved by small ones.

    Whoever waits here holds nothing: prompts that kept their cached prefixes pinned while they waited could
    fill the pool and block each other for ever. So the prefix is looked up when a prompt's turn has come.
    Belongs to one event loop.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._turn = asyncio.Lock()
        self._returned = asyncio.Event()
        pool.on_available.append(self._returned.set)

    async def take(self, token_ids: Sequence[int], salt: str, tokens: int) -> tuple[Match, list[int]]:
        """Pages for the first `tokens` tokens of a prompt, each pinned once: the cached prefix, and fresh
        ones for the rest. The caller bounds the wait (`asyncio.timeout`).

        Raises:
            OutOfPages: the pool could never hold that many.
        """
        needed, total = -(-tokens // self._pool.page_size), self._pool.num_pages
        if needed > total:
            raise OutOfPages(
                f"{needed} pages are needed, the pool has {total}; raise `memory` of this worker"
            )
        async with self._turn:
            while True:
                self._returned.clear()
                try:
                    return self._pool.match_and_allocate(token_ids, salt, tokens)
                except OutOfPages:
                    await self._returned.wait()

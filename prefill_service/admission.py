"""Lets prefills into the engine in order, while together they fill no more than one chunk.

A prefill waits here rather than in the engine, so that it can be cancelled without a trace, and so that it
looks into the prefix cache when its turn comes: behind a sibling with the same document it finds that
document cached instead of computing it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Admission:
    """First come, first served. Belongs to one event loop.

    Args:
        chunk_tokens: tokens that the engine computes in one step.
    """

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._turn = asyncio.Lock()
        self._admitted: list[int] = []
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def enter(self, tokens: int) -> AsyncIterator[None]:
        """Hold a place for a prefill of `tokens` tokens; a long one is let in alone."""
        async with self._turn:
            while self._admitted and sum(self._admitted) + tokens > self._chunk_tokens:
                self._changed.clear()
                await self._changed.wait()
            self._admitted.append(tokens)
        try:
            yield
        finally:
            self._admitted.remove(tokens)
            self._changed.set()

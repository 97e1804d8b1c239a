"""Waiting for pages: in order, cancellable, refused where it can never succeed."""

from __future__ import annotations

import asyncio

import pytest

from prfaas.errors import OutOfPages
from prfaas.kv.pool import PagePool
from prfaas.worker.page_queue import PageQueue


async def test_pages_go_to_the_first_in_line_though_a_later_one_would_fit() -> None:
    pool = PagePool(4, 8)
    queue = PageQueue(pool)
    held = await queue.allocate(3)
    large = asyncio.create_task(queue.allocate(3))
    small = asyncio.create_task(queue.allocate(1))
    await asyncio.sleep(0.03)
    assert not large.done()
    assert not small.done()
    pool.release(held)
    assert len(await asyncio.wait_for(large, 5)) == 3
    assert len(await asyncio.wait_for(small, 5)) == 1


async def test_a_cancelled_wait_takes_nothing_and_lets_the_next_one_in() -> None:
    pool = PagePool(4, 8)
    queue = PageQueue(pool)
    held = await queue.allocate(2)
    large = asyncio.create_task(queue.allocate(4))
    small = asyncio.create_task(queue.allocate(2))
    await asyncio.sleep(0.02)
    large.cancel()
    pages = await asyncio.wait_for(small, 5)
    pool.release(held + pages)
    assert pool.available == 4
    pool.check()


async def test_more_than_the_pool_has_is_refused_at_once() -> None:
    with pytest.raises(OutOfPages, match="5 pages are needed, the pool has 4"):
        await PageQueue(PagePool(4, 8)).allocate(5)

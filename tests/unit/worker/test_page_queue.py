"""Waiting for pages: in order, with empty hands, cancellable, refused where it can never succeed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from prfaas.errors import OutOfPages
from prfaas.kv.pool import PagePool
from prfaas.worker.page_queue import PageQueue

PAGE = 8


def prompt(pages: int, first: int) -> list[int]:
    """A prompt of `pages` pages that no other `first` shares a page with."""
    return list(range(1000 * first, 1000 * first + pages * PAGE))


async def take(queue: PageQueue, pages: int, first: int) -> list[int]:
    """All pages of a prompt, cached and fresh."""
    match, fresh = await queue.take(prompt(pages, first), "", pages * PAGE)
    return match.page_ids + fresh


def cache(pool: PagePool, pages: int, first: int) -> None:
    held = pool.allocate(pages)
    pool.commit(prompt(pages, first), held)
    pool.release(held)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def finish(pool: PagePool, tasks: Iterable[asyncio.Task[list[int]]]) -> None:
    """Let every prompt run and end, one after the other."""
    for task in tasks:
        pool.release(await asyncio.wait_for(task, 5))
    pool.check()


async def test_pages_go_to_the_first_in_line_though_a_later_one_would_fit() -> None:
    pool = PagePool(4, PAGE)
    queue = PageQueue(pool)
    held = await take(queue, 3, first=1)
    large = asyncio.create_task(take(queue, 3, first=2))
    small = asyncio.create_task(take(queue, 1, first=3))
    await settle()
    assert not large.done()
    assert not small.done()
    pool.release(held)
    assert len(await asyncio.wait_for(large, 5)) == 3
    assert len(await asyncio.wait_for(small, 5)) == 1


async def test_pages_that_leave_quarantine_end_the_wait() -> None:
    pool = PagePool(2, PAGE)
    queue = PageQueue(pool)
    late = pool.allocate(2)
    pool.quarantine(late)
    waiting = asyncio.create_task(take(queue, 2, first=1))
    await settle()
    assert not waiting.done()
    pool.unquarantine(late)
    assert len(await asyncio.wait_for(waiting, 5)) == 2


async def test_a_cancelled_wait_takes_nothing_and_lets_the_next_one_in() -> None:
    pool = PagePool(4, PAGE)
    queue = PageQueue(pool)
    held = await take(queue, 2, first=1)
    large = asyncio.create_task(take(queue, 4, first=2))
    small = asyncio.create_task(take(queue, 2, first=3))
    await settle()
    large.cancel()
    pages = await asyncio.wait_for(small, 5)
    pool.release(held + pages)
    assert pool.available == 4
    pool.check()


async def test_prompts_whose_cached_prefixes_fill_the_pool_do_not_block_each_other() -> None:
    """Each has four of the ten pages cached and needs five more: pinned while waiting, none would run."""
    pool = PagePool(10, PAGE)
    queue = PageQueue(pool)
    cache(pool, 4, first=1)
    cache(pool, 4, first=2)
    running = pool.allocate(2)
    tasks = [asyncio.create_task(take(queue, 9, first=first)) for first in (1, 2)]
    await settle()
    assert not any(task.done() for task in tasks)
    pool.release(running)
    await finish(pool, tasks)


async def test_what_became_cached_while_waiting_is_found() -> None:
    pool = PagePool(4, PAGE)
    queue = PageQueue(pool)
    held = await take(queue, 3, first=1)
    sibling = asyncio.create_task(queue.take(prompt(4, 1), "", 4 * PAGE))
    await settle()
    pool.commit(prompt(3, 1), held)
    pool.release(held)
    match, fresh = await asyncio.wait_for(sibling, 5)
    assert (match.page_ids, match.tokens) == (held, 3 * PAGE)
    assert len(fresh) == 1


async def test_more_than_the_pool_has_is_refused_at_once() -> None:
    with pytest.raises(OutOfPages, match="5 pages are needed, the pool has 4"):
        await take(PageQueue(PagePool(4, PAGE)), 5, first=1)

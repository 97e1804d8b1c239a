"""A grant at the decode worker: whose pages, and where they end up."""

from __future__ import annotations

import asyncio

import pytest

from decode_service.grants import GrantFailure, LiveGrant
from prfaas.kv.pool import PagePool
from prfaas.transfer.events import AttemptKey

PAGE = 4
PROMPT = list(range(100, 119))  # 19 tokens: KV of 18 is wanted, 4 full pages and a half


def make(pool: PagePool, prefix: int) -> LiveGrant:
    """A grant for the pages behind a cached prefix of `prefix` pages."""
    if prefix:
        held = pool.allocate(prefix)
        pool.commit(PROMPT, held)
        pool.release(held)
    match = pool.match(PROMPT, max_tokens=len(PROMPT) - 1)
    assert len(match.page_ids) == prefix
    fresh = pool.allocate(5 - prefix)
    return LiveGrant(pool, AttemptKey("r", 1), "prefill-0", PROMPT, "", match.page_ids, fresh)


async def test_complete_pages_are_the_callers_once_taken() -> None:
    pool = PagePool(8, PAGE)
    grant = make(pool, prefix=1)
    grant.completed()
    await grant.complete()
    pages = grant.take()
    assert len(pages) == 5
    grant.give_up("cancelled", "")
    assert pool.counts().pinned == 5
    pool.release(pages)
    assert pool.available == 8
    pool.check()


async def test_complete_pages_that_nobody_took_are_released() -> None:
    pool = PagePool(8, PAGE)
    grant = make(pool, prefix=2)
    grant.completed()
    grant.give_up("cancelled", "")
    assert pool.available == 8
    pool.check()


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("complete", [0, 1, 2])
async def test_an_abandoned_attempt_keeps_its_complete_prefix_and_quarantines_the_rest(
    prefix: int, complete: int
) -> None:
    pool = PagePool(8, PAGE)
    grant = make(pool, prefix)
    fresh = grant.page_ids
    grant.fail_with("transfer_failed", "first reason")
    grant.fail_with("peer_lost", "later reason")
    grant.abandoned(fresh[:complete], fresh[complete:])
    with pytest.raises(GrantFailure) as caught:
        await asyncio.wait_for(grant.complete(), 5)
    assert (caught.value.site, caught.value.reason) == ("prefill-0", "transfer_failed")
    assert caught.value.complete_tokens == (prefix + complete) * PAGE
    assert pool.counts().quarantined == len(fresh) - complete
    assert await grant.report is None
    pool.unquarantine(fresh[complete:])
    match = pool.match(PROMPT)
    assert match.tokens == (prefix + complete) * PAGE
    pool.release(match.page_ids)
    assert pool.available == 8
    pool.check()


async def test_a_partly_filled_last_page_is_never_published() -> None:
    pool = PagePool(8, PAGE)
    grant = make(pool, prefix=0)
    grant.abandoned(grant.page_ids, [])
    with pytest.raises(GrantFailure) as caught:
        await grant.complete()
    assert caught.value.complete_tokens == 16
    assert pool.available == 8
    pool.check()

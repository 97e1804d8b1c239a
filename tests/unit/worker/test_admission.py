"""Prefills enter the engine in order, a chunk's worth at a time."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from prefill_service.admission import Admission
from prefill_service.early_pins import EarlyPins
from prfaas.transfer.events import AttemptKey


class Prefill:
    """Enters with `tokens` and stays until told to leave."""

    def __init__(self, admission: Admission, tokens: int) -> None:
        self.inside = asyncio.Event()
        self.leave = asyncio.Event()
        self.task = asyncio.create_task(self._run(admission, tokens))

    async def _run(self, admission: Admission, tokens: int) -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(admission.enter(tokens))
            self.inside.set()
            await self.leave.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_short_prefills_share_a_chunk_and_a_long_one_goes_alone() -> None:
    admission = Admission(chunk_tokens=100)
    first, second, long, short = (Prefill(admission, tokens) for tokens in (40, 60, 5000, 10))
    await settle()
    assert first.inside.is_set()
    assert second.inside.is_set()
    assert not long.inside.is_set()
    first.leave.set()
    await settle()
    assert not long.inside.is_set()
    second.leave.set()
    await settle()
    assert long.inside.is_set()
    assert not short.inside.is_set()
    long.leave.set()
    await settle()
    assert short.inside.is_set()
    short.leave.set()
    await asyncio.gather(*(prefill.task for prefill in (first, second, long, short)))


async def test_a_short_prefill_behind_cancelled_long_ones_does_not_wait() -> None:
    admission = Admission(chunk_tokens=100)
    running = Prefill(admission, 50)
    queued = [Prefill(admission, 5000) for _ in range(10)]
    short = Prefill(admission, 10)
    await settle()
    for prefill in queued:
        prefill.task.cancel()
    await settle()
    assert short.inside.is_set()
    for prefill in (running, short):
        prefill.leave.set()
    await asyncio.gather(*(p.task for p in (running, short, *queued)), return_exceptions=True)


def test_early_pins_leave_room_for_the_largest_prompt() -> None:
    pins = EarlyPins(total_pages=10, largest_prompt_pages=6)
    one, two = AttemptKey("one", 1), AttemptKey("two", 1)
    assert pins.take(one, 3)
    assert not pins.take(two, 2)
    assert pins.take(two, 1)
    pins.give_back(one)
    pins.give_back(one)
    assert pins.take(one, 3)


def test_no_early_pins_where_the_pool_is_smaller_than_the_largest_prompt() -> None:
    assert not EarlyPins(total_pages=4, largest_prompt_pages=6).take(AttemptKey("one", 1), 1)

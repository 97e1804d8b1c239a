"""A grant at the prefill worker, over a real page pool and a scripted engine and sender."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from prefill_service.admission import Admission
from prefill_service.early_pins import EarlyPins
from prefill_service.grant import PrefillGrant
from prfaas.engine.interface import SequenceEvent, SequenceRequest
from prfaas.kv.pool import PagePool
from prfaas.protocol.messages import Grant, GrantFailed, PeerMessage
from prfaas.transfer.events import AttemptKey, SendCancelled, SendStats
from prfaas.worker.page_queue import PageQueue

PAGE = 4
STATS = SendStats(kv_bytes=0, transfer_s=0.0, tail_s=0.0, first_post_s=0.0)
GRANT = Grant(
    request_id="r",
    attempt=1,
    token_ids=list(range(10)),
    first_page=0,
    page_ids=[0, 1, 2],
    lease_s=3.0,
    deadline_s=60.0,
)


class Engine:
    """Takes one sequence; the test says what becomes of it."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.request: SequenceRequest | None = None
        self.submitted = asyncio.Event()
        self.tell: Callable[[SequenceEvent], None] = lambda event: None

    def submit(self, request: SequenceRequest, on_event: Callable[[SequenceEvent], None]) -> None:
        self.request, self.tell = request, on_event
        self.submitted.set()

    def cancel(self, sequence_id: str) -> None:
        """Unknown ids are ignored, and the sequence has ended whenever the tests come here."""

    def fail(self, error: str) -> None:
        assert self.request is not None
        self.pool.release(self.request.page_ids)
        self.tell(SequenceEvent(sequence_id=self.request.sequence_id, finish_reason="error", error=error))


class Sender:
    """Records what it is asked; ends attempts on the loop's next round, like the real one."""

    def __init__(self) -> None:
        self.cancelled: list[AttemptKey] = []
        self.ended: list[AttemptKey] = []
        self._on_event: Callable[[Any], None] = lambda event: None

    def begin(self, session: str, key: AttemptKey, first_page: int, pages: Any, on_event: Any) -> None:
        self._on_event = on_event

    def cancel(self, key: AttemptKey) -> None:
        self.cancelled.append(key)
        asyncio.get_running_loop().call_soon(self._on_event, SendCancelled(key, STATS))

    def end(self, key: AttemptKey) -> None:
        self.ended.append(key)


class Rig:
    """One started grant."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.engine, self.sender = Engine(self.pool), Sender()
        self.posted: list[PeerMessage] = []
        self.over = asyncio.Event()
        counter = SimpleNamespace(labels=lambda *_: SimpleNamespace(inc=lambda: None))
        host = SimpleNamespace(
            pool=self.pool,
            engine=self.engine,
            sender=self.sender,
            chunk_watchers={},
            metrics=SimpleNamespace(transfer_failures=counter),
        )
        self.grant = PrefillGrant(
            cast("Any", host), Admission(64), PageQueue(self.pool), EarlyPins(8, 4), "session", GRANT,
            self.posted.append, lambda _: self.over.set(),
        )  # fmt: skip
        self.grant.start()


async def test_a_failed_chunk_s_writes_are_dropped_before_the_engine_can_take_another_step() -> None:
    """The next step moves the layer counter, which would pass them for computed."""
    rig = Rig(PagePool(8, PAGE))
    await asyncio.wait_for(rig.engine.submitted.wait(), 5)
    rig.engine.fail("step failed")
    assert rig.sender.cancelled == [rig.grant.key]
    await asyncio.wait_for(rig.over.wait(), 5)
    last = rig.posted[-1]
    assert isinstance(last, GrantFailed)
    assert (last.reason, last.message) == ("engine_failed", "step failed")
    assert rig.sender.ended == []
    assert rig.pool.available == 8
    rig.pool.check()


async def test_a_grant_cancelled_while_it_waits_for_pages_leaves_none_behind() -> None:
    pool = PagePool(8, PAGE)
    others = pool.allocate(6)
    rig = Rig(pool)
    for _ in range(5):
        await asyncio.sleep(0)
    assert rig.grant.waiting
    rig.grant.cancel("cancelled")
    await asyncio.wait_for(rig.over.wait(), 5)
    assert rig.engine.request is None
    pool.release(others)
    assert pool.available == 8
    pool.check()

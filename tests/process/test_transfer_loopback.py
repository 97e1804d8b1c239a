"""PageSender and PageReceiver over real NIXL on loopback, both ends in this process."""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from prfaas.engine.interface import ChunkPlan
from prfaas.kv.layout import CacheGroup, CompatRecord, KVLayout
from prfaas.kv.shared_buffer import SharedBuffer, SharedLayerCounter
from prfaas.protocol.messages import Hello
from prfaas.transfer.agent import AgentOptions, TransferAgent, TransferError
from prfaas.transfer.checksums import page_checksums
from prfaas.transfer.events import (
    AttemptKey,
    FenceDue,
    ReceiveAbandoned,
    ReceiveComplete,
    ReceiveReleased,
    SendCancelled,
    SendClosed,
    SendFailed,
    SendFinished,
)
from prfaas.transfer.link import DirectLink, EmulatedLink, LinkModel
from prfaas.transfer.receiver import PageReceiver
from prfaas.transfer.sender import PageSender

pytestmark = pytest.mark.process

LAYERS = 4
PAGE_SIZE = 8
OPTIONS = AgentOptions(net_devices="lo")
GROUP = CacheGroup(kind="full", layers=tuple(range(LAYERS)), kv_heads=2, head_dim=64)
LAYOUT = KVLayout(groups=(GROUP,), page_size=PAGE_SIZE, dtype="float32", num_pages=64)
COMPAT = CompatRecord(
    protocol=1,
    weights="w",
    tokenizer="t",
    attention="gqa",
    page_layout="HND",
    page_size=PAGE_SIZE,
    kv_dtype="float32",
    groups=(GROUP,),
)
KEY = AttemptKey("request", 1)


async def until(condition: Callable[[], object], deadline_s: float = 20.0) -> None:
    """Wait for a condition; the deadline only turns a hang into a failure."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, "condition not met in time"
        await asyncio.sleep(0.002)


class Rig:
    """A sending and a receiving worker with one session, and what they were told."""

    def __init__(self, quarantine_s: float = 30.0) -> None:
        loop = asyncio.get_running_loop()
        self.source = SharedBuffer(LAYOUT.pool_bytes)
        self.dest = SharedBuffer(LAYOUT.pool_bytes)
        self.source.array[:] = np.random.default_rng(7).integers(0, 255, LAYOUT.pool_bytes, dtype=np.uint8)
        self.counter = SharedLayerCounter()
        self.sender = PageSender(self.source, LAYOUT, self.counter, loop, options=OPTIONS)
        self.receiver = PageReceiver(self.dest, LAYOUT, loop, quarantine_s=quarantine_s, options=OPTIONS)
        self.sent: list[object] = []
        self.received: list[object] = []
        self.fences: list[FenceDue] = []

    async def open(self, link: LinkModel) -> str:
        session = uuid.uuid4().hex
        hello = Hello(
            session=session,
            worker="decode",
            cluster="pd",
            incarnation="1",
            compat=COMPAT,
            layout=LAYOUT,
            pool_address=self.dest.address,
            agent_metadata=await self.receiver.open(session, self.fences.append),
        )
        self.receiver.connect(session, await self.sender.open(hello, link))
        return session

    def grant(self, session: str, key: AttemptKey, page_ids: list[int], first_page: int = 0) -> None:
        self.receiver.expect(session, key, first_page, page_ids, self.received.append)
        self.sender.begin(session, key, first_page, page_ids, self.sent.append)

    def pages(self, buffer: SharedBuffer, page_ids: list[int]) -> np.ndarray:
        return buffer.array.reshape(LAYERS, LAYOUT.num_pages, -1)[:, page_ids]

    async def close(self) -> None:
        await self.sender.stop()
        await self.receiver.stop()
        self.counter.close()
        self.source.close()
        self.dest.close()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    await rig.close()


def chunk(start: int, end: int, *, before: int = 0, last: bool = True) -> ChunkPlan:
    return ChunkPlan(sequence_id="s", start_token=start, end_token=end, layers_done_before=before, last=last)


async def test_cached_and_computed_pages_arrive_intact_in_the_granted_pages(rig: Rig) -> None:
    session = await rig.open(DirectLink())
    dest, source = [9, 3, 60, 5, 1], [20, 21, 33, 2, 40]
    rig.grant(session, KEY, dest, first_page=2)
    # The prefill worker holds pages 0…3 of the prompt; 0 and 1 are the receiver's already.
    rig.sender.send_cached(KEY, {0: 50, 1: 51, 2: source[0], 3: source[1]})
    rig.sender.announce(KEY, chunk(4 * PAGE_SIZE, 6 * PAGE_SIZE + 3), dict(enumerate([50, 51, *source])))
    rig.sender.end(KEY)
    for _ in range(LAYERS):
        rig.counter.increment()
    await until(lambda: rig.received and rig.sent)
    assert rig.received == [ReceiveComplete(KEY)]
    assert np.array_equal(rig.pages(rig.dest, dest), rig.pages(rig.source, source))
    assert page_checksums(rig.dest.array, LAYOUT, dest) == page_checksums(rig.source.array, LAYOUT, source)
    untouched = [page for page in range(LAYOUT.num_pages) if page not in dest]
    assert not rig.pages(rig.dest, untouched).any()
    (finished,) = rig.sent
    assert isinstance(finished, SendFinished)
    assert finished.stats.kv_bytes == 5 * LAYERS * LAYOUT.page_bytes
    (counters,) = rig.sender.counters()
    assert (counters.cluster, counters.bytes_total, counters.inflight_bytes) == (
        "pd",
        finished.stats.kv_bytes,
        0,
    )
    assert vars(rig.receiver.tag_counts) == {"duplicate": 0, "unknown": 0, "invalid": 0}


async def test_each_layer_arrives_before_the_next_is_computed(rig: Rig) -> None:
    session = await rig.open(DirectLink())
    rig.grant(session, KEY, [0, 1])
    rig.sender.announce(KEY, chunk(0, 2 * PAGE_SIZE), {0: 10, 1: 11})
    rig.sender.end(KEY)
    for layer in range(LAYERS):
        assert not rig.received
        assert not rig.pages(rig.dest, [0, 1])[layer].any()
        rig.counter.increment()
        await until(
            lambda layer=layer: np.array_equal(
                rig.pages(rig.dest, [0, 1])[layer], rig.pages(rig.source, [10, 11])[layer]
            )
        )
    await until(lambda: rig.received and rig.sent)
    assert rig.received == [ReceiveComplete(KEY)]


async def test_pages_filled_over_several_chunks_are_sent_once(rig: Rig) -> None:
    session = await rig.open(DirectLink())
    rig.grant(session, KEY, [0, 1, 2])
    source = {0: 5, 1: 6, 2: 7}
    bounds = [(0, 12), (12, 20), (20, 21)]
    for index, (start, end) in enumerate(bounds):
        rig.sender.announce(KEY, chunk(start, end, before=index * LAYERS, last=index == 2), source)
        for _ in range(LAYERS):
            rig.counter.increment()
    rig.sender.end(KEY)
    await until(lambda: rig.received and rig.sent)
    assert np.array_equal(rig.pages(rig.dest, [0, 1, 2]), rig.pages(rig.source, [5, 6, 7]))
    assert rig.receiver.tag_counts.duplicate == 0


async def test_cancel_ends_after_the_writes_in_flight_and_frees_the_quarantine(rig: Rig) -> None:
    session = await rig.open(DirectLink())
    rig.grant(session, KEY, [0, 1, 2, 3])
    rig.sender.send_cached(KEY, {0: 10})
    rig.sender.announce(KEY, chunk(PAGE_SIZE, 4 * PAGE_SIZE), {1: 11, 2: 12, 3: 13})
    await until(lambda: rig.receiver.progress(KEY) == 1)
    rig.receiver.abandon(KEY)
    assert rig.received == [ReceiveAbandoned(KEY, (0,), (1, 2, 3))]
    assert rig.receiver.quarantined_pages == 3
    rig.sender.cancel(KEY)
    await until(lambda: rig.sent)
    assert isinstance(rig.sent[0], SendCancelled)
    rig.receiver.confirm(KEY)
    assert rig.received[1:] == [ReceiveReleased(KEY, (1, 2, 3))]
    # The chunk runs on in the engine; nothing of it may be sent any more.
    for _ in range(LAYERS):
        rig.counter.increment()
    rig.sender.announce(KEY, chunk(PAGE_SIZE, 4 * PAGE_SIZE), {1: 11, 2: 12, 3: 13})
    rig.grant(session, AttemptKey("other", 1), [9])
    rig.sender.send_cached(AttemptKey("other", 1), {0: 20})
    await until(lambda: ReceiveComplete(AttemptKey("other", 1)) in rig.received)
    assert not rig.pages(rig.dest, [1, 2, 3]).any()
    assert len(rig.sent) == 1


async def test_nothing_lands_after_the_fence_and_the_sender_is_told(rig: Rig, tmp_path: Path) -> None:
    link = EmulatedLink(LAYOUT.page_bytes * 100, 0.1, tmp_path / "link")
    session = await rig.open(link)
    rig.grant(session, KEY, list(range(16)))
    rig.sender.send_cached(KEY, {page: page + 16 for page in range(16)})
    rig.sender.end(KEY)
    await until(lambda: rig.sender.counters()[0].inflight_bytes)
    await rig.receiver.close(session)
    abandoned, released = rig.received
    assert isinstance(abandoned, ReceiveAbandoned)
    assert released == ReceiveReleased(KEY, abandoned.quarantined_pages)
    rig.dest.array[:] = 0  # the pages belong to someone else now
    await until(lambda: rig.sent)
    assert isinstance(rig.sent[0], SendFailed)
    assert not rig.dest.array.any()
    with pytest.raises(TransferError, match="not open"):
        rig.receiver.expect(session, AttemptKey("r", 2), 0, [1], rig.received.append)
    link.close()


async def test_closing_the_sender_ends_every_attempt_of_the_session_once(rig: Rig, tmp_path: Path) -> None:
    slow = EmulatedLink(LAYOUT.page_bytes, 0.05, tmp_path / "link")
    session, other = await rig.open(slow), await rig.open(DirectLink())
    keys = [AttemptKey(f"r{index}", 1) for index in range(3)]
    for index, key in enumerate(keys):
        rig.grant(session, key, [index])
        rig.sender.send_cached(key, {0: index})
        rig.sender.end(key)
    rig.grant(other, KEY, [7])
    await rig.sender.close(session)
    assert [type(event) for event in rig.sent] == [SendClosed] * 3
    assert {event.key for event in rig.sent} == set(keys)
    assert rig.sender.counters()[0].inflight_bytes == 0
    with pytest.raises(TransferError, match="not open"):
        rig.sender.begin(session, AttemptKey("late", 1), 0, [1], rig.sent.append)
    # The other session of the same two workers goes on.
    rig.sender.send_cached(KEY, {0: 12})
    await until(lambda: ReceiveComplete(KEY) in rig.received)
    slow.close()


async def test_closing_survives_a_cancelled_caller_and_a_second_call(rig: Rig) -> None:
    session = await rig.open(DirectLink())
    rig.grant(session, KEY, [0])
    for side, events in ((rig.receiver, rig.received), (rig.sender, rig.sent)):
        first = asyncio.ensure_future(side.close(session))
        await asyncio.sleep(0)
        first.cancel()
        await side.close(session)
        assert events
        await side.close(session)
    assert rig.received == [ReceiveAbandoned(KEY, (), (0,)), ReceiveReleased(KEY, (0,))]
    assert [type(event) for event in rig.sent] == [SendClosed]


async def test_a_long_cached_prefix_does_not_hold_up_another_attempt(rig: Rig, tmp_path: Path) -> None:
    link = EmulatedLink(LAYOUT.page_bytes * 200, 0.0, tmp_path / "link")
    session = await rig.open(link)
    rig.grant(session, KEY, list(range(60)))
    rig.sender.send_cached(KEY, {page: page for page in range(60)})
    rig.sender.end(KEY)
    await until(lambda: rig.sender.counters()[0].bytes_total)
    short = AttemptKey("short", 1)
    rig.grant(session, short, [60])
    rig.sender.send_cached(short, {0: 60})
    rig.sender.end(short)
    await until(lambda: len(rig.received) == 2)
    assert rig.received == [ReceiveComplete(short), ReceiveComplete(KEY)]
    link.close()


async def test_source_pages_stay_in_use_until_the_last_write_is_done(rig: Rig, tmp_path: Path) -> None:
    link = EmulatedLink(LAYOUT.page_bytes * 200, 0.2, tmp_path / "link")
    session = await rig.open(link)
    rig.grant(session, KEY, [0])
    rig.sender.send_cached(KEY, {0: 30})
    await until(lambda: rig.sender.counters()[0].inflight_bytes)
    rig.sender.cancel(KEY)
    assert not rig.sent, "the write is in flight: its source page is being read"
    await until(lambda: rig.sent)
    assert isinstance(rig.sent[0], SendCancelled)
    assert rig.sender.counters()[0].inflight_bytes == 0
    link.close()


async def test_pages_that_were_never_computed_fail_the_attempt(rig: Rig) -> None:
    session = await rig.open(DirectLink())
    rig.grant(session, KEY, [0, 1])
    rig.sender.send_cached(KEY, {0: 0})
    rig.sender.end(KEY)
    await until(lambda: rig.sent)
    assert isinstance(rig.sent[0], SendFailed)
    assert "1 granted pages" in rig.sent[0].message


async def test_a_page_handed_over_twice_is_refused(rig: Rig) -> None:
    session = await rig.open(DirectLink())
    rig.grant(session, KEY, [0, 1])
    rig.sender.send_cached(KEY, {0: 0})
    with pytest.raises(ValueError, match="handed over before"):
        rig.sender.send_cached(KEY, {0: 0})
    with pytest.raises(ValueError, match="lies behind the grant"):
        rig.sender.send_cached(KEY, {1: 1, 2: 2})
    with pytest.raises(ValueError, match="without source pages"):
        rig.sender.announce(KEY, chunk(PAGE_SIZE, 2 * PAGE_SIZE), {})


async def test_overdue_quarantine_asks_for_the_fence_which_empties_it() -> None:
    rig = Rig(quarantine_s=0.2)
    try:
        session = await rig.open(DirectLink())
        rig.grant(session, KEY, [0, 1])
        rig.receiver.abandon(KEY)
        await until(lambda: rig.fences)
        assert rig.fences[0].session == session
        await rig.receiver.close(session)
        assert rig.received[-1] == ReceiveReleased(KEY, (0, 1))
        assert rig.receiver.quarantined_pages == 0
        await asyncio.sleep(0.2)
        assert len(rig.fences) == 1
    finally:
        await rig.close()


async def test_tags_of_other_agents_and_garbage_change_nothing(rig: Rig) -> None:
    session = await rig.open(DirectLink())
    rig.receiver.expect(session, KEY, 0, [0], rig.received.append)
    agent = rig.sender._sessions[session].agent
    agent.notify(b"\xff not a tag")
    agent.notify(b"x" * 20_000)
    await until(lambda: rig.receiver.tag_counts.invalid == 2)
    assert rig.received == []


async def test_a_peer_with_other_pages_is_refused_by_name(rig: Rig) -> None:
    session = uuid.uuid4().hex
    metadata = await rig.receiver.open(session, rig.fences.append)
    other = KVLayout(groups=(GROUP,), page_size=2 * PAGE_SIZE, dtype="float32", num_pages=8)
    hello = Hello(
        session=session,
        worker="d",
        cluster="pd",
        incarnation="1",
        compat=COMPAT,
        layout=other,
        pool_address=rig.dest.address,
        agent_metadata=metadata,
    )
    with pytest.raises(TransferError, match="4 layers of 16384-byte pages, ours 4 of 8192"):
        await rig.sender.open(hello, DirectLink())
    far = Hello(
        **{name: getattr(hello, name) for name in hello.__struct_fields__}
        | {"layout": LAYOUT, "pool_address": 64}
    )
    with pytest.raises(TransferError, match="prepare the pools"):
        await rig.sender.open(far, DirectLink())
    junk = Hello(
        **{name: getattr(hello, name) for name in hello.__struct_fields__} | {"agent_metadata": b"junk"}
    )
    with pytest.raises(TransferError, match="load the peer's metadata"):
        await rig.sender.open(junk, DirectLink())


async def test_the_emulated_link_paces_to_its_rate(rig: Rig, tmp_path: Path) -> None:
    pages, seconds = 32, 1.0
    link = EmulatedLink(pages * LAYERS * LAYOUT.page_bytes / seconds, 0.04, tmp_path / "link")
    session = await rig.open(link)
    started_s = time.monotonic()
    rig.grant(session, KEY, list(range(pages)))
    rig.sender.send_cached(KEY, {page: page for page in range(pages)})
    rig.sender.end(KEY)
    await until(lambda: rig.sent and rig.received)
    # Never faster than the link; how much slower depends on the machine.
    assert time.monotonic() - started_s > seconds + link.rtt_s
    assert rig.sent[0].stats.transfer_s > 0.8 * seconds
    assert np.array_equal(rig.pages(rig.dest, list(range(pages))), rig.pages(rig.source, list(range(pages))))
    link.close()


async def test_idle_sessions_cost_under_a_twentieth_of_a_core(rig: Rig) -> None:
    sessions = [await rig.open(DirectLink()) for _ in range(2)]
    for index, session in enumerate(sessions):
        key = AttemptKey(f"r{index}", 1)
        rig.grant(session, key, [index])
        rig.sender.send_cached(key, {0: index})
        rig.sender.end(key)
    await until(lambda: len(rig.received) == 2 and len(rig.sent) == 2)
    await asyncio.sleep(0.3)
    before, started_s = time.process_time(), time.monotonic()
    await asyncio.sleep(3.0)
    used = (time.process_time() - before) / (time.monotonic() - started_s)
    assert used < 0.05


async def test_agents_are_destroyed_twice_safely_and_leave_nothing_behind() -> None:
    def made_and_destroyed() -> None:
        agent = TransferAgent(uuid.uuid4().hex, LAYOUT, buffer.address, OPTIONS)
        agent.destroy()
        agent.destroy()
        with pytest.raises(TransferError, match="is destroyed"):
            agent.notifications()

    buffer = SharedBuffer(LAYOUT.pool_bytes)
    made_and_destroyed()
    threads, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        made_and_destroyed()
    assert len(os.listdir("/proc/self/task")) == threads
    assert len(os.listdir("/proc/self/fd")) == files
    buffer.close()

"""What the transfer layer does when the peer process is stopped or killed in the middle of a transfer."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import transfer_peer as peer

from prfaas.kv.shared_buffer import SharedBuffer, SharedLayerCounter
from prfaas.protocol.messages import Hello
from prfaas.transfer.events import ReceiveAbandoned, ReceiveReleased, SendClosed, SendFailed
from prfaas.transfer.link import DirectLink
from prfaas.transfer.receiver import PageReceiver
from prfaas.transfer.sender import PageSender

pytestmark = pytest.mark.process

DEADLINE_S = 30.0
ALL = peer.LAYOUT.num_pages


class Child:
    """The peer process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")

    async def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return dict(json.loads(await asyncio.wait_for(self.process.stdout.readline(), DEADLINE_S)))

    async def ask(self, **command: Any) -> dict[str, Any]:
        self.tell(**command)
        return await self.hear()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@pytest.fixture
async def child() -> AsyncIterator[Child]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(peer.__file__)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        limit=2**20,
    )
    yield Child(process)
    if process.returncode is None:
        process.kill()
    await process.wait()


@pytest.fixture
def pool() -> SharedBuffer:
    return SharedBuffer(peer.LAYOUT.pool_bytes)


async def until(condition: Any) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, "condition not met in time"
        await asyncio.sleep(0.002)


async def receiving_from(child: Child, pool: SharedBuffer, events: list[Any]) -> tuple[PageReceiver, str]:
    """A receiver here that expects the whole pool from the child."""
    loop = asyncio.get_running_loop()
    receiver = PageReceiver(pool, peer.LAYOUT, loop, quarantine_s=60, options=peer.OPTIONS)
    session = uuid.uuid4().hex
    hello = peer.hello(session, pool.address, await receiver.open(session, events.append))
    welcome = await child.ask(do="open", session=session, hello=peer.encode(hello))
    receiver.connect(session, base64.b64decode(welcome["metadata"]))
    receiver.expect(session, peer.KEY, 0, range(ALL), events.append)
    return receiver, session


async def sending_to(child: Child, pool: SharedBuffer, events: list[Any]) -> tuple[PageSender, str]:
    """A sender here that has begun to send the whole pool to the child."""
    loop = asyncio.get_running_loop()
    sender = PageSender(pool, peer.LAYOUT, SharedLayerCounter(), loop, options=peer.OPTIONS)
    session = uuid.uuid4().hex
    answer = await child.ask(do="hello", session=session)
    hello = msgspec.msgpack.decode(base64.b64decode(answer["hello"]), type=Hello)
    metadata = base64.b64encode(await sender.open(hello, DirectLink())).decode()
    await child.ask(do="connect", session=session, metadata=metadata, pages=ALL)
    sender.begin(session, peer.KEY, 0, range(ALL), events.append)
    return sender, session


def send_everything(sender: PageSender) -> None:
    sender.send_cached(peer.KEY, {page: page for page in range(ALL)})
    sender.end(peer.KEY)


async def test_a_stopped_sender_that_wakes_after_the_fence_writes_nothing(
    child: Child, pool: SharedBuffer
) -> None:
    events: list[Any] = []
    receiver, session = await receiving_from(child, pool, events)
    child.tell(do="send", session=session, pages=ALL)
    await until(lambda: pool.array.any())
    child.signal(signal.SIGSTOP)
    assert not events, "the transfer was over before the sender could be stopped"
    await receiver.close(session)
    assert [type(event) for event in events] == [ReceiveAbandoned, ReceiveReleased]
    pool.array[:] = 0  # the pages are another request's now
    child.signal(signal.SIGCONT)
    assert await child.hear() == {"event": "SendFailed"}
    assert not pool.array.any()
    await receiver.stop()


async def test_a_killed_sender_leaves_quarantine_that_the_fence_releases(
    child: Child, pool: SharedBuffer
) -> None:
    events: list[Any] = []
    receiver, session = await receiving_from(child, pool, events)
    child.tell(do="send", session=session, pages=ALL)
    await until(lambda: pool.array.any())
    child.signal(signal.SIGKILL)
    await child.process.wait()
    receiver.abandon(peer.KEY)
    abandoned = events[0]
    assert isinstance(abandoned, ReceiveAbandoned)
    assert receiver.quarantined_pages == len(abandoned.quarantined_pages) > 0
    complete = list(abandoned.complete_pages)
    layers = pool.array.reshape(peer.LAYOUT.num_layers, ALL, -1)
    assert (layers[:, complete] == peer.FILL).all(), "a page called complete is not"
    await receiver.close(session)
    assert events[1:] == [ReceiveReleased(peer.KEY, abandoned.quarantined_pages)]
    assert receiver.quarantined_pages == 0
    await receiver.stop()


async def test_a_killed_receiver_fails_the_attempt(child: Child, pool: SharedBuffer) -> None:
    events: list[Any] = []
    sender, session = await sending_to(child, pool, events)
    send_everything(sender)
    await until(lambda: sender.counters()[0].inflight_bytes)
    child.signal(signal.SIGKILL)
    await child.process.wait()
    await until(lambda: events)
    assert isinstance(events[0], SendFailed)
    assert sender.counters()[0].inflight_bytes == 0
    assert sender.counters()[0].errors_total > 0
    await sender.close(session)
    assert len(events) == 1
    await sender.stop()


async def test_source_pages_are_held_for_a_stopped_receiver_until_the_session_is_closed(
    child: Child, pool: SharedBuffer
) -> None:
    events: list[Any] = []
    sender, session = await sending_to(child, pool, events)
    child.signal(signal.SIGSTOP)
    send_everything(sender)
    await until(lambda: sender.counters()[0].inflight_bytes)
    sender.cancel(peer.KEY)
    await asyncio.sleep(0.5)
    assert not events, "a write to a stopped receiver still reads its source page"
    await sender.close(session)
    assert [type(event) for event in events] == [SendClosed]
    # What was sent before may land; what the pages hold from now on may not.
    pool.array[:] = 0xEE
    child.signal(signal.SIGCONT)
    await asyncio.sleep(0.5)
    assert (await child.ask(do="count", session=session, byte=0xEE))["count"] == 0
    assert sender.counters()[0].inflight_bytes == 0
    await sender.stop()

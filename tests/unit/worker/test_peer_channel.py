"""The peer session's control channel: order, delay, heartbeats, silence, clean ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import msgspec
import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from prfaas.protocol.messages import Cancel, Heartbeat
from prfaas.worker.peer_channel import ChannelClosed, PeerChannel


class Pair:
    """Both ends of a channel over a real socket."""

    def __init__(self, near: PeerChannel, far: PeerChannel, raw: web.WebSocketResponse) -> None:
        self.near = near
        self.far = far
        self.raw = raw
        """The far end's WebSocket."""


@contextlib.asynccontextmanager
async def connected(
    *, heartbeat_s: float = 0.05, silence_s: float = 5.0, delay_s: float = 0.0
) -> AsyncIterator[Pair]:
    loop = asyncio.get_running_loop()
    far: asyncio.Future[tuple[PeerChannel, web.WebSocketResponse]] = loop.create_future()
    done = asyncio.Event()

    async def serve(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(timeout=0.2)
        await socket.prepare(request)
        channel = PeerChannel(socket, heartbeat_s=heartbeat_s, silence_s=silence_s, delay_s=delay_s)
        far.set_result((channel, socket))
        await done.wait()
        await channel.close()
        return socket

    app = web.Application()
    app.router.add_get("/", serve)
    async with TestServer(app) as server, ClientSession() as session:
        socket = await session.ws_connect(server.make_url("/"))
        near = PeerChannel(socket, heartbeat_s=heartbeat_s, silence_s=silence_s, delay_s=delay_s)
        channel, raw = await far
        try:
            yield Pair(near, channel, raw)
        finally:
            await near.close()
            done.set()


def cancel(number: int) -> Cancel:
    return Cancel(request_id="request", attempt=number)


async def test_messages_arrive_in_order_and_heartbeats_are_not_handed_over() -> None:
    async with connected(heartbeat_s=0.01) as pair:
        for number in range(50):
            pair.near.post(cancel(number))
            await asyncio.sleep(0.002)
        received = [await asyncio.wait_for(pair.far.receive(), 5) for _ in range(50)]
        assert received == [cancel(number) for number in range(50)]


async def test_an_emulated_link_holds_messages_back_in_order_and_shows_in_the_round_trip() -> None:
    async with connected(heartbeat_s=0.02, delay_s=0.05) as pair:
        sent_s = time.monotonic()
        for number in range(5):
            pair.near.post(cancel(number))
        pumping = asyncio.create_task(_drain(pair.near))
        assert [await pair.far.receive() for _ in range(5)] == [cancel(number) for number in range(5)]
        assert time.monotonic() - sent_s >= 0.05
        pumping_far = asyncio.create_task(_drain(pair.far))
        async with asyncio.timeout(10):
            while pair.near.rtt_s == 0:  # noqa: ASYNC110 - nothing signals a measurement
                await asyncio.sleep(0.02)
        assert pair.near.rtt_s >= 0.1
        for task in (pumping, pumping_far):
            task.cancel()
        await asyncio.gather(pumping, pumping_far, return_exceptions=True)


async def test_a_peer_that_sends_nothing_is_silent_after_the_bound() -> None:
    async with connected(heartbeat_s=0.02, silence_s=0.1) as pair:
        pair.far._tasks[1].cancel()  # its heartbeats stop, its socket stays open
        with pytest.raises(ChannelClosed, match="nothing heard for"):
            await asyncio.wait_for(_drain(pair.near), 10)


async def test_a_stall_of_our_own_loop_loses_nobody() -> None:
    async with connected(heartbeat_s=0.02, silence_s=0.1) as pair:
        for _ in range(3):
            time.sleep(0.4)  # noqa: ASYNC251 - the stall under test
            await asyncio.sleep(0.05)
        assert pair.near.closed_reason is None
        pair.near.post(cancel(1))
        assert await asyncio.wait_for(pair.far.receive(), 5) == cancel(1)


async def test_what_was_posted_before_a_close_still_arrives_and_then_the_end() -> None:
    async with connected() as pair:
        pair.near.post(cancel(1))
        await pair.near.close("done")
        assert await asyncio.wait_for(pair.far.receive(), 5) == cancel(1)
        for _ in range(2):
            with pytest.raises(ChannelClosed, match="closed"):
                await asyncio.wait_for(pair.far.receive(), 5)


@pytest.mark.parametrize(
    "garbage", [b"\x93\x01\x02\x03", b"", msgspec.msgpack.encode({"type": "unheard-of"})]
)
async def test_garbage_ends_the_channel_with_a_protocol_error(garbage: bytes) -> None:
    async with connected() as pair:
        await pair.raw.send_bytes(garbage)
        with pytest.raises(ChannelClosed, match="protocol error"):
            await asyncio.wait_for(pair.near.receive(), 5)


async def test_a_text_frame_ends_the_channel() -> None:
    async with connected() as pair:
        await pair.raw.send_str("hello")
        with pytest.raises(ChannelClosed, match="protocol error"):
            await asyncio.wait_for(pair.near.receive(), 5)


async def test_a_forged_echo_does_not_measure_a_round_trip() -> None:
    async with connected(heartbeat_s=10) as pair:
        await pair.raw.send_bytes(msgspec.msgpack.encode(Heartbeat(sequence=1, echo=99)))
        pair.far.post(cancel(1))
        await asyncio.wait_for(pair.near.receive(), 5)
        assert pair.near.rtt_s == 0.0


async def _drain(channel: PeerChannel) -> None:
    while True:
        await channel.receive()

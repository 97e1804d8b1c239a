"""The control channel of one peer session: a WebSocket with heartbeats, silence detection and link delay.

Both ends use this class. Sending never blocks (`post`), receiving hands messages over in order, each held
back by the emulated link's one-way delay. A channel ends once, with a reason, whatever ended it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable

import msgspec
from aiohttp import ClientWebSocketResponse, WSMsgType, web

from prfaas.errors import PrfaasError
from prfaas.protocol.messages import MAX_FRAME_BYTES, Heartbeat, PeerMessage

_LOG = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 0.3
"""How long `close` waits for the other side; a dead one never answers."""
_OUTBOX_LIMIT = 10_000
"""Messages waiting to be sent; more means that the peer has stopped reading."""
_RTT_WINDOW = 40
"""Round trips remembered: at the default heartbeat, the last ten seconds."""

_CLOSE_MESSAGE_BYTES = 120
"""A close frame holds 123 at most."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)

WebSocket = ClientWebSocketResponse | web.WebSocketResponse


class ChannelClosed(PrfaasError):
    """The channel has ended; the message says why."""


class PeerChannel:
    """One end of a peer session's control channel. Belongs to one event loop.

    Args:
        socket: an open WebSocket.
        heartbeat_s: interval of our heartbeats; the other side's is taken to be the same.
        silence_s: nothing heard for this long ends the channel.
        delay_s: one-way delay of an emulated link; each received message is held back by it.
    """

    def __init__(
        self, socket: WebSocket, *, heartbeat_s: float, silence_s: float, delay_s: float = 0.0
    ) -> None:
        self.delay_s = delay_s
        self.on_tick: Callable[[], None] = lambda: None
        """Called every heartbeat: the session's own timers (leases, quarantine) hang on it."""
        self.on_heartbeat: Callable[[], None] = lambda: None
        """Called for each heartbeat received."""
        self.closed_reason: str | None = None
        self._socket = socket
        self._heartbeat_s = heartbeat_s
        self._silent_ticks = max(2, math.ceil(silence_s / heartbeat_s))
        self._ticks_unheard = 0
        self._inbox: asyncio.Queue[tuple[float, PeerMessage] | None] = asyncio.Queue()
        self._outbox: asyncio.Queue[PeerMessage | None] = asyncio.Queue()
        self._sequence = 0
        self._sent_at: dict[int, float] = {}
        self._heard_sequence = -1
        self._heard_at = 0.0
        self._round_trips: deque[float] = deque(maxlen=_RTT_WINDOW)
        self._tasks = [
            asyncio.create_task(self._read(), name="peer-read"),
            asyncio.create_task(self._beat(), name="peer-beat"),
        ]
        self._writer = asyncio.create_task(self._write(), name="peer-write")

    @property
    def rtt_s(self) -> float:
        """Smallest round trip of the last heartbeats, emulated delay included; 0 = none measured yet."""
        return min(self._round_trips, default=0.0)

    def post(self, message: PeerMessage) -> None:
        """Queue a message; dropped if the channel has ended (whoever waits for an answer learns that too)."""
        if self.closed_reason is not None:
            return
        if self._outbox.qsize() >= _OUTBOX_LIMIT:
            self.end("the peer does not read what is sent")
            return
        self._outbox.put_nowait(message)

    async def receive(self) -> PeerMessage:
        """The next message that is not a heartbeat. One receiver at a time.

        Raises:
            ChannelClosed: no message will follow.
        """
        while True:
            item = await self._inbox.get()
            if item is None:
                self._inbox.put_nowait(None)
                raise ChannelClosed(self.closed_reason or "closed")
            due_s, message = item
            while (wait_s := due_s - time.monotonic()) > 0:  # noqa: ASYNC110 - coarse timers wake early
                await asyncio.sleep(wait_s)
            if not isinstance(message, Heartbeat):
                return message
            self._heartbeat_received(message)

    def end(self, reason: str) -> None:
        """Mark the channel as ended; `receive` raises after the messages that had already arrived."""
        if self.closed_reason is None:
            self.closed_reason = reason
            self._inbox.put_nowait(None)
            self._outbox.put_nowait(None)

    async def close(self, reason: str = "closed here") -> None:
        """End the channel, send what is queued if the peer still reads, close the socket. Idempotent."""
        self.end(reason)
        tasks = [*self._tasks, self._writer]
        try:
            await asyncio.wait([self._writer], timeout=CLOSE_TIMEOUT_S)
        finally:
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(TimeoutError, ConnectionError, RuntimeError):
            message = reason.encode()[:_CLOSE_MESSAGE_BYTES]
            await asyncio.wait_for(self._socket.close(message=message), CLOSE_TIMEOUT_S)

    async def _read(self) -> None:
        reason = "the connection was closed"
        try:
            while True:
                frame = await self._socket.receive()
                if frame.type is not WSMsgType.BINARY:
                    if frame.type is WSMsgType.ERROR or frame.type is WSMsgType.TEXT:
                        reason = f"protocol error: {frame.data!r:.200}"
                    elif frame.type is WSMsgType.CLOSE and frame.extra:
                        reason = f"closed by the peer: {frame.extra}"
                    return
                self._ticks_unheard = 0
                self._inbox.put_nowait((time.monotonic() + self.delay_s, _DECODER.decode(frame.data)))
        except (ConnectionError, RuntimeError) as error:
            reason = f"the connection broke: {error}"
        except msgspec.DecodeError as error:
            reason = f"protocol error: {error}"
        finally:
            self.end(reason)

    async def _write(self) -> None:
        try:
            while (message := await self._outbox.get()) is not None:
                data = _ENCODER.encode(message)
                if len(data) > MAX_FRAME_BYTES:
                    self.end(f"a message of {len(data)} bytes is over the bound of {MAX_FRAME_BYTES}")
                    return
                await self._socket.send_bytes(data)
        except (ConnectionError, RuntimeError) as error:
            self.end(f"the connection broke: {error}")
        except Exception as error:
            _LOG.exception("a peer message could not be sent")
            self.end(f"cannot send: {error!r}")

    async def _beat(self) -> None:
        """Send heartbeats and count ticks without news.

        Silence is counted in our own ticks, not in seconds: a stall of this loop is one tick, and what
        arrived meanwhile is read before the next, so our own pause never makes a living peer look lost.
        """
        while True:
            await asyncio.sleep(self._heartbeat_s)
            self._ticks_unheard += 1
            if self._ticks_unheard > self._silent_ticks:
                self.end(f"nothing heard for {self._silent_ticks * self._heartbeat_s:.2f} s")
                return
            self.post(self._heartbeat())
            try:
                self.on_tick()
            except Exception as error:
                # Without ticks neither silence nor expired leases would be noticed: better no session.
                _LOG.exception("a peer session's timers failed")
                self.end(f"its timers failed: {error!r}")
                return

    def _heartbeat(self) -> Heartbeat:
        now_s = time.monotonic()
        self._sequence += 1
        self._sent_at[self._sequence] = now_s
        self._sent_at.pop(self._sequence - 4 * _RTT_WINDOW, None)
        heard, self._heard_sequence = self._heard_sequence, -1
        delay_s = now_s - self._heard_at if heard >= 0 else 0.0
        return Heartbeat(sequence=self._sequence, echo=heard, echo_delay_s=delay_s)

    def _heartbeat_received(self, message: Heartbeat) -> None:
        now_s = time.monotonic()
        self._heard_sequence, self._heard_at = message.sequence, now_s
        sent_s = self._sent_at.pop(message.echo, None)
        if sent_s is not None:
            self._round_trips.append(max(now_s - sent_s - message.echo_delay_s, 0.0))
        self.on_heartbeat()

"""One event stream per worker: what the scheduler believes of the fleet comes from here.

A worker is lost when nothing was heard of it for `timeouts.silence`, when nobody listens at its address
any more, or when another incarnation answers there. A stream that merely breaks is opened again first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
from aiohttp import ClientConnectorError, ClientError, ClientSession, ClientTimeout

from prfaas.config import TimeoutsConfig
from prfaas.protocol.messages import KVEvent, KVSnapshot, WorkerEvent, WorkerInfo, WorkerStatus
from router.ndjson import FrameTooLong, LineReader

logger = logging.getLogger(__name__)
_events: msgspec.json.Decoder[WorkerEvent] = msgspec.json.Decoder(WorkerEvent)
_infos = msgspec.json.Decoder(WorkerInfo)
_NO_TIMEOUT = ClientTimeout(total=None)
_LAST_LOOK_S = 0.02
MAX_SNAPSHOT_BYTES = 256 * 2**20
"""A snapshot holds every cached block of a worker: some 20 bytes each."""


class StreamBroken(Exception):
    """The event stream ended, or what came over it cannot be used; the message says why."""


class SequenceGap(StreamBroken):
    """KV events were missed: a new snapshot is needed."""


class Listener:
    """What a subscription reports; the gateway's fleet implements it."""

    def joined(self, info: WorkerInfo) -> None:
        """A worker, or another incarnation of it, is there."""
        raise NotImplementedError

    def status(self, status: WorkerStatus) -> None:
        raise NotImplementedError

    def kv(self, worker: str, event: KVEvent) -> None:
        raise NotImplementedError

    def gap(self, worker: str) -> None:
        """KV events were missed; a snapshot follows."""
        raise NotImplementedError

    def lost(self, worker: str, why: str) -> None:
        raise NotImplementedError


class Subscription:
    """Follows one worker for as long as the gateway lives."""

    def __init__(
        self,
        worker: str,
        url: str,
        session: ClientSession,
        timeouts: TimeoutsConfig,
        listener: Listener,
        now: Callable[[], float],
    ) -> None:
        self._worker = worker
        self._url = url
        self._session = session
        self._timeouts = timeouts
        self._listener = listener
        self._now = now
        self._heard_s = 0.0
        self._info: WorkerInfo | None = None
        self._kv_position: tuple[str, int] | None = None

    async def run(self) -> None:
        """Connect, follow, reconnect; ends only by cancellation."""
        while True:
            try:
                await self._follow()
            except SequenceGap as gap:
                logger.warning("event=kv_events_missed worker=%s why=%s", self._worker, gap)
                self._listener.gap(self._worker)
            except (ClientError, OSError, TimeoutError, StreamBroken) as error:
                self._judge(error)
            except (msgspec.DecodeError, UnicodeDecodeError, FrameTooLong) as error:
                logger.warning("event=bad_worker_event worker=%s error=%s", self._worker, error)
                self._judge(error)
            except Exception as error:
                # A defect met by one event must not blind us to this worker for good.
                logger.exception("event=subscription_defect worker=%s", self._worker)
                self._judge(error)
            await asyncio.sleep(self._timeouts.heartbeat)

    def _judge(self, error: Exception) -> None:
        """Lost, or only a broken stream?"""
        silent = self._now() - self._heard_s >= self._timeouts.silence
        refused = isinstance(error, ClientConnectorError) and isinstance(
            error.os_error, ConnectionRefusedError
        )
        if self._info is not None and (silent or refused):
            self._lose("nobody listens at its address" if refused else f"silent: {error or 'no event'}")

    def _lose(self, why: str) -> None:
        self._info = None
        self._listener.lost(self._worker, why)

    def _patience_s(self) -> float:
        """How long the next event, or answer, may take."""
        if self._info is None:
            return float(self._timeouts.connect)
        return max(0.0, self._heard_s + self._timeouts.silence - self._now())

    async def _follow(self) -> None:
        """One connection's life."""
        async with asyncio.timeout(self._patience_s()):
            info = await self._fetch_info()
            response = await self._session.get(f"{self._url}/v1/events", timeout=_NO_TIMEOUT)
        try:
            if response.status != 200:
                raise StreamBroken(f"/v1/events answered {response.status}")
            self._heard_s = self._now()
            self._join(info)
            self._kv_position = None
            reader = LineReader(response.content, MAX_SNAPSHOT_BYTES)
            while True:
                line = await self._next_line(reader)
                if line is None:
                    raise StreamBroken("the event stream ended")
                self._heard_s = self._now()
                self._hear(_events.decode(line))
        finally:
            response.close()

    async def _next_line(self, reader: LineReader) -> bytes | None:
        try:
            async with asyncio.timeout(self._patience_s()):
                return await reader.next()
        except TimeoutError:
            # A stall of our own loop lets timers fire too. What the worker said meanwhile has been received
            # by now: it is silent only if there is nothing.
            async with asyncio.timeout(_LAST_LOOK_S):
                return await reader.next()

    async def _fetch_info(self) -> WorkerInfo:
        async with self._session.get(f"{self._url}/v1/info", timeout=_NO_TIMEOUT) as response:
            body = await response.read()
        if response.status != 200:
            raise StreamBroken(f"/v1/info answered {response.status}: {body[:200]!r}")
        info = _infos.decode(body)
        if info.worker != self._worker:
            raise StreamBroken(f"{self._url} is worker `{info.worker}`, not `{self._worker}`")
        return info

    def _join(self, info: WorkerInfo) -> None:
        if self._info is not None and self._info.incarnation == info.incarnation:
            return
        if self._info is not None:
            self._lose("another incarnation answers at its address")
        self._info = info
        self._listener.joined(info)

    def _hear(self, event: WorkerEvent) -> None:
        if isinstance(event, WorkerStatus):
            if self._info is None or event.incarnation != self._info.incarnation:
                raise StreamBroken(f"status of another incarnation, {event.incarnation}")
            self._listener.status(event)
            return
        self._check_sequence(event)
        self._listener.kv(self._worker, event)

    def _check_sequence(self, event: KVEvent) -> None:
        if not isinstance(event, KVSnapshot):
            if self._kv_position is None:
                raise SequenceGap("a delta came before the snapshot")
            generation, sequence = self._kv_position
            if (event.generation, event.sequence) != (generation, sequence + 1):
                raise SequenceGap(f"{event.generation}:{event.sequence} after {generation}:{sequence}")
        self._kv_position = (event.generation, event.sequence)

"""The decode side of one peer session: grants over a control channel, pages over one NIXL receive agent.

The session is the fence unit. However it ends (cut, silent, refused, fence due, shut down), its receive agent
is destroyed; only then do the pages that a late write might have reached leave quarantine.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable

import aiohttp

from decode_service.grants import GrantFailure, LiveGrant
from prfaas.protocol.messages import (
    FAILURE_REASONS,
    MAX_FRAME_BYTES,
    Cancel,
    Grant,
    GrantAccepted,
    GrantFailed,
    GrantFinished,
    GrantProgress,
    Hello,
    PeerMessage,
    PrefillSite,
    Refused,
    Welcome,
)
from prfaas.transfer.agent import TransferError
from prfaas.transfer.events import (
    AttemptKey,
    FenceDue,
    ReceiveAbandoned,
    ReceiveComplete,
    ReceiveEvent,
    ReceiveReleased,
)
from prfaas.worker.host import WorkerHost
from prfaas.worker.peer_channel import CLOSE_TIMEOUT_S, ChannelClosed, PeerChannel

_LOG = logging.getLogger(__name__)


class PrefillSession:
    """One incarnation of the connection to one prefill worker; starts connecting at once.

    Args:
        on_end: called when the session can take no further grants (its fence may still be under way).
    """

    def __init__(
        self,
        host: WorkerHost,
        http: aiohttp.ClientSession,
        site: PrefillSite,
        on_end: Callable[[PrefillSession], None],
    ) -> None:
        self.site = site
        self.name = f"{host.name}-{site.worker}-{secrets.token_hex(6)}"
        self.ended = False
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set when grants may be sent; holds a `GrantFailure` where the session could not be made."""
        self.opened.add_done_callback(_retrieve)
        self._host = host
        self._http = http
        self._on_end = on_end
        self._channel: PeerChannel | None = None
        self._grants: dict[AttemptKey, LiveGrant] = {}
        self._why = ""
        self._task = asyncio.create_task(self._run(), name=f"session-{self.name}")
        self._task.add_done_callback(lambda _: self._over())

    @property
    def live_grants(self) -> int:
        """Grants that still bind pages or wait for the other side's last word."""
        return len(self._grants)

    def on_done(self, callback: Callable[[PrefillSession], object]) -> None:
        """Call back when the session is over, its fence included."""
        self._task.add_done_callback(lambda _: callback(self))

    @property
    def rtt_s(self) -> float:
        """Smallest recent round trip on the control channel; 0 = not measured."""
        return self._channel.rtt_s if self._channel is not None else 0.0

    # ------------------------------------------------------------ grants

    def grant(self, live: LiveGrant, grant: Grant) -> None:
        """Post a grant; `live` owns the destination pages from here on.

        Raises:
            GrantFailure: the session has ended; the pages are still the caller's.
        """
        if self.ended or self._channel is None:
            raise self._lost()
        receiver = self._host.receiver
        try:
            receiver.expect(self.name, live.key, live.first_page, live.page_ids, self._receive_handler(live))
        except TransferError as error:
            raise self._lost(str(error)) from error
        live.bind(self)
        self._grants[live.key] = live
        self._channel.post(grant)

    def abandon(self, live: LiveGrant, reason: str, message: str) -> None:
        """Give an incomplete grant up: pages go to quarantine, the prefill worker stops."""
        if live.key not in self._grants:
            return
        live.fail_with(reason, message)
        if self._channel is not None:
            self._channel.post(Cancel(request_id=live.key.request_id, attempt=live.key.attempt))
        self._host.receiver.abandon(live.key)

    def _receive_handler(self, live: LiveGrant) -> Callable[[ReceiveEvent], None]:
        def on_event(event: ReceiveEvent) -> None:
            match event:
                case ReceiveComplete():
                    live.completed()
                case ReceiveAbandoned(complete_pages=complete, quarantined_pages=quarantined):
                    live.fail_with("peer_lost", self._why or "the session ended")
                    live.abandoned(list(complete), list(quarantined))
                case ReceiveReleased(page_ids=page_ids):
                    self._host.pool.unquarantine(list(page_ids))
                    self._grants.pop(live.key, None)

        return on_event

    # ------------------------------------------------------------ life

    def end(self, why: str) -> None:
        """End the session; returns at once. Live grants fail, the fence follows."""
        if not self._why:
            self._why = why
        if self._channel is not None:
            self._channel.end(why)
        elif not self.ended:
            self._task.cancel()

    async def close(self, why: str) -> None:
        """End the session and wait for the fence."""
        self.end(why)
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            await self._connect()
            self.opened.set_result(None)
            await self._pump()
        except GrantFailure as failure:
            self._why = self._why or failure.message
            if not self.opened.done():
                self.opened.set_exception(failure)
        except (ChannelClosed, TransferError) as error:
            self._why = self._why or str(error)
        finally:
            await self._finish()

    async def _connect(self) -> None:
        """Open the agent, the WebSocket and shake hands."""
        metadata = await self._open_agent()
        timeouts = self._host.config.timeouts
        try:
            async with asyncio.timeout(timeouts.connect):
                socket = await self._http.ws_connect(
                    f"{self.site.url.rstrip('/')}/v1/peer",
                    headers=self._host.auth_headers,
                    timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_TIMEOUT_S),
                    max_msg_size=MAX_FRAME_BYTES,
                )
        except aiohttp.WSServerHandshakeError as error:
            reason = "draining" if error.status == 503 else "peer_lost"
            raise GrantFailure(
                self.site.worker, reason, f"{self.site.url} answered {error.status}"
            ) from error
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            why = f"cannot reach {self.site.worker} at {self.site.url}: {error or type(error).__name__}"
            raise GrantFailure(self.site.worker, "peer_lost", why) from error
        self._channel = PeerChannel(
            socket,
            heartbeat_s=timeouts.heartbeat,
            silence_s=timeouts.silence,
            delay_s=self._host.control_delay_s(self.site.cluster),
        )
        await self._shake_hands(self._channel, metadata)

    async def _open_agent(self) -> bytes:
        host = self._host
        try:
            async with asyncio.timeout(host.handshake_s):
                return await host.receiver.open(self.name, self._fence_due)
        except TimeoutError as error:
            why = f"NIXL made no receive agent within {host.handshake_s} s"
            raise GrantFailure(host.name, "transfer_failed", why) from error

    async def _shake_hands(self, channel: PeerChannel, metadata: bytes) -> None:
        host = self._host
        channel.post(
            Hello(
                session=self.name,
                worker=host.name,
                cluster=host.cluster,
                incarnation=host.incarnation,
                compat=host.compat,
                layout=host.engine.layout,
                pool_address=host.buffer.address,
                agent_metadata=metadata,
            )
        )
        # Silence ends the wait if the peer dies; the bound is for a peer that lives and never answers.
        try:
            async with asyncio.timeout(host.handshake_s):
                answer = await channel.receive()
        except TimeoutError as error:
            why = f"{self.site.worker} did not answer Hello within {host.handshake_s} s"
            raise GrantFailure(self.site.worker, "peer_lost", why) from error
        match answer:
            case Welcome(agent_metadata=theirs):
                host.receiver.connect(self.name, theirs)
                _LOG.info("session=%s peer=%s opened", self.name, self.site.worker)
            case Refused(reason=reason, fields=fields, message=message):
                host.metrics.peer_refusals.inc()
                differs = "; ".join(f"{name}: theirs {theirs}, ours {ours}" for name, theirs, ours in fields)
                known = reason if reason in FAILURE_REASONS else "incompatible"
                raise GrantFailure(self.site.worker, known, f"{message or 'session refused'} ({differs})")
            case _:
                raise GrantFailure(self.site.worker, "peer_lost", f"protocol error: {type(answer).__name__}")

    async def _pump(self) -> None:
        assert self._channel is not None
        while True:
            self._handle(await self._channel.receive())

    def _handle(self, message: PeerMessage) -> None:
        match message:
            case GrantFinished():
                self._on_finished(message)
            case GrantFailed():
                self._on_failed(message)
            case GrantAccepted(cached_tokens=cached):
                live = self._grants.get(AttemptKey(message.request_id, message.attempt))
                if live is not None:
                    live.site_cached_tokens = cached
            case GrantProgress():
                pass
            case _:
                raise ChannelClosed(f"protocol error: unexpected {type(message).__name__}")

    def _on_finished(self, message: GrantFinished) -> None:
        key = AttemptKey(message.request_id, message.attempt)
        live = self._grants.get(key)
        if live is None:
            return
        live.finished(message)
        self._host.receiver.confirm_finished(key)
        if live.is_complete:
            del self._grants[key]
        else:
            # Every write is done, but its notification may still be under way: give it a bounded time.
            loop = asyncio.get_running_loop()
            loop.call_later(self._host.config.timeouts.silence, self._check_counted, live)

    def _check_counted(self, live: LiveGrant) -> None:
        if self._grants.get(live.key) is not live:
            return
        if live.is_complete:
            del self._grants[live.key]
            return
        live.fail_with("transfer_failed", "the sender finished, but not every page was counted in")
        self._host.receiver.abandon(live.key)
        self._host.receiver.confirm_finished(live.key)

    def _on_failed(self, message: GrantFailed) -> None:
        key = AttemptKey(message.request_id, message.attempt)
        live = self._grants.get(key)
        if live is None:
            return
        live.fail_with(message.reason, message.message)
        self._host.receiver.confirm(key)
        if live.is_complete:
            live.finished(None)
            self._grants.pop(key, None)

    def _fence_due(self, due: FenceDue) -> None:
        self._host.metrics.fences.inc()
        self.end(f"fence: {due.why}")

    async def _finish(self) -> None:
        self.ended = True
        self._on_end(self)
        why = self._why or "closed"
        if not self.opened.done():
            self.opened.set_exception(self._lost())
        _LOG.info(
            "session=%s peer=%s ended why=%r grants=%d", self.name, self.site.worker, why, len(self._grants)
        )
        for live in list(self._grants.values()):
            self.abandon(live, "peer_lost", why)
        try:
            await asyncio.gather(self._close_channel(why), self._host.receiver.close(self.name))
        finally:
            for live in self._grants.values():
                live.finished(None)
            self._grants.clear()

    def _over(self) -> None:
        """Nobody may go on waiting for a session that was ended before it took its first step."""
        if not self.ended:
            self.ended = True
            self._on_end(self)
        if not self.opened.done():
            self.opened.set_exception(self._lost())

    async def _close_channel(self, why: str) -> None:
        if self._channel is not None:
            await self._channel.close(why)

    def _lost(self, why: str = "") -> GrantFailure:
        return GrantFailure(self.site.worker, "peer_lost", why or self._why or "the session has ended")


def _retrieve(future: asyncio.Future[None]) -> None:
    """Mark a failure as seen: nobody may be waiting for this session any more."""
    if not future.cancelled():
        future.exception()

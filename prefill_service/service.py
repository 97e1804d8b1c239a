"""The prefill role: takes peer sessions, computes granted prompts, pushes their KV."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

from aiohttp import web

from prefill_service.admission import Admission
from prefill_service.early_pins import EarlyPins
from prefill_service.grant import PrefillGrant
from prefill_service.session import PeerSession
from prfaas.protocol.messages import MAX_FRAME_BYTES, Grant, LinkCounters
from prfaas.worker.host import WorkerHost
from prfaas.worker.http import Refusal
from prfaas.worker.page_queue import PageQueue
from prfaas.worker.peer_channel import CLOSE_TIMEOUT_S
from prfaas.worker.role import RoleLoad

_LOG = logging.getLogger(__name__)

_LINGER_S = 0.25
"""Covers the pollers on both sides; the round trip is added."""


class PrefillService:
    """Mounted by the worker host for role `prefill`."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._admission = Admission(host.spec.chunk_tokens)
        self._pages = PageQueue(host.pool)
        layout = host.engine.layout
        self._early_pins = EarlyPins(layout.num_pages, layout.pages_for(host.model.context_length))
        self._sessions: dict[PeerSession, asyncio.Task[None]] = {}
        self._ended = asyncio.Event()

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/v1/peer", self._peer)]

    def load(self) -> RoleLoad:
        grants = list(self._grants())
        return RoleLoad(
            waiting=sum(grant.waiting for grant in grants),
            waiting_prefill_tokens=sum(grant.waiting_tokens for grant in grants),
            live=len(grants),
            live_grants=len(grants),
            sessions=len(self._sessions),
        )

    def links(self) -> list[LinkCounters]:
        return self._host.sender.counters()

    def fail_all(self, reason: str, message: str) -> None:
        for grant in list(self._grants()):
            grant.cancel(reason, message)

    async def drain(self) -> None:
        """Wait until every grant is over; the host's state refuses new ones.

        A write is known to be done before its tag has reached the receiver, which counts tags: the sessions
        must live that much longer.
        """
        while any(self._grants()):
            self._ended.clear()
            await self._ended.wait()
        if self._sessions:
            await asyncio.sleep(_LINGER_S + max(session.rtt_s for session in self._sessions))

    async def stop(self) -> None:
        """End every session and wait until its agent is destroyed."""
        for session in self._sessions:
            session.end("the worker is shutting down")
        if self._sessions:
            await asyncio.wait(self._sessions.values())

    def _grants(self) -> Iterator[PrefillGrant]:
        for session in self._sessions:
            yield from session.grants.values()

    async def _peer(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/peer: one peer session, for as long as the WebSocket lives."""
        if not self._host.ready:
            raise Refusal(503, "draining", f"{self._host.name} is {self._host.state}")
        socket = web.WebSocketResponse(
            timeout=CLOSE_TIMEOUT_S, max_msg_size=MAX_FRAME_BYTES, compress=False, autoping=True
        )
        await socket.prepare(request)
        session = PeerSession(self._host, socket, self._make_grant, self._refusal, self._supersede)
        task = asyncio.create_task(session.run(), name="peer-session")
        self._sessions[session] = task
        task.add_done_callback(lambda _: self._session_over(session))
        try:
            # The fence outlives this handler, which ends as soon as the connection does.
            await asyncio.shield(task)
        except asyncio.CancelledError:
            session.end("the connection was lost")
            raise
        return socket

    def _make_grant(self, session: PeerSession, grant: Grant) -> PrefillGrant:
        return PrefillGrant(
            self._host,
            self._admission,
            self._pages,
            self._early_pins,
            session.name,
            grant,
            session.post,
            lambda over: self._grant_over(session, over),
        )

    def _grant_over(self, session: PeerSession, grant: PrefillGrant) -> None:
        session.forget(grant)
        self._ended.set()

    def _session_over(self, session: PeerSession) -> None:
        del self._sessions[session]
        self._ended.set()

    def _refusal(self) -> tuple[str, str] | None:
        if not self._host.ready:
            return "draining", f"{self._host.name} is {self._host.state}"
        limit = self._host.spec.max_queue
        if sum(1 for _ in self._grants()) >= limit:
            return "overloaded", f"{self._host.name} has {limit} grants already"
        return None

    def _supersede(self, session: PeerSession, worker: str) -> None:
        """A decode worker has one session at most: a new one ends what is left of the old."""
        for other in self._sessions:
            if other is not session and other.worker == worker:
                other.end(f"{worker} opened a new session")

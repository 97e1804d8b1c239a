"""Peer sessions of one decode worker: one per prefill worker, opened on demand, reopened after a loss."""

from __future__ import annotations

import asyncio

import aiohttp

from decode_service.session import PrefillSession
from prfaas.protocol.messages import PrefillSite
from prfaas.worker.host import WorkerHost


class DecodeMessenger:
    """Finds or makes the session to a prefill worker."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._http: aiohttp.ClientSession | None = None
        self._sessions: dict[str, PrefillSession] = {}
        self._unfinished: set[PrefillSession] = set()

    async def session(self, site: PrefillSite) -> PrefillSession:
        """The open session to `site`; concurrent callers share one attempt to connect.

        Raises:
            GrantFailure: it cannot be reached, or refused.
        """
        current = self._sessions.get(site.worker)
        if current is not None and current.site.url != site.url:
            current.end(f"{site.worker} moved to {site.url}")
            current = None
        if current is None or current.ended:
            current = PrefillSession(self._host, self._client(), site, self._session_ended)
            self._sessions[site.worker] = current
            self._unfinished.add(current)
            current.on_done(self._unfinished.discard)
        await asyncio.shield(current.opened)
        return current

    @property
    def open_sessions(self) -> int:
        """Sessions that take grants or are still being fenced."""
        return len(self._unfinished)

    @property
    def live_grants(self) -> int:
        return sum(session.live_grants for session in self._unfinished)

    def rtt_s(self) -> dict[str, float]:
        """Smallest recent round trip by prefill worker."""
        return {name: session.rtt_s for name, session in self._sessions.items() if not session.ended}

    async def close(self, why: str) -> None:
        """End every session and wait for the fences."""
        await asyncio.gather(*(session.close(why) for session in self._unfinished))
        if self._http is not None:
            await self._http.close()

    def _client(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._http

    def _session_ended(self, session: PrefillSession) -> None:
        if self._sessions.get(session.site.worker) is session:
            del self._sessions[session.site.worker]

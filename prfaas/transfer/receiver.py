"""Counts arriving KV pages; owns the receive agents, one per session, over the one pool.

One thread polls the agents (which is also what lets data land) and hands tags to the event loop, where the
ledger lives. Polling is fast only while grants are live.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prfaas.kv.layout import KVLayout
from prfaas.transfer.agent import DEFAULT_OPTIONS, AgentOptions, TransferAgent, TransferError, make_agent
from prfaas.transfer.events import AttemptKey, FenceDue, ReceiveAbandoned, ReceiveEvent
from prfaas.transfer.poller import Poller
from prfaas.transfer.receive_ledger import QuarantineLimits, ReceiveAction, ReceiveLedger, TagCounts
from prfaas.transfer.sender import receiver_agent_name, sender_agent_name
from prfaas.transfer.tags import decode_tag

if TYPE_CHECKING:
    from prfaas.kv.shared_buffer import SharedBuffer

logger = logging.getLogger(__name__)

ACTIVE_POLL_S = 0.0005
"""While tags are arriving."""
LIVE_POLL_S = 0.002
"""While grants are live and nothing has arrived for `ACTIVE_S`."""
IDLE_POLL_S = 0.025
ACTIVE_S = 0.1


@dataclass
class _Session:
    agent: TransferAgent
    on_fence_due: Callable[[FenceDue], None]
    broken: bool = False
    """Its agent fails; the fence has been asked for."""


class PageReceiver:
    """All receiving of one worker. Call every method on the event loop; events arrive there, those that a
    call causes itself before it returns."""

    def __init__(
        self,
        buffer: SharedBuffer,
        layout: KVLayout,
        loop: asyncio.AbstractEventLoop,
        *,
        quarantine_s: float,
        options: AgentOptions = DEFAULT_OPTIONS,
    ) -> None:
        """
        Args:
            buffer: the KV pool; `layout.pool_bytes` long at least.
            quarantine_s: pages quarantined longer than this call for their session's fence.
        """
        self._buffer = buffer
        self._layout = layout
        self._loop = loop
        self._options = options
        self._tick_s = quarantine_s / 4
        self._ledger = ReceiveLedger(layout.num_layers, layout.num_pages, QuarantineLimits(quarantine_s))
        self._callbacks: dict[AttemptKey, Callable[[ReceiveEvent], None]] = {}
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}
        self._closing: dict[str, asyncio.Future[None]] = {}
        self._live = 0
        """Live attempts, for the polling thread."""
        self._last_active_s = 0.0
        self._ticker: asyncio.TimerHandle | None = None
        self._poller = Poller("kv-receive-poll", self._poll_step)

    @property
    def tag_counts(self) -> TagCounts:
        """Tags that changed nothing, since the start."""
        return self._ledger.counts

    @property
    def quarantined_pages(self) -> int:
        return self._ledger.quarantined_pages

    # ------------------------------------------------------------ sessions

    async def open(self, session: str, on_fence_due: Callable[[FenceDue], None]) -> bytes:
        """Make the session's receive agent (in a thread, tens of ms); returns its metadata for `Hello`.

        `on_fence_due` is called when the session is to end (quarantine too old or too big, agent broken). The
        messenger then ends the WebSocket and awaits `close(session)`, as for every other end of a session.

        Raises:
            TransferError: no agent can be made here.
            ValueError: the session is open already.
        """
        self._ledger.open(session)
        try:
            name = receiver_agent_name(session)
            address = self._buffer.address
            agent = await make_agent(lambda: TransferAgent(name, self._layout, address, self._options))
        except BaseException:
            self._ledger.fenced(session, time.monotonic())
            raise
        with self._lock:
            self._sessions[session] = _Session(agent, on_fence_due)
        self._poller.wake()
        return agent.metadata

    def connect(self, session: str, metadata: bytes) -> None:
        """Take the sender's metadata from `Welcome`.

        Raises:
            TransferError: the session is not open, or the metadata is not that of this session's sender.
        """
        self._session(session).agent.connect(metadata, sender_agent_name(session))

    async def close(self, session: str) -> None:
        """The fence: destroy the receive agent (in a thread, up to about a second).

        When it returns no write of this session can land, and its attempts have got `ReceiveAbandoned` and
        `ReceiveReleased`. Goes on to its end even if the caller is cancelled; may be called again. Unknown
        sessions are ignored.
        """
        with self._lock:
            found = self._sessions.pop(session, None)
        if found is not None:
            self._closing[session] = asyncio.ensure_future(self._close(session, found.agent))
        if session in self._closing:
            await asyncio.shield(self._closing[session])

    async def _close(self, session: str, agent: TransferAgent) -> None:
        await asyncio.to_thread(agent.destroy)
        del self._closing[session]
        self._apply(self._ledger.fenced(session, time.monotonic()))

    async def stop(self) -> None:
        """Close all sessions and end the thread."""
        for session in [*self._sessions, *self._closing]:
            await self.close(session)
        if self._ticker is not None:
            self._ticker.cancel()
        await asyncio.to_thread(self._poller.stop)

    # ------------------------------------------------------------ attempts

    def expect(
        self,
        session: str,
        key: AttemptKey,
        first_page: int,
        page_ids: Sequence[int],
        on_event: Callable[[ReceiveEvent], None],
    ) -> None:
        """Expect prompt pages first_page, first_page + 1, … in the pinned pages `page_ids`, over all layers.

        → `ReceiveComplete`, or `ReceiveAbandoned` and then `ReceiveReleased`. Call before the grant is sent.

        Raises:
            TransferError: the session is not open.
            ValueError: the key is in use, or a page is outside the pool, named twice or expected by another
                attempt.
        """
        self._session(session)
        self._ledger.expect(session, key, first_page, page_ids)
        self._callbacks[key] = on_event
        self._apply([])

    def abandon(self, key: AttemptKey) -> None:
        """The attempt is given up here (client gone, deadline, …). → `ReceiveAbandoned` at once, unless it
        was complete. The pages stay quarantined until `confirm`, `confirm_finished` or the fence. Unknown
        keys are ignored."""
        self._apply(self._ledger.abandon(key, time.monotonic()))

    def confirm(self, key: AttemptKey) -> None:
        """The sender said that it gave up and no write will follow (`GrantFailed`). → `ReceiveReleased`,
        after `ReceiveAbandoned` if the attempt was still live. Unknown keys are ignored."""
        self._apply(self._ledger.confirm(key, time.monotonic()))

    def confirm_finished(self, key: AttemptKey) -> None:
        """The sender said that every write is done (`GrantFinished`). A live attempt goes on counting tags,
        which may still be on their way; an abandoned one is released. Unknown keys are ignored."""
        self._apply(self._ledger.finish(key))

    def progress(self, key: AttemptKey) -> int:
        """Pages of the grant's longest prefix that is complete over all layers; 0 for unknown keys."""
        return self._ledger.complete_prefix_pages(key)

    def _session(self, session: str) -> _Session:
        found = self._sessions.get(session)
        if found is None:
            raise TransferError(f"session {session} is not open")
        return found

    # ------------------------------------------------------------ ledger (event loop)

    def _apply(self, actions: list[ReceiveAction]) -> None:
        """Deliver what the ledger decided, and keep poller and ticker as busy as its state asks for."""
        before, self._live = self._live, self._ledger.live_attempts
        if self._live > before:
            self._poller.wake()  # only now: the step it starts reads `_live`
        if self._ledger.quarantined_pages and self._ticker is None:
            self._ticker = self._loop.call_later(self._tick_s, self._tick)
        for action in actions:
            if isinstance(action, FenceDue):
                logger.warning("event=fence_due session=%s why=%s", action.session, action.why)
                if session := self._sessions.get(action.session):
                    session.on_fence_due(action)
            elif isinstance(action, ReceiveAbandoned):
                self._callbacks[action.key](action)
            else:
                self._callbacks.pop(action.key)(action)

    def _tick(self) -> None:
        self._ticker = None
        self._apply(self._ledger.tick(time.monotonic()))

    def _on_tags(self, session: str, notes: list[tuple[str, bytes]]) -> None:
        for peer, note in notes:
            try:
                tag = decode_tag(note)
                if peer != sender_agent_name(session):
                    raise ValueError(f"agent {peer} does not belong to this session")
            except ValueError as error:
                logger.warning("event=invalid_tag session=%s error=%s", session, error)
                self._ledger.counts.invalid += 1
                continue
            self._apply(
                self._ledger.tag(session, AttemptKey(tag.request_id, tag.attempt), tag.layer, tag.runs)
            )

    # ------------------------------------------------------------ polling thread

    def _poll_step(self) -> float | None:
        with self._lock:
            sessions = list(self._sessions.items())
        for name, session in sessions:
            if not session.broken:
                self._poll(name, session)
        if not sessions:
            return None
        if not self._live:
            return IDLE_POLL_S
        active = time.monotonic() - self._last_active_s < ACTIVE_S
        return ACTIVE_POLL_S if active else LIVE_POLL_S

    def _poll(self, name: str, session: _Session) -> None:
        try:
            notes = session.agent.notifications()
        except TransferError as error:
            if name in self._sessions:
                session.broken = True
                logger.warning("event=receive_poll_failed session=%s error=%s", name, error)
                self._deliver(session.on_fence_due, FenceDue(name, f"its receive agent fails: {error}"))
            return
        if notes:
            self._last_active_s = time.monotonic()
            self._deliver(self._on_tags, name, notes)

    def _deliver(self, callback: Callable[..., None], *news: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *news)
        except RuntimeError:  # the loop has ended: nobody is left to tell
            logger.warning("event=undelivered count=%s", len(news))

"""Pushes KV pages to receivers, layer by layer, while later layers still compute.

Two threads for the whole worker: one posts writes the moment the layer counter passes, one drives NIXL's
progress and notices what is done. Polling is fast only while there is something to see.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prfaas.engine.interface import ChunkPlan, LayerCounter
from prfaas.kv.layout import KVLayout
from prfaas.protocol.messages import Hello, LinkCounters
from prfaas.transfer.agent import DEFAULT_OPTIONS, AgentOptions, TransferAgent, TransferError, make_agent
from prfaas.transfer.counters import LinkMeter
from prfaas.transfer.events import (
    AttemptKey,
    SendCancelled,
    SendClosed,
    SendEvent,
    SendFailed,
    SendFinished,
)
from prfaas.transfer.link import LinkModel
from prfaas.transfer.outgoing import Outgoing, Write, final_pages
from prfaas.transfer.poller import Poller
from prfaas.transfer.send_ledger import SendEnded, SendLedger
from prfaas.transfer.send_session import Flight, SendSession

if TYPE_CHECKING:
    from prfaas.kv.shared_buffer import SharedBuffer

__all__ = ["PageSender", "final_pages", "receiver_agent_name", "sender_agent_name"]

logger = logging.getLogger(__name__)

LAYER_POLL_S = 0.0005
"""How often the layer counter is read while an announced chunk is unfinished."""
BUSY_POLL_S = 0.0005
IDLE_POLL_S = 0.025


def sender_agent_name(session: str) -> str:
    """NIXL name of the session's sending agent."""
    return f"{session}/send"


def receiver_agent_name(session: str) -> str:
    """NIXL name of the session's receiving agent."""
    return f"{session}/receive"


class PageSender:
    """All sending of one worker. Call every method on the event loop; events arrive there, too.

    **Pins**: the caller keeps a pin of its own on every source page it hands over (`send_cached`,
    `announce`) from that call until the attempt's terminal event (`SendEvent`), whatever happens to the
    engine's sequence: freed too early, another request's KV would be sent.
    """

    def __init__(
        self,
        buffer: SharedBuffer,
        layout: KVLayout,
        layer_counter: LayerCounter,
        loop: asyncio.AbstractEventLoop,
        *,
        options: AgentOptions = DEFAULT_OPTIONS,
    ) -> None:
        """
        Args:
            buffer: the KV pool; `layout.pool_bytes` long at least.
        """
        self._buffer = buffer
        self._layout = layout
        self._counter = layer_counter
        self._loop = loop
        self._options = options
        self._lock = threading.RLock()
        self._ledger = SendLedger()
        self._sessions: dict[str, SendSession] = {}
        self._closing: dict[str, asyncio.Future[None]] = {}
        self._outgoing: dict[AttemptKey, Outgoing] = {}
        self._meters: dict[str, LinkMeter] = {}
        self._poster = Poller("kv-post", self._post_step)
        self._progress = Poller("kv-send-poll", self._poll_step)

    # ------------------------------------------------------------ sessions

    async def open(
        self, hello: Hello, link: LinkModel, on_broken: Callable[[str], None] = lambda why: None
    ) -> bytes:
        """Make the session's send agent (in a thread, tens of ms); returns its metadata for `Welcome`.

        `on_broken` is called once, with the reason, when NIXL has lost the peer though the control channel
        may live: no write of this session succeeds any more, and whether bytes of a failed one still land
        only the fence can tell. It comes before the ends of the attempts that failed, so that the messenger
        can end the session instead of confirming them.

        Raises:
            TransferError: the receiver's metadata, layout or pool address is unusable.
            ValueError: the session is open already.
        """
        with self._lock:
            self._ledger.open(hello.session)
        try:
            agent = await make_agent(lambda: self._make_agent(hello))
        except BaseException:
            with self._lock:
                self._ledger.closed(hello.session)
            raise
        with self._lock:
            meter = self._meters.setdefault(hello.cluster, LinkMeter(hello.cluster, link.rtt_s))
            self._sessions[hello.session] = SendSession(
                hello.session, agent, hello.layout, link, meter, on_broken
            )
        self._progress.wake()
        return agent.metadata

    def _make_agent(self, hello: Hello) -> TransferAgent:
        agent = TransferAgent(
            sender_agent_name(hello.session), self._layout, self._buffer.address, self._options
        )
        try:
            agent.connect(hello.agent_metadata, receiver_agent_name(hello.session))
            agent.prepare_writes(hello.layout, hello.pool_address)
        except BaseException:
            agent.destroy()
            raise
        return agent

    async def close(self, session: str) -> None:
        """Destroy the session's agent (in a thread, up to about a second).

        Every attempt of it that has not ended gets `SendClosed`, before this returns. Goes on to its end even
        if the caller is cancelled; may be called again. Unknown sessions are ignored.
        """
        with self._lock:
            found = self._sessions.pop(session, None)
            if found is not None:
                found.closing = True
        if found is not None:
            self._closing[session] = asyncio.ensure_future(self._close(found))
        if session in self._closing:
            await asyncio.shield(self._closing[session])

    async def _close(self, session: SendSession) -> None:
        await asyncio.to_thread(session.agent.destroy)
        with self._lock:
            session.destroyed()
            self._finish(self._ledger.closed(session.name))
        del self._closing[session.name]
        await asyncio.sleep(0)  # the events are delivered before `close` returns

    async def stop(self) -> None:
        """Close all sessions and end the threads."""
        for session in [*self._sessions, *self._closing]:
            await self.close(session)
        await asyncio.to_thread(self._poster.stop)
        await asyncio.to_thread(self._progress.stop)

    # ------------------------------------------------------------ attempts

    def begin(
        self,
        session: str,
        key: AttemptKey,
        first_page: int,
        page_ids: Sequence[int],
        on_event: Callable[[SendEvent], None],
    ) -> None:
        """Start an attempt: prompt page `first_page + i` goes to the receiver's page `page_ids[i]`.

        Raises:
            TransferError: the session is not open.
            ValueError: the key is in use, or the page ids are not distinct pages of the receiver's pool.
        """
        with self._lock:
            found = self._sessions.get(session)
            if found is None:
                raise TransferError(f"session {session} is not open")
            if not page_ids or len(set(page_ids)) != len(page_ids):
                raise ValueError(f"grant of {key} needs distinct pages")
            if min(page_ids) < 0 or max(page_ids) >= found.remote.num_pages or first_page < 0:
                raise ValueError(f"grant of {key} names pages outside the pool of {found.remote.num_pages}")
            self._ledger.begin(session, key)
            self._outgoing[key] = Outgoing(key, session, first_page, page_ids, on_event, time.monotonic())
            found.turns.append(key)

    def send_cached(self, key: AttemptKey, source_pages: Mapping[int, int]) -> None:
        """Send pages (prompt page → source page) whose KV is complete over all layers already, at once.

        Prompt pages before the grant's first page are skipped: the receiver has them. Ignored once the
        attempt has failed, been cancelled or closed.

        Raises:
            ValueError: a page was handed over before, or lies behind the grant's last page.
        """
        self._hand_over(key, lambda out, limit: out.cached_writes(source_pages, self._layout, limit))

    def announce(self, key: AttemptKey, plan: ChunkPlan, source_pages: Mapping[int, int]) -> None:
        """A chunk is about to run: send each layer of the pages it makes final as soon as the counter passes.

        `source_pages` must hold (at least) the prompt pages `final_pages(plan, page_size)`; others are
        ignored, and so are prompt pages before the grant's first page. Chunks are announced in the order in
        which they run.

        Raises:
            ValueError: as for `send_cached`, or a final page is missing in `source_pages`.
        """
        self._hand_over(key, lambda out, limit: out.chunk_writes(plan, source_pages, self._layout, limit))

    def _hand_over(self, key: AttemptKey, make: Callable[[Outgoing, int], list[Write]]) -> None:
        with self._lock:
            out = self._outgoing.get(key)
            session = self._sessions.get(out.session) if out else None
            if out is None or session is None or not self._ledger.running(key):
                return
            writes = make(out, session.link.max_write_bytes)
            self._ledger.queue(key, len(writes))
            out.queue(writes, time.monotonic())
        self._poster.wake()

    def end(self, key: AttemptKey) -> None:
        """No further pages will be handed over. → `SendFinished` when every write is done, or `SendFailed`
        if a granted page was never handed over. Unknown keys are ignored."""
        with self._lock:
            out = self._outgoing.get(key)
            if out is None:
                return
            if out.lacks:
                self._stop(key, self._ledger.fail(key, f"{out.lacks} granted pages were never computed"))
            else:
                self._finish(self._ledger.end(key))

    def cancel(self, key: AttemptKey) -> None:
        """Post nothing more. → `SendCancelled` once no write is in flight. Unknown keys are ignored."""
        with self._lock:
            self._stop(key, self._ledger.cancel(key))

    # ------------------------------------------------------------ measurements

    @property
    def attempts(self) -> int:
        """Attempts that have not ended."""
        with self._lock:
            return self._ledger.attempts

    def observe_rtt(self, cluster: str, rtt_s: float) -> None:
        """A round trip measured on the control channel to a worker of `cluster`."""
        with self._lock:
            meter = self._meters.get(cluster)
        if meter is not None:
            meter.observe_rtt(rtt_s)

    def counters(self) -> list[LinkCounters]:
        """Running totals, one per destination cluster."""
        with self._lock:
            meters = list(self._meters.values())
        return [meter.snapshot() for meter in meters]

    # ------------------------------------------------------------ posting thread

    def _post_step(self) -> float | None:
        with self._lock:
            count, now_s = self._counter.value(), time.monotonic()
            for out in self._outgoing.values():
                out.layers_done(count, now_s)
            sessions = list(self._sessions.values())
        while sum(self._post_one(session) for session in sessions):  # every session gets its turn
            pass
        return self._post_pause_s()

    def _post_one(self, session: SendSession) -> bool:
        """Let one ready write enter the link, and post one that is due; False if there was neither."""
        with self._lock:
            if session.closing:
                return False
            now_s = time.monotonic()
            entered = self._enter_one(session, now_s)
            flight = session.pop_entered(now_s)
        if flight is not None:
            self._post(session, flight)
        return entered or flight is not None

    def _enter_one(self, session: SendSession, now_s: float) -> bool:
        """Let the next attempt that has a ready write, in turn, put it on the link."""
        if session.admit_s(now_s) > now_s:
            return False
        for _ in range(len(session.turns)):
            key = session.turns.popleft()
            out = self._outgoing.get(key)
            if out is None:
                continue
            session.turns.append(key)
            if out.ready and self._ledger.post(key):
                write = out.ready.popleft()
                out.posted(now_s)
                try:
                    session.enter(write, now_s)
                except TransferError as error:
                    self._stop(key, self._ledger.write_failed(key, str(error)))
                return True
        return False

    def _post(self, session: SendSession, flight: Flight) -> None:
        write = flight.write
        tag = write.tag() if flight.passage.notify_s is None else b""
        try:
            handle = session.agent.write(write.layer, write.source_pages, write.dest_pages, tag)
        except TransferError as error:
            self._failed(session, write, error)
            return
        with self._lock:
            session.flying[handle] = flight
        self._progress.wake()

    def _post_pause_s(self) -> float | None:
        with self._lock:
            now_s = time.monotonic()
            next_s = math.inf
            if any(out.waits_for_layers for out in self._outgoing.values()):
                next_s = now_s + LAYER_POLL_S
            ready = {out.session for out in self._outgoing.values() if out.ready}
            for name, session in self._sessions.items():
                next_s = min(next_s, session.next_post_s)
                if name in ready:
                    next_s = min(next_s, session.admit_s(now_s))
        return None if next_s == math.inf else max(0.0, next_s - now_s)

    # ------------------------------------------------------------ polling thread

    def _poll_step(self) -> float | None:
        with self._lock:
            sessions = list(self._sessions.values())
        if sum(self._poll(session) for session in sessions):
            return BUSY_POLL_S
        return IDLE_POLL_S if sessions else None

    def _poll(self, session: SendSession) -> bool:
        """Drive one session's progress; whether it has anything under way."""
        with self._lock:
            now_s = time.monotonic()
            ripe, tags = session.ripe(now_s), session.pop_tags(now_s)
        try:
            session.agent.notifications()  # nobody notifies a sender: this drives progress
            for tag in tags:
                session.agent.notify(tag)
        except TransferError as error:
            self._broken(session, str(error))
        for handle, flight in ripe:
            try:
                done = session.agent.done(handle)
            except TransferError as error:
                self._failed(session, flight.write, error, handle)
                continue
            if done:
                self._landed(session, handle, flight)
        return session.busy

    def _landed(self, session: SendSession, handle: int, flight: Flight) -> None:
        with self._lock:
            if session.closing:
                return
            now_s = time.monotonic()
            write = flight.write
            del session.flying[handle]
            session.landed(flight, now_s)
            if out := self._outgoing.get(write.key):
                out.landed(write.nbytes, now_s - session.meter.rtt_s / 2)
            self._finish(self._ledger.done(write.key))
            waiting = any(other.ready for other in self._outgoing.values())
        if waiting:
            self._poster.wake()

    # ------------------------------------------------------------ ends (either thread, or the loop)

    def _failed(
        self, session: SendSession, write: Write, error: TransferError, handle: int | None = None
    ) -> None:
        with self._lock:
            if session.closing:  # the destroyed agent's writes end together, in `close`
                return
            logger.warning("event=write_failed session=%s key=%s error=%s", session.name, write.key, error)
            if handle is not None:
                del session.flying[handle]
            session.lost(write)
            self._broken(session, str(error))
            self._stop(write.key, self._ledger.write_failed(write.key, str(error)))

    def _broken(self, session: SendSession, why: str) -> None:
        with self._lock:
            if session.closing or session.broken:
                return
            session.broken = True
        logger.warning("event=session_broken session=%s why=%s", session.name, why)
        self._deliver(session.on_broken, why)

    def _stop(self, key: AttemptKey, ended: list[SendEnded]) -> None:
        if out := self._outgoing.get(key):
            out.drop()
        self._finish(ended)

    def _finish(self, ended: list[SendEnded]) -> None:
        for end in ended:
            out = self._outgoing.pop(end.key)
            self._deliver(out.on_event, _event(end, out))

    def _deliver(self, callback: Callable[[Any], None], news: SendEvent | str) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, news)
        except RuntimeError:  # the loop has ended: nobody is left to tell
            logger.warning("event=undelivered news=%s", news)


def _event(end: SendEnded, out: Outgoing) -> SendEvent:
    stats = out.stats()
    if end.outcome == "finished":
        return SendFinished(end.key, stats)
    if end.outcome == "cancelled":
        return SendCancelled(end.key, stats)
    if end.outcome == "failed":
        return SendFailed(end.key, stats, end.message)
    return SendClosed(end.key, stats)

"""One grant at the prefill worker: match, compute, push, and the last word to the decode worker.

Two things end independently, the computing (a task) and the sending (its one terminal event). Source pages
are pinned by the grant itself until the sending has ended, whatever becomes of the engine's sequence.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from prefill_service.admission import Admission
from prefill_service.early_pins import EarlyPins
from prfaas.engine.interface import ChunkPlan, SequenceEvent, SequenceRequest
from prfaas.errors import EngineFailure, OutOfPages
from prfaas.protocol.messages import (
    Grant,
    GrantAccepted,
    GrantFailed,
    GrantFinished,
    GrantProgress,
    PeerMessage,
    PrefillReport,
)
from prfaas.transfer.checksums import page_checksums
from prfaas.transfer.events import (
    AttemptKey,
    SendCancelled,
    SendClosed,
    SendEvent,
    SendFailed,
    SendFinished,
    SendStats,
)
from prfaas.transfer.sender import final_pages
from prfaas.worker.host import WorkerHost
from prfaas.worker.page_queue import PageQueue

_LOG = logging.getLogger(__name__)


class PrefillGrant:
    """One attempt. `start` once; `cancel` at any time; `on_over` is called when nothing is left of it.

    Args:
        session: name of the peer session that it came over.
        post: sends a message to the decode worker.
    """

    def __init__(
        self,
        host: WorkerHost,
        admission: Admission,
        pages: PageQueue,
        early_pins: EarlyPins,
        session: str,
        grant: Grant,
        post: Callable[[PeerMessage], None],
        on_over: Callable[[PrefillGrant], None],
    ) -> None:
        self.key = AttemptKey(grant.request_id, grant.attempt)
        self.lease_s = grant.lease_s
        self.grant = grant
        self.wanted_tokens = len(grant.token_ids) - 1
        """KV of positions before this is wanted."""
        self._host = host
        self._pool = host.pool
        self._admission = admission
        self._pages = pages
        self._early_pins = early_pins
        self._session = session
        self._post = post
        self._on_over = on_over
        self._loop = asyncio.get_running_loop()
        self._accepted_s = time.monotonic()
        self._first_chunk_s: float | None = None
        self._computed_s: float | None = None
        self._cached_tokens = 0
        self._computed_tokens = 0
        self._sent_from: dict[int, int] = {}
        """Prompt page → source page of everything handed to the sender, for checksums."""
        self._send_pins: list[int] = []
        self._sequence_id = f"{grant.request_id}.{grant.attempt}"
        self._events: asyncio.Queue[SequenceEvent] = asyncio.Queue()
        self._in_engine = False
        self._send_over = False
        self._why: tuple[str, str] | None = None
        self._task: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> bool:
        """Whether it waits for its turn or for pages, outside the engine."""
        return self._task is not None and not self._task.done() and not self._in_engine

    @property
    def waiting_tokens(self) -> int:
        """Tokens that it will compute and the engine does not know of yet."""
        return self.wanted_tokens - self._cached_tokens if self.waiting else 0

    def start(self) -> None:
        """Match the cache, send what is cached, queue the rest.

        Raises:
            TransferError: the session is gone.
            ValueError: the destination pages are not the receiver's.
        """
        grant = self.grant
        self._host.sender.begin(self._session, self.key, grant.first_page, grant.page_ids, self._on_send)
        self._deadline = self._loop.call_later(
            grant.deadline_s, self.cancel, "deadline", f"no KV within the {grant.deadline_s:.1f} s granted"
        )
        match = self._pool.match(grant.token_ids, grant.cache_salt, self.wanted_tokens)
        self._cached_tokens = match.tokens
        self._post(
            GrantAccepted(request_id=grant.request_id, attempt=grant.attempt, cached_tokens=match.tokens)
        )
        if match.tokens == self.wanted_tokens or self._early_pins.take(self.key, len(match.page_ids)):
            self._send_pins = match.page_ids
            self._send_cached(match.page_ids, 0)
        else:
            self._pool.release(match.page_ids)
        self._task = asyncio.create_task(self._compute(), name=f"prefill-{self._sequence_id}")
        self._task.add_done_callback(self._computing_over)

    def cancel(self, reason: str, message: str = "") -> None:
        """Stop computing and sending; `GrantFailed` follows once no write is in flight."""
        if self._why is None and not self._send_over:
            self._why = (reason, message)
            self._stop_computing()
            self._host.sender.cancel(self.key)

    # ------------------------------------------------------------ computing

    async def _compute(self) -> None:
        try:
            if self._cached_tokens < self.wanted_tokens:
                async with self._admission.enter(self.wanted_tokens - self._cached_tokens):
                    await self._prefill()
            if self._why is None:
                self._host.sender.end(self.key)
        except OutOfPages as error:
            self.cancel("overloaded", str(error))
        except EngineFailure as error:
            self.cancel("engine_failed", str(error))

    async def _prefill(self) -> None:
        """Take pages, send what became cached meanwhile, run the rest through the engine."""
        grant = self.grant
        match, fresh = await self._pages.take(grant.token_ids, grant.cache_salt, self.wanted_tokens)
        page_ids = match.page_ids + fresh
        self._early_pins.give_back(self.key)
        self._cached_tokens = match.tokens
        already = len(self._send_pins)
        self._pool.pin(page_ids[already:])
        self._send_pins = self._send_pins + page_ids[already:]
        self._send_cached(match.page_ids, already)
        if match.tokens == self.wanted_tokens:
            self._pool.release(page_ids)
            return
        await self._run_sequence(page_ids)

    async def _run_sequence(self, page_ids: list[int]) -> None:
        host = self._host
        request = SequenceRequest(
            sequence_id=self._sequence_id,
            token_ids=self.grant.token_ids,
            page_ids=page_ids,
            computed_tokens=self._cached_tokens,
            cache_salt=self.grant.cache_salt,
        )
        host.chunk_watchers[self._sequence_id] = self._on_chunk
        try:
            try:
                host.engine.submit(request, self._on_engine_event)
            except BaseException:
                self._pool.release(page_ids)
                raise
            self._in_engine = True
            while (event := await self._events.get()).finish_reason is None:
                self._on_progress(event)
        finally:
            del host.chunk_watchers[self._sequence_id]
        self._on_sequence_end(event)

    def _on_engine_event(self, event: SequenceEvent) -> None:
        """Called before the next step is planned. Writes of a failed chunk must be dropped by then: the next
        step moves the layer counter past them, and pages that hold no KV would count as computed."""
        if event.finish_reason not in (None, "prefilled"):
            self.cancel("engine_failed", event.error or f"the engine ended it: {event.finish_reason}")
        self._events.put_nowait(event)

    def _on_chunk(self, plan: ChunkPlan) -> None:
        if self._first_chunk_s is None:
            self._first_chunk_s = time.monotonic()
        if self._send_over or self._why is not None:
            return
        final = final_pages(plan, self._pool.page_size)
        pages = {page: plan.page_ids[page] for page in final if page >= self.grant.first_page}
        self._sent_from.update(pages)
        self._host.sender.announce(self.key, plan, {page: plan.page_ids[page] for page in final})

    def _on_progress(self, event: SequenceEvent) -> None:
        if event.prefilled_tokens is None:
            return
        self._computed_s = time.monotonic()
        self._computed_tokens = event.prefilled_tokens - self._cached_tokens
        self._post(
            GrantProgress(
                request_id=self.key.request_id,
                attempt=self.key.attempt,
                computed_tokens=event.prefilled_tokens,
            )
        )

    def _on_sequence_end(self, event: SequenceEvent) -> None:
        self._on_progress(event)
        if event.finish_reason == "prefilled":
            self._computed_tokens = self.wanted_tokens - self._cached_tokens
            self._computed_s = time.monotonic()
            tokens = self.grant.token_ids[: self.wanted_tokens]
            self._pool.commit(tokens, event.page_ids, self.grant.cache_salt)
            self._pool.release(event.page_ids)

    def _stop_computing(self) -> None:
        if self._in_engine:
            self._host.engine.cancel(self._sequence_id)
        elif self._task is not None:
            self._task.cancel()

    def _computing_over(self, task: asyncio.Task[None]) -> None:
        self._early_pins.give_back(self.key)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("grant=%s prefill failed", self._sequence_id, exc_info=error)
            self.cancel("engine_failed", repr(error))
        self._check_over()

    # ------------------------------------------------------------ sending

    def _send_cached(self, page_ids: list[int], first: int) -> None:
        """Hand cached prompt pages from index `first` on to the sender."""
        start = max(first, self.grant.first_page)
        pages = {page: page_ids[page] for page in range(start, len(page_ids))}
        self._sent_from.update(pages)
        if pages:
            self._host.sender.send_cached(self.key, pages)

    def _on_send(self, event: SendEvent) -> None:
        """The sending has ended: say so, and let the source pages go."""
        self._send_over = True
        if self._deadline is not None:
            self._deadline.cancel()
        request_id, attempt = self.key
        match event:
            case SendFinished(stats=stats):
                report = self._report(stats)
                sums = self._checksums()
                self._host.metrics.observe_transfer(report)
                self._post(
                    GrantFinished(request_id=request_id, attempt=attempt, report=report, checksums=sums)
                )
            case SendCancelled():
                reason, message = self._why or ("cancelled", "")
                self._fail(reason, message)
            case SendFailed(message=message):
                self._fail("transfer_failed", message)
            case SendClosed():
                self._stop_computing()
        self._pool.release(self._send_pins)
        self._send_pins = []
        self._check_over()

    def _fail(self, reason: str, message: str) -> None:
        self._stop_computing()
        self._host.metrics.transfer_failures.labels(reason).inc()
        self._post(
            GrantFailed(
                request_id=self.key.request_id, attempt=self.key.attempt, reason=reason, message=message
            )
        )

    def _checksums(self) -> list[int]:
        if not self._host.spec.checksum_pages:
            return []
        pages = [self._sent_from[page] for page in sorted(self._sent_from)]
        return page_checksums(self._host.buffer.array, self._host.engine.layout, pages)

    def _report(self, stats: SendStats) -> PrefillReport:
        first_s = self._first_chunk_s if self._first_chunk_s is not None else self._accepted_s
        return PrefillReport(
            site=self._host.name,
            cached_tokens=self._cached_tokens,
            decode_cached_tokens=0,
            computed_tokens=self._computed_tokens,
            queue_s=first_s - self._accepted_s,
            prefill_s=max((self._computed_s or first_s) - first_s, 0.0),
            ready_s=0.0,
            kv_bytes=stats.kv_bytes,
            transfer_s=stats.transfer_s,
            tail_s=stats.tail_s,
        )

    def _check_over(self) -> None:
        if self._send_over and self._task is not None and self._task.done():
            self._on_over(self)

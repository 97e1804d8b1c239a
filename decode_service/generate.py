"""One attempt of one request on the decode worker: match, have the prompt's KV made, decode, stream.

Cleaning up is synchronous, so a cancelled handler (the client went away) frees everything at once: the
engine's slot, the grant, the pages. Nothing here falls back on local prefill when the prefill site fails;
only the gateway places again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from decode_service.grants import GrantFailure, LiveGrant
from decode_service.messenger import DecodeMessenger
from decode_service.text import TextStream
from prfaas.engine.interface import ChunkPlan, SequenceEvent, SequenceRequest
from prfaas.errors import OutOfPages
from prfaas.protocol.messages import (
    Accepted,
    Failed,
    Finished,
    GenerateFrame,
    GenerateRequest,
    Grant,
    GrantFinished,
    Prefilled,
    PrefillReport,
    PrefillSite,
)
from prfaas.transfer.checksums import page_checksums
from prfaas.transfer.events import AttemptKey
from prfaas.worker.host import WorkerHost
from prfaas.worker.page_queue import PageQueue

_LOG = logging.getLogger(__name__)

Emit = Callable[[GenerateFrame], Awaitable[None]]


class Generation:
    """Run it once. `fail` ends it from outside with a typed failure."""

    def __init__(
        self,
        host: WorkerHost,
        messenger: DecodeMessenger,
        pages: PageQueue,
        request: GenerateRequest,
        text: TextStream,
    ) -> None:
        self.key = AttemptKey(request.request_id, request.attempt)
        self.phase = "queued"
        """`queued`, `prefill` (elsewhere), `engine` (waiting or prefilling there), `decode`."""
        self._host = host
        self._messenger = messenger
        self._pages = pages
        self._request = request
        self._text = text
        self._wanted_tokens = len(request.token_ids) - 1
        self._loop = asyncio.get_running_loop()
        self._arrived_s = time.monotonic()
        self._timeout = asyncio.timeout(request.deadline_s)
        self._failure = ("deadline", f"not finished within {request.deadline_s:.1f} s")
        self._sequence_id = f"{request.request_id}.{request.attempt}"
        self._events: asyncio.Queue[SequenceEvent | PrefillReport] = asyncio.Queue()
        self._held: list[int] = []
        """Pinned pages that nobody else has taken over."""
        self._cached_tokens = 0
        self._grant: LiveGrant | None = None
        self._reporting: asyncio.Future[PrefillReport] = self._loop.create_future()
        self._first_chunk_s: float | None = None
        self._submitted_s = 0.0
        self._in_engine = False
        self._running = False
        self._failing = False

    @property
    def waiting_outside_engine(self) -> bool:
        return self.phase in ("queued", "prefill")

    async def run(self, emit: Emit) -> str:
        """Stream frames until the attempt has ended; returns `ok` or the failure's reason.

        Raises:
            ConnectionError, asyncio.CancelledError: the client is gone; everything is cleaned up.
        """
        failed: Failed
        try:
            async with self._timeout:
                self._running = True
                if self._failing:
                    self._timeout.reschedule(self._loop.time())
                await self._run(emit)
                return "ok"
        except TimeoutError:
            failed = self._failed(self._host.name, *self._failure)
        except GrantFailure as failure:
            failed = self._failed(failure.site, failure.reason, failure.message, failure.complete_tokens)
        except OutOfPages as error:
            failed = self._failed(self._host.name, "overloaded", str(error))
        await emit(failed)
        return failed.reason

    def fail(self, reason: str, message: str) -> None:
        """End it now, or as soon as it runs, with `Failed(reason)`."""
        self._failure = (reason, message)
        self._failing = True
        if self._running:
            self._timeout.reschedule(self._loop.time())

    async def _run(self, emit: Emit) -> None:
        request = self._request
        try:
            match = self._host.pool.match(request.token_ids, request.cache_salt, self._wanted_tokens)
            self._held, self._cached_tokens = match.page_ids, match.tokens
            await emit(
                Accepted(
                    request_id=request.request_id,
                    attempt=request.attempt,
                    decode_cached_tokens=match.tokens,
                )
            )
            if request.prefill is not None and match.tokens < self._wanted_tokens:
                await self._prefill_elsewhere(request.prefill)
                self._submit(self._wanted_tokens)
            else:
                self._submit(self._cached_tokens)
            await self._stream(emit)
        finally:
            self._clean_up()

    def _clean_up(self) -> None:
        """Give everything back, whatever happened; synchronous on purpose."""
        self._running = False
        if self._grant is not None:
            self._grant.give_up(*(self._failure if self._timeout.expired() else ("cancelled", "not wanted")))
        if self._in_engine:
            self._host.engine.cancel(self._sequence_id)
        self._host.chunk_watchers.pop(self._sequence_id, None)
        self._host.pool.release(self._held)
        self._held = []
        if not self._reporting.done():
            self._reporting.cancel()

    # ------------------------------------------------------------ prefill elsewhere

    async def _prefill_elsewhere(self, site: PrefillSite) -> None:
        """Have the lacking pages written by `site`; returns when they are complete here.

        What is cached is looked up anew once pages are free; if that is all by then, `site` is not asked.

        Raises:
            GrantFailure: no complete KV came.
            OutOfPages: the prompt is larger than the pool.
        """
        self.phase = "prefill"
        session = await self._messenger.session(site)
        request = self._request
        held, self._held = self._held, []
        self._host.pool.release(held)  # nothing is held while waiting for pages
        match, fresh = await self._pages.take(request.token_ids, request.cache_salt, self._wanted_tokens)
        prefix, self._cached_tokens = match.page_ids, match.tokens
        self._held = prefix + fresh
        if not fresh:
            return
        live = LiveGrant(
            self._host.pool, self.key, site.worker, request.token_ids, request.cache_salt, prefix, fresh
        )
        left_s = request.deadline_s - (time.monotonic() - self._arrived_s)
        session.grant(
            live,
            Grant(
                request_id=request.request_id,
                attempt=request.attempt,
                token_ids=request.token_ids,
                cache_salt=request.cache_salt,
                first_page=live.first_page,
                page_ids=fresh,
                lease_s=float(self._host.config.timeouts.lease),
                deadline_s=max(left_s, 0.001),
            ),
        )
        self._grant, self._held = live, []
        await live.complete()
        ready_s = time.monotonic() - self._arrived_s
        if self._host.spec.checksum_pages:
            self._compare_checksums(live, await live.report)
        self._held = live.take()
        self._host.pool.commit(request.token_ids[: self._wanted_tokens], self._held, request.cache_salt)
        live.report.add_done_callback(lambda last: self._on_last_word(last.result(), live, ready_s))

    def _compare_checksums(self, live: LiveGrant, last: GrantFinished | None) -> None:
        """Test mode: what arrived must be what was sent."""
        if last is None:
            raise GrantFailure(live.site, "peer_lost", "the session ended before the checksums came")
        sums = page_checksums(self._host.buffer.array, self._host.engine.layout, live.page_ids)
        if last.checksums == sums:
            return
        if len(last.checksums) != len(sums):
            self._host.metrics.corrupt_pages.inc(len(sums))
            why = f"{len(last.checksums)} checksums for {len(sums)} (layer, page): set checksum_pages on both"
            raise GrantFailure(live.site, "corrupt", why)
        bad = sum(ours != theirs for ours, theirs in zip(sums, last.checksums, strict=True))
        self._host.metrics.corrupt_pages.inc(bad)
        raise GrantFailure(live.site, "corrupt", f"{bad} of {len(sums)} (layer, page) differ")

    def _on_last_word(self, last: GrantFinished | None, live: LiveGrant, ready_s: float) -> None:
        """The sender's report, or what we know ourselves where it died after its last write."""
        if last is not None:
            report = last.report
        else:
            cached, layout = live.site_cached_tokens, self._host.engine.layout
            report = PrefillReport(
                site=live.site,
                cached_tokens=cached,
                decode_cached_tokens=0,
                computed_tokens=max(self._wanted_tokens - cached, 0),
                queue_s=0.0,
                prefill_s=ready_s,
                ready_s=0.0,
                kv_bytes=len(live.page_ids) * layout.page_bytes * layout.num_layers,
            )
        self._report(replace(report, decode_cached_tokens=self._cached_tokens, ready_s=ready_s))

    # ------------------------------------------------------------ engine

    def _submit(self, computed_tokens: int) -> None:
        """Hand the sequence and its pages to the engine."""
        request, now_s = self._request, time.monotonic()
        self.phase = "engine"
        self._submitted_s = now_s
        if request.prefill is None or self._grant is None:
            self._host.chunk_watchers[self._sequence_id] = self._on_chunk
            if computed_tokens == self._wanted_tokens:
                self._report_local()
        self._host.engine.submit(
            SequenceRequest(
                sequence_id=self._sequence_id,
                token_ids=request.token_ids,
                page_ids=self._held,
                computed_tokens=computed_tokens,
                cache_salt=request.cache_salt,
                sampling=request.sampling,
            ),
            self._events.put_nowait,
        )
        self._held = []
        self._in_engine = True

    def _on_chunk(self, plan: ChunkPlan) -> None:
        if self._first_chunk_s is None:
            self._first_chunk_s = time.monotonic()

    def _report_local(self) -> None:
        """The prompt's KV was made, or found, here."""
        now_s = time.monotonic()
        first_s = self._first_chunk_s if self._first_chunk_s is not None else now_s
        self._report(
            PrefillReport(
                site=self._host.name,
                cached_tokens=self._cached_tokens,
                decode_cached_tokens=self._cached_tokens,
                computed_tokens=self._wanted_tokens - self._cached_tokens,
                queue_s=first_s - self._submitted_s,
                prefill_s=now_s - first_s,
                ready_s=now_s - self._arrived_s,
            )
        )

    def _report(self, report: PrefillReport) -> None:
        if not self._reporting.done():
            self._reporting.set_result(report)
            self._events.put_nowait(report)
            self._host.metrics.ready_s.observe(report.ready_s)
            self._host.metrics.cached_tokens.observe(report.cached_tokens)

    # ------------------------------------------------------------ streaming

    async def _stream(self, emit: Emit) -> None:
        while True:
            event = await self._events.get()
            if isinstance(event, PrefillReport):
                await emit(Prefilled(report=event))
                continue
            computed = event.prefilled_tokens or 0
            if self._grant is None and computed >= self._wanted_tokens:
                self._report_local()
            if event.finish_reason in ("error", "cancelled"):
                self._in_engine = False
                reason = "engine_failed" if event.finish_reason == "error" else "cancelled"
                raise GrantFailure(self._host.name, reason, event.error or "ended by the engine")
            if await self._step(event, emit):
                return

    async def _step(self, event: SequenceEvent, emit: Emit) -> bool:
        """Stream what one engine event brings; True when the answer is finished."""
        if event.token_ids:
            self.phase = "decode"
        tokens, reason = self._text.push(event)
        if reason is not None:
            self._in_engine = event.finish_reason is None
            await self._emit_late_report(emit)
        if tokens is not None:
            await emit(tokens)
        if reason is None:
            return False
        self._host.metrics.output_tokens.observe(self._text.completion_tokens)
        await emit(Finished(finish_reason=reason, completion_tokens=self._text.completion_tokens))
        return True

    async def _emit_late_report(self, emit: Emit) -> None:
        """Before the last frame: the sender's last word may still be under way, for a bounded time."""
        if not self._reporting.done() and self._grant is not None:
            await asyncio.wait([self._reporting], timeout=self._host.config.timeouts.silence)
            if not self._reporting.done():
                self._grant.finished(None)
                await asyncio.wait([self._reporting])
        while not self._events.empty():
            event = self._events.get_nowait()
            if isinstance(event, PrefillReport):
                await emit(Prefilled(report=event))

    def _failed(self, site: str, reason: str, message: str, complete_tokens: int = 0) -> Failed:
        _LOG.info("request=%s site=%s failed reason=%s message=%r", self._sequence_id, site, reason, message)
        return Failed(
            site=site,
            reason=reason,
            attempt=self._request.attempt,
            message=message,
            complete_tokens=max(complete_tokens, self._cached_tokens),
        )

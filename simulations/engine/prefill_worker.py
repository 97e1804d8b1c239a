"""A prefill worker: first come, first served; a prefix cache; what it computes streams out as it goes."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from prfaas.protocol.messages import PrefillReport
from simulations.engine.page_cache import PageCache
from simulations.engine.request import FETCHING, Request

if TYPE_CHECKING:
    from simulations.engine.links import Meter, Stream
    from simulations.engine.world import WorkerSpec, World

MOST_KNOTS = 4
"""Of a prefill's release curve: exact up to so many chunks, and joined by lines beyond."""


class PrefillWorker:
    """One incarnation. Prompts are computed one after the other; several short ones that would share a
    chunk live do not share one here."""

    role = "prefill"

    def __init__(self, world: World, spec: WorkerSpec, incarnation: str, early_room: int) -> None:
        """
        Args:
            early_room: pages that prompts may hold, and send from, while they wait for their turn.
        """
        self.world = world
        self.spec = spec
        self.name = spec.name
        self.incarnation = incarnation
        self.ready = True
        self.alive = True
        self.cache = PageCache(spec.num_pages)
        self.live: dict[int, Request] = {}
        """Granted, and not landed yet."""
        self.queue: deque[Request] = deque()
        self.running: Request | None = None
        self.busy_s = 0.0
        self.meters: dict[str, Meter] = {}
        """By target cluster."""
        self._page = spec.page_size
        self._times = world.step_times(spec)
        self._queued_tokens = 0
        self._early_room = early_room
        self._loop = world.loop

    # ------------------------------------------------------------ what comes in

    def grant(self, request: Request) -> None:
        """Permission to write the prompt's KV to its decode worker arrives."""
        self.world.router.before_change(self)
        self.live[request.index] = request
        now_s = self._loop.now_s
        request.site_queued_s = now_s
        held = self.cache.match(request.blocks)
        request.site_cached = held.published * self._page
        if request.site_cached >= request.prompt - 1:
            request.site_held = held
            request.site_started_s = request.site_computed_s = now_s
            self._send_cached(request)
            return
        if held.published <= self._early_room:
            self._early_room -= held.published
            request.early_pages = held.published
            request.site_held = held
            self._send_cached(request)
        else:
            self.cache.release(held)
        overhead_s = self._times.request_overhead_s
        if overhead_s > 0:
            self._loop.at(now_s + overhead_s, self._enqueue_late, (request, request.attempt))
        else:
            self._enqueue(request)

    def landed(self, request: Request) -> None:
        """The last byte is over there: its source pages are free."""
        self.world.router.before_change(self)
        del self.live[request.index]
        self._free(request)

    def give_up(self, request: Request) -> None:
        """Stop computing and sending."""
        self.world.router.before_change(self)
        del self.live[request.index]
        if request in self.queue:
            self.queue.remove(request)
            self._queued_tokens -= request.prompt - 1 - request.site_cached
        self._end_early(request)
        if self.running is request:
            self.busy_s += self._loop.now_s - request.site_started_s
            self.running = None
        self._free(request)

    def die(self) -> list[Request]:
        """The process is gone; returns what it was computing or sending."""
        self.busy_s += self.running_s(self._loop.now_s)
        self.alive = self.ready = False
        self.running = None
        self.queue.clear()
        lost = list(self.live.values())
        self.live.clear()
        return lost

    @property
    def waiting_requests(self) -> int:
        """Granted prompts that are not computed yet."""
        return len(self.queue)

    @property
    def running_requests(self) -> int:
        return int(self.running is not None)

    @property
    def computes_prompt(self) -> bool:
        return self.running is not None

    def running_s(self, now_s: float) -> float:
        """Seconds since the running prefill began."""
        return now_s - self.running.site_started_s if self.running is not None else 0.0

    def prefill_left(self, now_s: float) -> int:
        """Prompt tokens that wait or are being computed."""
        left = self._queued_tokens
        running = self.running
        if running is not None:
            length_s = max(running.site_computed_s - running.site_started_s, 1e-9)
            part = min(1.0, max(0.0, (running.site_computed_s - now_s) / length_s))
            left += int(part * (running.prompt - 1 - running.site_cached))
        return left

    # ------------------------------------------------------------ computing

    def _enqueue_late(self, argument: tuple[Request, int]) -> None:
        request, attempt = argument
        if (
            request.attempt == attempt
            and request.state == FETCHING
            and self.live.get(request.index) is request
        ):
            self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        self.queue.append(request)
        self._queued_tokens += request.prompt - 1 - request.site_cached
        self._start()

    def _start(self) -> None:
        """Compute the next prompt, if nothing runs and there are pages for it."""
        while self.running is None and self.queue:
            request = self.queue[0]
            if not self._take_pages(request):
                return
            self.queue.popleft()
            self._queued_tokens -= request.prompt - 1 - request.site_cached
            now_s = self._loop.now_s
            request.site_started_s = now_s
            assert request.site_held is not None
            request.site_cached = request.site_held.published * self._page
            new = request.prompt - 1 - request.site_cached
            if new <= 0:
                request.site_computed_s = now_s
                self._send_cached(request)
                continue
            self.running = request
            self._compute(request, request.site_cached)

    def _compute(self, request: Request, done: int) -> None:
        """Go on with a prompt that has KV for `done` tokens, for as many chunks as can be told ahead."""
        now_s, times, left = self._loop.now_s, self._times, request.prompt - 1 - done
        length_s = times.prefill_s(left, done)
        request.site_computed_s = now_s + length_s
        self._stream_out(request, done, length_s)
        now = min(left, times.chunks_ahead * times.chunk_tokens)
        end_s = request.site_computed_s if now == left else now_s + times.prefill_s(now, done)
        self._loop.at(end_s, self._computed, (request, request.attempt, done + now))

    def _take_pages(self, request: Request) -> bool:
        """Match the cache once more, now that it is this prompt's turn, and take pages for the rest."""
        held = self.cache.match_and_grow(request.blocks, -(-(request.prompt - 1) // self._page))
        if held is None:
            return False
        self._end_early(request)
        if request.site_held is not None:
            self.cache.release(request.site_held)
        request.site_held = held
        self.world.router.kv_changed(self)
        return True

    def _end_early(self, request: Request) -> None:
        self._early_room += request.early_pages
        request.early_pages = 0

    def _computed(self, argument: tuple[Request, int, int]) -> None:
        request, attempt, done = argument
        if self.running is not request or request.attempt != attempt:
            return
        if done < request.prompt - 1:
            self._compute(request, done)
            return
        self.world.router.before_change(self)
        self.running = None
        self.busy_s += self._loop.now_s - request.site_started_s
        assert request.site_held is not None
        self.cache.publish(request.site_held, request.blocks)
        self.world.router.kv_changed(self)
        self._start()

    def _free(self, request: Request) -> None:
        if request.site_held is not None:
            self.cache.release(request.site_held)
            request.site_held = None
        self._start()

    # ------------------------------------------------------------ sending

    def _stream(self, request: Request) -> Stream:
        """The request's stream, settled up to now."""
        stream = request.stream
        if stream is None:
            stream = request.stream = self.world.open_stream(request)
        else:
            stream.settle(self._loop.now_s)
        return stream

    def _first_page(self, request: Request) -> int:
        """First page that the decode worker lacks."""
        return request.cached // self._page

    def _send_cached(self, request: Request) -> None:
        """What is cached goes at once; all of it and the state, where nothing is left to compute."""
        pages = request.site_cached // self._page - self._first_page(request)
        complete = request.site_cached >= request.prompt - 1
        if pages <= 0 and not complete:
            return
        stream = self._stream(request)
        level = stream.total if complete else pages * self.world.page_bytes
        stream.release(level, self._loop.now_s)
        self.world.links.changed(stream)

    def _stream_out(self, request: Request, done: int, length_s: float) -> None:
        """Release what is computed beyond `done` tokens while it is computed: evenly within a chunk, the last
        chunk's last layer and the fixed state at the end."""
        now_s = self._loop.now_s
        stream = self._stream(request)
        first = self._first_page(request) * self._page
        cached = request.site_cached
        hot = max(0, cached - first) // self._page * self.world.page_bytes
        begin = max(cached, first)
        computed = stream.total - self.world.state_bytes - hot
        per_token = computed / (request.prompt - 1 - begin)
        knots: list[tuple[float, float]] = []
        new = request.prompt - 1 - done
        before, before_s = done, 0.0
        for tokens, at_s in self._chunk_ends(new, done, length_s):
            end = done + tokens
            if before < begin < end:
                # Decode has the first tokens of this chunk already.
                part = (begin - before) / (end - before)
                knots.append((now_s + before_s + part * (at_s - before_s), hot))
            knots.append((now_s + at_s, hot + max(0, end - begin) * per_token))
            before, before_s = end, at_s
        last_chunk = min(new - (new - 1) // self._times.chunk_tokens * self._times.chunk_tokens, new)
        end_s, released = knots[-1]
        piece = min(last_chunk, request.prompt - 1 - begin) * per_token / self.world.layers
        knots[-1] = (end_s, released - piece)
        stream.release(max(stream.sent, hot + max(0, done - begin) * per_token), now_s)
        stream.ramp(knots, now_s)
        self.world.links.changed(stream)

    def _chunk_ends(self, new: int, cached: int, length_s: float) -> list[tuple[int, float]]:
        """(tokens computed, seconds since the begin) at the ends of chunks, at most `MOST_KNOTS` of them."""
        chunk = self._times.chunk_tokens
        chunks = -(-new // chunk)
        if chunks == 1:
            return [(new, length_s)]
        group = -(-chunks // MOST_KNOTS) * chunk
        ends = [min(end, new) for end in range(group, new + group, group)]
        times = [self._times.prefill_s(end, cached) for end in ends]
        scale = length_s / times[-1]
        return [(end, at_s * scale) for end, at_s in zip(ends, times, strict=True)]

    def report(self, request: Request, ready_s: float, sent: int) -> PrefillReport:
        """The sender's last word about a prompt that has landed."""
        computed = request.prompt - 1 - request.site_cached
        return PrefillReport(
            site=self.name,
            cached_tokens=request.site_cached,
            decode_cached_tokens=request.cached,
            computed_tokens=computed,
            queue_s=request.site_started_s - request.site_queued_s,
            prefill_s=request.site_computed_s - request.site_started_s,
            ready_s=ready_s,
            kv_bytes=sent,
        )

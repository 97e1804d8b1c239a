"""A decode worker: pages for prompts to come, continuous batching, local prefill, preemption."""

from __future__ import annotations

from bisect import insort
from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from prfaas.protocol.messages import PrefillReport
from simulations.engine.decode_batch import Stretch
from simulations.engine.page_cache import PageCache
from simulations.engine.page_growth import NEVER, PageGrowth
from simulations.engine.request import DECODING, ENDED, FETCHING, QUEUED, READY, WAITING, Request

if TYPE_CHECKING:
    from simulations.engine.world import WorkerSpec, World
    from simulations.hardware.step_times import StepLine


class DecodeWorker:
    """One incarnation. The rules are those of the live `BatchScheduler` and `PageQueue`, with these
    simplifications: a local prefill gets all its pages when its turn comes rather than chunk by chunk, and
    a step carries a chunk of one prompt only.
    """

    role = "decode"

    def __init__(self, world: World, spec: WorkerSpec, incarnation: str) -> None:
        self.world = world
        self.spec = spec
        self.name = spec.name
        self.incarnation = incarnation
        self.ready = True
        self.alive = True
        self.cache = PageCache(spec.num_pages)
        self.live: dict[int, Request] = {}
        self.busy_s = 0.0
        self.pages_wanted: deque[Request] = deque()
        """Prompts that wait for pages before their grant, first come first served; they hold nothing."""
        self.waiting: list[Request] = []
        """Prompts, or preempted sequences, to prefill here; oldest first."""
        self.ready_queue: deque[Request] = deque()
        self.batch = 0
        self.steps = 0
        """Steps done since this incarnation began."""
        self.context = 0
        """Context tokens of the batch's next step after `steps`."""
        self._times = world.step_times(spec)
        self._page = spec.page_size
        self._loop = world.loop
        self._ends: list[tuple[int, int, Request]] = []
        """(step, order, sequence): heap of last steps."""
        self._growth = PageGrowth(self, self.cache, spec.page_size)
        self._stretch: Stretch | None = None
        self._head: Request | None = None
        """Whose chunks the running stretch carries."""
        self._line: StepLine | None = None
        """What each step of the running stretch takes, where none carries a chunk."""
        self._version = 0
        self._orders = 0

    # ------------------------------------------------------------ what comes in

    def accept(self, request: Request) -> None:
        """A placed request arrives."""
        self.world.router.before_change(self)
        self.live[request.index] = request
        if request.site is not None:
            self.pages_wanted.append(request)
            self._serve_pages()
            return
        self._sync_growth()
        request.held = self.cache.match(request.blocks)
        request.cached = request.held.published * self._page
        self._shorten_for_pages()
        overhead_s = self._times.request_overhead_s
        if overhead_s > 0:
            self._loop.at(self._loop.now_s + overhead_s, self._submit_late, (request, request.attempt))
        else:
            self._submit(request)

    def kv_complete(self, request: Request) -> None:
        """The last byte of the prompt's KV has landed."""
        self.world.router.before_change(self)
        assert request.held is not None
        self._sync_growth()
        self.cache.publish(request.held, request.blocks)
        self.world.router.kv_changed(self)
        self._shorten_for_pages()
        request.fetched = True
        self._to_ready(request)

    def give_up(self, request: Request) -> None:
        """Drop a request that waits or fetches here: its prefill site failed."""
        self.world.router.before_change(self)
        del self.live[request.index]
        if request.state == QUEUED and request in self.pages_wanted:
            self.pages_wanted.remove(request)
        request.state = ENDED
        self._release(request)
        self._wake()

    # ------------------------------------------------------------ status

    def context_at(self, now_s: float) -> int:
        """Context tokens of the running batch."""
        if self._stretch is None or not self.batch:
            return 0
        return self.context + self.batch * self._stretch.done_by(now_s)

    def step_s(self, context: int) -> float:
        """One step of the running batch with so much context, without prefill; 0 where none runs."""
        if not self.batch:
            return 0.0
        line = self._line or self._times.decode_line(self.batch, context)
        return line.base_s + line.slope_s * context

    @property
    def waiting_requests(self) -> int:
        """Requests that are not decoding yet."""
        return len(self.live) - self.batch

    @property
    def running_requests(self) -> int:
        return self.batch

    @property
    def computes_prompt(self) -> bool:
        """Whether the running steps carry chunks."""
        return self._head is not None

    def running_s(self, now_s: float) -> float:
        """Seconds since the running stretch began."""
        return now_s - self._stretch.begin_s if self._stretch is not None else 0.0

    def prefill_left(self, now_s: float) -> int:
        """Prompt tokens to compute here."""
        left = sum(r.prompt - 1 + r.generated - r.computed for r in self.waiting)
        if self._head is not None and self._stretch is not None:
            done = self._stretch.done_by(now_s) * self._times.chunk_tokens
            left -= min(done, self._head.prompt - 1 + self._head.generated - self._head.computed)
        return left

    # ------------------------------------------------------------ pages for prompts to come

    def _serve_pages(self) -> None:
        queue, cache = self.pages_wanted, self.cache
        if not queue:
            return
        self._sync_growth()
        while queue:
            request = queue[0]
            held = cache.match_and_grow(request.blocks, -(-(request.prompt - 1) // self._page))
            if held is None:
                break
            queue.popleft()
            request.held = held
            request.cached = held.published * self._page
            if request.cached >= request.prompt - 1:
                request.site = None
                self._submit(request)
            else:
                request.state = FETCHING
                self.world.grant(request)
        self.world.router.kv_changed(self)
        self._shorten_for_pages()

    def _release(self, request: Request) -> None:
        """Give a request's pages back; whoever waits for pages may have them."""
        if request.held is not None:
            self.cache.release(request.held)
            request.held = None
        self._serve_pages()

    def die(self) -> list[Request]:
        """The process is gone; returns what it was serving."""
        self.busy_s += self.running_s(self._loop.now_s)
        self.alive = self.ready = False
        self._version += 1
        self._stretch = self._head = self._line = None
        lost = list(self.live.values())
        self.live.clear()
        return lost

    def _wake(self, _: object = None) -> None:
        """Pages came back outside of a step's end."""
        if not self.alive:
            return
        self._serve_pages()
        if self._stretch is None:
            self._plan()
        elif self._head is None and self.waiting:
            self._interrupt()

    # ------------------------------------------------------------ into the engine

    def _submit_late(self, argument: tuple[Request, int]) -> None:
        request, attempt = argument
        if request.attempt == attempt and request.decode is self and request.state == QUEUED and self.alive:
            self.world.router.before_change(self)
            self._submit(request)

    def _submit(self, request: Request) -> None:
        """To the local prefill queue, or straight to the batch where nothing is left to prefill."""
        request.submitted_s = self._loop.now_s
        self._orders += 1
        request.order = self._orders
        request.computed = request.cached
        if request.computed >= request.prompt - 1:
            self._report_local(request)
            self._to_ready(request)
            return
        request.state = WAITING
        self.waiting.append(request)
        if self._stretch is None:
            self._plan()
        elif self._head is None:
            self._interrupt()

    def _to_ready(self, request: Request) -> None:
        if not request.order:
            self._orders += 1
            request.order = self._orders
        request.state = READY
        self.ready_queue.append(request)
        if self._stretch is None:
            self._plan()
        elif self.batch < self.spec.max_running:
            self._interrupt()

    def _report_local(self, request: Request) -> None:
        now_s = self._loop.now_s
        first_s = request.first_chunk_s if request.first_chunk_s >= 0 else now_s
        report = PrefillReport(
            site=self.name,
            cached_tokens=request.cached,
            decode_cached_tokens=request.cached,
            computed_tokens=request.prompt - 1 - request.cached,
            queue_s=first_s - request.placed_s,
            prefill_s=now_s - first_s,
            ready_s=now_s - request.placed_s,
        )
        self.world.prefilled(request, report)

    # ------------------------------------------------------------ steps

    def _interrupt(self) -> None:
        """The batch is to change at the end of the step that runs now."""
        stretch = self._stretch
        assert stretch is not None
        count = stretch.next_boundary(self._loop.now_s)
        if count < stretch.count:
            self._cut(count)

    def _cut(self, count: int) -> None:
        stretch = self._stretch
        assert stretch is not None
        stretch.count = count
        self._version += 1
        self._loop.at(stretch.begin_s + stretch.after_s(count), self._on_end, self._version)

    def _on_end(self, version: int) -> None:
        if version != self._version:
            return
        self.world.router.before_change(self)
        self._advance()
        self._plan()

    def _advance(self) -> None:
        """Account for the stretch that has just ended."""
        stretch, head = self._stretch, self._head
        assert stretch is not None
        self.steps += stretch.count if self.batch else 0
        self._sync_growth()
        self.busy_s += self._loop.now_s - stretch.begin_s
        if self.batch:
            self.context += stretch.count * self.batch
            ends = self._ends
            while ends and ends[0][0] <= self.steps:
                step, _, request = heappop(ends)
                if request.finish_step == step and request.state == DECODING and request.decode is self:
                    self._finish(request)
        if head is not None and head.state == WAITING:
            end = head.prompt - 1 + head.generated
            head.computed = min(end, head.computed + stretch.count * self._times.chunk_tokens)
            if head.computed == end:
                self._prefill_done(head)
        # Only now: until here, whoever got pages or KV must not begin a stretch.
        self._stretch = self._head = self._line = None

    def _prefill_done(self, request: Request) -> None:
        self.waiting.remove(request)
        assert request.held is not None
        self.cache.publish(request.held, request.blocks)
        self.world.router.kv_changed(self)
        if not request.fetched and not request.generated:
            self._report_local(request)
        request.state = READY
        self.ready_queue.append(request)

    def _finish(self, request: Request) -> None:
        self.batch -= 1
        self.context -= request.context + self.steps + 1
        held = request.held
        assert held is not None
        full = (request.prompt - 1 + request.output) // self._page
        self.cache.publish_answer(held, request.blocks, full - len(request.blocks), request.answer)
        self.world.router.kv_changed(self)
        request.state = ENDED
        del self.live[request.index]
        self._release(request)
        self.world.finished(request)

    def _plan(self) -> None:
        """Begin the next stretch: at a step boundary, or while nothing runs."""
        newcomers: list[Request] = []
        while True:
            if self.ready_queue:
                self._fill_slots(newcomers)
            if self._growth.next_step <= self.steps + 1:
                self._grow_or_preempt()
            head = self._prefill_head() if self.waiting else None
            if not self.ready_queue or self.batch >= self.spec.max_running:
                break
        if not self.batch and head is None:
            return
        begin_s = self._loop.now_s
        count = self._steps_ahead() if self.batch else NEVER
        line = None
        if head is None:
            line = self._times.decode_line(self.batch, self.context)
            if line.until_context < self.context + count * self.batch:
                count = max(1, int((line.until_context - self.context) // self.batch) + 1)
            stretch = Stretch.decode(begin_s, count, self.batch, self.context, line.base_s, line.slope_s)
        else:
            if head.first_chunk_s < 0:
                head.first_chunk_s = begin_s
            chunks = min(count, self._times.chunks_ahead)
            stretch = Stretch.mixed(begin_s, self._mixed_ends(head, chunks))
        self._stretch, self._head, self._line = stretch, head, line
        self._version += 1
        self._loop.at(begin_s + stretch.after_s(stretch.count), self._on_end, self._version)
        if newcomers:
            first_s = begin_s + stretch.after_s(1)
            for request in newcomers:
                if request.state == DECODING and request.first_token_s < 0:
                    self.world.first_token(request, first_s)

    def _fill_slots(self, newcomers: list[Request]) -> None:
        """Let ready sequences into the batch."""
        while self.ready_queue and self.batch < self.spec.max_running:
            request = self.ready_queue.popleft()
            tokens = request.prompt + request.generated
            request.state = DECODING
            request.context = tokens - self.steps - 1
            request.finish_step = self.steps + request.output - request.generated
            self.batch += 1
            self.context += tokens
            heappush(self._ends, (request.finish_step, request.order, request))
            self._growth.expect(request)
            newcomers.append(request)

    def _steps_ahead(self) -> int:
        """Steps until the first sequence ends or the pool may run out of pages."""
        ends = self._ends
        while True:
            step, _, request = ends[0]
            if request.finish_step == step and request.state == DECODING and request.decode is self:
                break
            heappop(ends)
        return min(step - self.steps, self._growth.steps_covered(self.steps))

    def _mixed_ends(self, head: Request, most: int) -> list[float]:
        """Ends of at most `most` steps that each carry a chunk of `head` beside the batch."""
        times, batch, context = self._times, self.batch, float(self.context)
        done, end, at_s = head.computed, head.prompt - 1 + head.generated, 0.0
        chunk = times.chunk_tokens
        shared_s = times.shared_base_s() if batch else 0.0
        ends: list[float] = []
        while done < end and len(ends) < most:
            size = min(chunk, end - done)
            at_s += times.chunk_s(size, done)
            if batch:
                line = times.decode_line(batch, context)
                at_s += line.base_s + line.slope_s * context - shared_s
                context += batch
            ends.append(at_s)
            done += size
        return ends

    # ------------------------------------------------------------ pages of running sequences

    def _sync_growth(self) -> None:
        """Take the pages that sequences have grown by up to now. Stretches are planned so that there are
        enough, so only the counts need to catch up before somebody looks at them."""
        stretch, started = self._stretch, self.steps
        # Steps of the running stretch before the first page is needed.
        steps = self._growth.next_step - started - 1
        if stretch is None:
            if steps >= 0:
                return
        elif steps >= stretch.count:
            return
        else:
            now_s = self._loop.now_s
            if steps > 0 and stretch.after_s(steps) > now_s - stretch.begin_s:
                return
            if now_s < stretch.begin_s + stretch.after_s(stretch.count):
                started += min(stretch.done_by(now_s) + 1, stretch.count)
        if self._growth.take(started):
            self.world.router.kv_changed(self)

    def _shorten_for_pages(self) -> None:
        """Pages were taken in the middle of a stretch: it may have to end before it runs out of them."""
        stretch = self._stretch
        if stretch is None or not self.batch or self._growth.next_step == NEVER:
            return
        count = max(self._growth.steps_covered(self.steps), stretch.next_boundary(self._loop.now_s))
        if count < stretch.count:
            self._cut(count)

    def _grow_or_preempt(self) -> None:
        """Pages for the step to come; whoever is youngest gives his up where there are none."""
        cache, growth = self.cache, self._growth
        while (request := growth.pop(self.steps + 1)) is not None:
            held = request.held
            assert held is not None
            while request.state == DECODING and not cache.grow(held, held.pages + 1):
                self._preempt(self._youngest(request))
            if request.state == DECODING:
                growth.expect(request)
        self.world.router.kv_changed(self)

    def _youngest(self, least: Request) -> Request:
        victim = least
        for request in self.live.values():
            in_engine = request.state in (WAITING, READY, DECODING)
            if in_engine and request.order > victim.order and request.held is not None and request.held.pages:
                victim = request
        return victim

    def _preempt(self, request: Request) -> None:
        """Take the pages; prompt and answer so far are computed again when it is its turn."""
        assert request.held is not None
        if request.state == DECODING:
            self.batch -= 1
            tokens = request.context + self.steps + 1
            self.context -= tokens
            request.generated = tokens - request.prompt
        elif request.state == READY:
            self.ready_queue.remove(request)
        self.cache.release(request.held)
        request.held = None
        request.computed = 0
        if request.state != WAITING:
            request.preempted = True
            request.state = WAITING
            insort(self.waiting, request, key=_order)

    def _prefill_head(self) -> Request | None:
        """The oldest prompt to prefill, with pages for all of it; None where there is none, or no pages."""
        while self.waiting:
            request = self.waiting[0]
            end = request.prompt - 1 + request.generated
            if request.held is None:
                request.held = self.cache.match(request.blocks)
                request.computed = request.held.published * self._page
            # A preempted one must get as far as its next token, or it would be preempted again at once.
            needed = -(-(end + request.preempted) // self._page)
            if self.cache.grow(request.held, needed):
                self.world.router.kv_changed(self)
                if request.computed < end:
                    return request
                self._prefill_done(request)
            elif not self._unpin_younger():
                if self.batch or self._others_hold_pages(request):
                    return None
                self._end_impossible(request)
        return None

    def _unpin_younger(self) -> bool:
        """Take back what prompts behind the first hold: they could block each other for ever."""
        for request in reversed(self.waiting[1:]):
            if request.held is not None and request.held.pages:
                if request.held.private and self.batch:
                    continue
                self._preempt(request)
                return True
        return False

    def _others_hold_pages(self, request: Request) -> bool:
        return any(r.held is not None and r.held.pages for r in self.live.values() if r is not request)

    def _end_impossible(self, request: Request) -> None:
        """Alone on the worker and still too large: live, the engine ends it with an error."""
        self.waiting.remove(request)
        request.state = ENDED
        del self.live[request.index]
        if request.held is not None:
            self.cache.release(request.held)
            request.held = None
        self._loop.at(self._loop.now_s, self._wake)
        self.world.failed_for_good(request, "engine_failed")


def _order(request: Request) -> int:
    return request.order

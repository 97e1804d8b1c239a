"""The engine's model once more, the slow way: one decode step, one chunk, one slice of a link at a time.

Shares nothing with `simulations.engine` but the description of the model. Pages and prefix caches are the
live `PagePool`. Placements are given; what is computed is when each request's first and last token come.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import insort
from dataclasses import dataclass, field

from prfaas.engine.interface import StepProfile
from prfaas.errors import OutOfPages
from prfaas.kv.pool import PagePool

SLICE_S = 2.5e-4
"""Links are shared anew this often."""


@dataclass
class Job:
    index: int
    arrival_s: float
    prompt: int
    output: int
    tokens: list[int]
    """Prompt's token ids: equal prefixes are equal prompts."""
    decode: str
    site: str | None = None
    pages: list[int] = field(default_factory=list)
    cached: int = 0
    computed: int = 0
    generated: int = 0
    started: bool = False
    rematch: bool = False
    order: int = 0
    first_s: float = -1.0
    end_s: float = -1.0
    preempted: int = 0
    moved_bytes: float = 0.0

    @property
    def sequence(self) -> list[int]:
        """Prompt and answer so far; answers' tokens are nobody else's."""
        return self.tokens + [1_000_000_000 + self.index * 100_000 + n for n in range(self.generated)]

    @property
    def prefill_end(self) -> int:
        return self.prompt - 1 + self.generated


@dataclass
class Flow:
    job: Job
    source: str
    target: str
    total: float
    knots: list[tuple[float, float]]
    """(time, bytes released by then), a line between each two; a jump is two knots of one time."""
    sent: float = 0.0

    def released(self, now_s: float) -> float:
        before = (0.0, 0.0)
        for at_s, level in self.knots:
            if at_s > now_s:
                if before == (0.0, 0.0):
                    return 0.0
                part = (now_s - before[0]) / (at_s - before[0])
                return before[1] + part * (level - before[1])
            before = (at_s, level)
        return before[1]


class Reference:
    """One run. All workers have the same step times and pool."""

    def __init__(
        self,
        profile: StepProfile,
        num_pages: int,
        page_size: int,
        max_running: int,
        *,
        page_bytes: float = 0.0,
        state_bytes: float = 0.0,
        layers: int = 1,
        nic_bytes_per_s: float = 0.0,
        rtt_s: float = 0.0,
        wan: dict[tuple[str, str], float] | None = None,
        cluster_of: dict[str, str] | None = None,
        wan_rtt_s: float = 0.0,
    ) -> None:
        self.profile, self.num_pages, self.page_size = profile, num_pages, page_size
        self.max_running = max_running
        self.page_bytes, self.state_bytes, self.layers = page_bytes, state_bytes, layers
        self.nic, self.rtt_s, self.wan_rtt_s = nic_bytes_per_s, rtt_s, wan_rtt_s
        self.wan, self.cluster_of = wan or {}, cluster_of or {}
        self.now_s = 0.0
        self.events: list = []
        self.count = itertools.count()
        self.decodes: dict[str, Decode] = {}
        self.prefills: dict[str, Prefill] = {}
        self.flows: list[Flow] = []
        self.ticking = False

    def at(self, when_s: float, call, *arguments) -> None:
        heapq.heappush(self.events, (when_s, next(self.count), call, arguments))

    def run(self, jobs: list[Job]) -> None:
        for job in jobs:
            self.at(job.arrival_s, self.arrive, job)
        while self.events:
            self.now_s, _, call, arguments = heapq.heappop(self.events)
            call(*arguments)

    def arrive(self, job: Job) -> None:
        decode = self.decodes.setdefault(job.decode, Decode(self))
        if job.site is not None:
            self.prefills.setdefault(job.site, Prefill(self, job.site))
        decode.accept(job)

    def half_way_s(self, job: Job) -> float:
        return self.between_s(job) / 2

    def between_s(self, job: Job) -> float:
        same = self.cluster_of.get(job.site or "") == self.cluster_of.get(job.decode)
        return self.rtt_s if same else self.wan_rtt_s

    # ------------------------------------------------------------ links

    def send(self, flow: Flow) -> None:
        if not self.nic:  # links without limits
            flow.sent = flow.total
            self.at(flow.knots[-1][0] + 1.5 * self.between_s(flow.job), self.landed, flow)
            return
        self.flows.append(flow)
        if not self.ticking:
            self.ticking = True
            self.at(self.now_s + SLICE_S, self.tick, self.now_s)

    def tick(self, since_s: float) -> None:
        """Share the slice that has just ended, by filling up in many small rounds."""
        elapsed_s = self.now_s - since_s
        left: dict[str, float] = {}
        for flow in self.flows:
            for pipe, capacity in self.pipes(flow):
                left[pipe] = capacity * elapsed_s
        wanted = {id(flow): max(0.0, flow.released(self.now_s) - flow.sent) for flow in self.flows}
        open_flows = [flow for flow in self.flows if wanted[id(flow)] > 0]
        while open_flows:
            users: dict[str, int] = {}
            for flow in open_flows:
                for pipe, _ in self.pipes(flow):
                    users[pipe] = users.get(pipe, 0) + 1
            share = min(
                min(left[pipe] / users[pipe] for pipe in users), min(wanted[id(f)] for f in open_flows)
            )
            for flow in open_flows:
                flow.sent += share
                wanted[id(flow)] -= share
                for pipe, _ in self.pipes(flow):
                    left[pipe] -= share
            open_flows = [
                flow
                for flow in open_flows
                if wanted[id(flow)] > 1e-6 and all(left[pipe] > 1e-6 for pipe, _ in self.pipes(flow))
            ]
        for flow in [flow for flow in self.flows if flow.sent >= flow.total - 1e-3]:
            self.flows.remove(flow)
            self.at(self.now_s - SLICE_S / 2 + 1.5 * self.between_s(flow.job), self.landed, flow)
        if self.flows:
            self.at(self.now_s + SLICE_S, self.tick, self.now_s)
        else:
            self.ticking = False

    def pipes(self, flow: Flow) -> list[tuple[str, float]]:
        found = [(f"{flow.source} out", self.nic), (f"{flow.target} in", self.nic)]
        way = self.cluster_of.get(flow.source, ""), self.cluster_of.get(flow.target, "")
        return [*found, (str(way), self.wan[way])] if way in self.wan else found

    def landed(self, flow: Flow) -> None:
        flow.job.moved_bytes += flow.sent
        self.prefills[flow.source].landed(flow.job)
        self.decodes[flow.target].complete(flow.job)


class Decode:
    def __init__(self, reference: Reference) -> None:
        self.r = reference
        self.pool = PagePool(reference.num_pages, reference.page_size)
        self.page_queue: list[Job] = []
        self.waiting: list[Job] = []
        self.ready: list[Job] = []
        self.decoding: list[Job] = []
        self.fetching = 0
        self.running = False
        self.orders = itertools.count(1)
        self.step: tuple[list[Job], Job | None, int] = ([], None, 0)

    def accept(self, job: Job) -> None:
        if job.site is not None:
            self.page_queue.append(job)
            self.serve()
            return
        match = self.pool.match(job.tokens, "", job.prompt - 1)
        job.pages, job.cached = match.page_ids, match.tokens
        self.submit(job)

    def submit(self, job: Job) -> None:
        job.order, job.computed = next(self.orders), job.cached
        if job.computed >= job.prompt - 1:
            self.ready.append(job)
        else:
            self.waiting.append(job)
        self.wake()

    def serve(self) -> None:
        while self.page_queue:
            job = self.page_queue[0]
            try:
                match, fresh = self.pool.match_and_allocate(job.tokens, "", job.prompt - 1)
            except OutOfPages:
                return
            del self.page_queue[0]
            job.pages, job.cached = match.page_ids + fresh, match.tokens
            if not fresh:
                job.site = None
                self.submit(job)
                continue
            self.fetching += 1
            self.r.at(self.r.now_s + self.r.half_way_s(job), self.r.prefills[job.site].grant, job)

    def complete(self, job: Job) -> None:
        self.pool.commit(job.tokens[: job.prompt - 1], job.pages)
        self.fetching -= 1
        job.order, job.computed = next(self.orders), job.prompt - 1
        self.ready.append(job)
        self.wake()

    def wake(self) -> None:
        if not self.running:
            self.plan()

    def grow(self, job: Job, tokens: int) -> bool:
        lacking = -(-tokens // self.r.page_size) - len(job.pages)
        if lacking > 0:
            try:
                job.pages += self.pool.allocate(lacking)
            except OutOfPages:
                return False
        return True

    def preempt(self, job: Job) -> None:
        job.preempted += 1
        self.pool.release(job.pages)
        job.pages, job.computed, job.started, job.rematch = [], 0, False, True
        for place in (self.decoding, self.ready):
            if job in place:
                place.remove(job)
        if job not in self.waiting:
            insort(self.waiting, job, key=lambda j: j.order)

    def youngest(self, least: Job) -> Job:
        holders = [j for j in (*self.waiting, *self.ready, *self.decoding) if j.pages]
        return max([least, *holders], key=lambda j: j.order)

    def plan(self) -> None:
        """The next step: one token of every running sequence, one chunk of the oldest prompt."""
        while True:
            while self.ready and len(self.decoding) < self.r.max_running:
                job = self.ready.pop(0)
                insort(self.decoding, job, key=lambda j: j.order)
            for job in list(self.decoding):
                while job in self.decoding and not self.grow(job, job.prompt + job.generated):
                    self.preempt(self.youngest(job))
            head = self.head()
            if not self.ready or len(self.decoding) >= self.r.max_running:
                break
        if not self.decoding and head is None:
            return
        p = self.r.profile
        length_s, chunk = 0.0, 0
        if self.decoding:
            context = sum(job.prompt + job.generated for job in self.decoding)
            length_s += p.decode_base_s + len(self.decoding) * p.decode_sequence_s
            length_s += context * p.decode_context_s
        if head is not None:
            chunk = min(p.chunk_tokens, head.prefill_end - head.computed)
            length_s += p.prefill_base_s + chunk * p.prefill_token_s
            length_s += chunk * (head.computed + chunk / 2) * p.prefill_context_s
            if self.decoding:
                length_s -= min(p.prefill_base_s, p.decode_base_s)
        self.running = True
        self.step = (list(self.decoding), head, chunk)
        self.r.at(self.r.now_s + length_s, self.end_step)

    def head(self) -> Job | None:
        while self.waiting:
            job = self.waiting[0]
            if job.rematch:
                match = self.pool.match(job.sequence, "", job.prompt - 1)
                job.pages, job.computed, job.rematch = match.page_ids, match.tokens, False
            if self.grow(job, job.prefill_end + (job.generated > 0)):
                if job.computed < job.prefill_end:
                    return job
                self.waiting.remove(job)
                self.ready.append(job)
                continue
            for other in reversed(self.waiting[1:]):
                if other.pages and not (self.decoding and other.started):
                    self.preempt(other)
                    break
            else:
                assert self.decoding or self.fetching, "the reference was given a case that cannot run"
                return None
        return None

    def end_step(self) -> None:
        batch, head, chunk = self.step
        for job in batch:
            job.generated += 1
            if job.first_s < 0:
                job.first_s = self.r.now_s
            if job.generated == job.output:
                job.end_s = self.r.now_s
                self.decoding.remove(job)
                self.pool.commit(job.sequence[:-1], job.pages)
                pages, job.pages = job.pages, []
                self.pool.release(pages)
                self.serve()
        if head is not None:
            head.started = True
            head.computed += chunk
            if head.computed == head.prefill_end:
                self.pool.commit(head.tokens[: head.prompt - 1], head.pages)
                self.waiting.remove(head)
                self.ready.append(head)
        self.running = False
        self.plan()


class Prefill:
    def __init__(self, reference: Reference, name: str) -> None:
        self.r, self.name = reference, name
        self.pool = PagePool(reference.num_pages, reference.page_size)
        self.queue: list[Job] = []
        self.busy: Job | None = None
        self.held: dict[int, list[int]] = {}
        self.flow_of: dict[int, Flow] = {}

    def grant(self, job: Job) -> None:
        """No early sending: tests give prefill workers too small a pool for it."""
        self.pool.release(self.pool.match(job.tokens, "", job.prompt - 1).page_ids)
        self.queue.append(job)
        self.start()

    def landed(self, job: Job) -> None:
        self.pool.release(self.held.pop(job.index))
        self.start()

    def start(self) -> None:
        while self.busy is None and self.queue:
            job = self.queue[0]
            try:
                match, fresh = self.pool.match_and_allocate(job.tokens, "", job.prompt - 1)
            except OutOfPages:
                return
            del self.queue[0]
            self.held[job.index] = match.page_ids + fresh
            self.compute(job, match.tokens)

    def compute(self, job: Job, cached: int) -> None:
        """Chunk after chunk; each releases its bytes evenly while it runs, the last one's last layer and the
        fixed state at its end."""
        r, p, page = self.r, self.r.profile, self.r.page_size
        here = job.cached
        total_pages = -(-(job.prompt - 1) // page) - here // page
        total = total_pages * r.page_bytes + r.state_bytes
        hot = max(0, cached - here) // page * r.page_bytes
        knots = [(r.now_s, hot)]
        begin = max(cached, here)
        per_token = (total - r.state_bytes - hot) / max(job.prompt - 1 - begin, 1)
        at_s, done = r.now_s, cached
        last = 0.0
        while done < job.prompt - 1:
            chunk = min(p.chunk_tokens, job.prompt - 1 - done)
            length_s = p.prefill_base_s + chunk * p.prefill_token_s
            length_s += chunk * (done + chunk / 2) * p.prefill_context_s
            if done < begin < done + chunk:
                knots.append((at_s + length_s * (begin - done) / chunk, hot))
            at_s += length_s
            last = (done + chunk - max(begin, done)) * per_token
            done += chunk
            knots.append((at_s, hot + max(0, done - begin) * per_token))
        knots[-1] = (at_s, knots[-1][1] - last / r.layers) if done > cached else knots[-1]
        knots.append((at_s + 1e-12, total))
        self.flow_of[job.index] = Flow(job, self.name, job.decode, total, knots)
        self.r.send(self.flow_of[job.index])
        if at_s > r.now_s:
            self.busy = job
            self.r.at(at_s, self.computed, job)

    def computed(self, job: Job) -> None:
        self.busy = None
        self.pool.commit(job.tokens[: job.prompt - 1], self.held[job.index])
        self.start()

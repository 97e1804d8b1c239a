"""Everything that a run consists of, and the life of a request through it.

As live, only the gateway's side places: a worker that cannot go on says so, and the scheduler is asked
again, with the worker at fault to be avoided.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import TYPE_CHECKING

from prfaas.protocol.messages import PrefillReport
from router.core.decision import Decision, NoCapacity
from router.core.events import Failed, Finished, FirstToken, PlaceRequest, PrefillReported
from simulations.engine.decode_worker import DecodeWorker
from simulations.engine.links import Links, Meter, Pipe, Stream
from simulations.engine.loop import Loop
from simulations.engine.machine import Machine, SharedStepTimes
from simulations.engine.prefill_worker import PrefillWorker
from simulations.engine.recorder import Recorder
from simulations.engine.request import ENDED, FETCHING, QUEUED, Request
from simulations.engine.worker_spec import WorkerSpec as WorkerSpec

if TYPE_CHECKING:
    from simulations.engine.router_side import RouterSide, Worker
    from simulations.hardware.step_times import StepTimes

MAX_ATTEMPTS = 3
"""As the gateway's `max_attempts` by default."""
FIRST_PAUSE_S = 0.05
"""Before an attempt that must use a worker which has just failed it; doubles with each attempt."""

COLD_AFTER_S = 10.0
"""A connection that was not used for this long has lost its rate: TCP's window, path caches."""


class World:
    """The parts of one run; `simulations.engine.build` puts them together."""

    def __init__(
        self,
        loop: Loop,
        recorder: Recorder,
        *,
        page_bytes: float,
        state_bytes: float,
        layers: int,
        max_tokens: int,
    ) -> None:
        self.loop = loop
        self.recorder = recorder
        self.links = Links(loop)
        self.router: RouterSide
        self.workers: dict[str, Worker] = {}
        self.machines: dict[str, Machine] = {}
        self.page_bytes = page_bytes
        self.state_bytes = state_bytes
        self.layers = layers
        self.network: Network
        self.max_tokens = max_tokens
        """What every client is held to ask for. One number for all: it must not tell lengths apart."""
        self.unfinished = recorder.requests
        self.on_ended: list[Callable[[Request], None]] = []
        self.on_idle: Callable[[Worker], None] = lambda worker: None
        """Called when a draining worker has nothing left."""
        self.retired_s: dict[str, float] = {}
        """Busy seconds of former incarnations."""
        self._rows: dict[str, int] = {}

    def add_worker(self, worker: Worker) -> None:
        """A worker, or the next incarnation of one that is gone."""
        former = self.workers.get(worker.name)
        if former is not None:
            self.retired_s[worker.name] = self.retired_s.get(worker.name, 0.0) + former.busy_s
        self._rows.setdefault(worker.name, len(self._rows))
        self.workers[worker.name] = worker

    def step_times(self, spec: WorkerSpec) -> StepTimes:
        """Of a worker: its hardware's, slowed by the others on its machine where it shares one."""
        if spec.machine is None:
            return spec.times
        return SharedStepTimes(spec.times, partial(self.machines[spec.machine].slowdown, spec.name))

    @property
    def worker_names(self) -> tuple[str, ...]:
        """In the order that rows of a result count."""
        return tuple(self._rows)

    # ------------------------------------------------------------ placing

    def arrive(self, request: Request) -> None:
        """A client sends the request."""
        self.recorder.arrival_s[request.index] = request.arrival_s
        self._place(request)

    def _place(self, request: Request) -> None:
        request.attempt += 1
        now_s = self.loop.now_s
        try:
            decision = self.router.place(
                PlaceRequest(
                    request_id=request.id,
                    prompt_tokens=request.prompt,
                    max_tokens=self.max_tokens,
                    arrival_s=request.arrival_s,
                    block_hashes=request.blocks,
                    attempt=request.attempt,
                    session=request.session,
                    avoid=request.avoid,
                    now_s=now_s,
                )
            )
        except NoCapacity as refusal:
            request.state = ENDED
            self.recorder.refused(request, refusal.reason, now_s)
            self._over(request)
            return
        self._carry_out(request, decision)

    def _carry_out(self, request: Request, decision: Decision) -> None:
        chosen, candidates = decision.chosen, decision.candidates
        decode, site = candidates.pair(chosen)
        self.recorder.placed(request, decision, self._rows[decode], self._rows[site])
        if request.attempt > 1:
            request.restart()
        request.placed_s = self.loop.now_s
        worker = self.workers[decode]
        assert isinstance(worker, DecodeWorker), f"{decode} was placed on as a decode worker"
        request.decode = worker
        if site != decode:
            source = self.workers[site]
            assert isinstance(source, PrefillWorker), f"{site} was placed on as a prefill worker"
            request.site = source
        if request.avoid and (decode in request.avoid or site in request.avoid):
            pause_s = FIRST_PAUSE_S * 2**request.attempt
            self.loop.at(self.loop.now_s + pause_s, self._begin, (request, request.attempt))
        else:
            self._begin((request, request.attempt))

    def _begin(self, argument: tuple[Request, int]) -> None:
        request, attempt = argument
        if request.attempt != attempt or request.state != QUEUED:
            return
        worker = request.decode
        assert worker is not None
        if not worker.alive:
            self.attempt_failed(request, worker.name, "peer_lost")
        elif not worker.ready:
            self.attempt_failed(request, worker.name, "draining")
        elif len(worker.live) - worker.batch >= worker.spec.max_queue:
            self.attempt_failed(request, worker.name, "overloaded")
        else:
            worker.accept(request)

    # ------------------------------------------------------------ prefill elsewhere

    def grant(self, request: Request) -> None:
        """The decode worker has pages: its grant goes to the prefill worker."""
        site, decode = request.site, request.decode
        assert site is not None
        assert decode is not None
        delay_s = self.network.rtt_s(site.spec.cluster, decode.spec.cluster) / 2
        self.loop.at(self.loop.now_s + delay_s, self.granted, (request, request.attempt))

    def granted(self, argument: tuple[Request, int]) -> None:
        request, attempt = argument
        if request.attempt != attempt or request.state != FETCHING:
            return
        site = request.site
        assert site is not None
        assert request.decode is not None
        if not site.alive or not site.ready:
            self.prefill_failed(request, "draining" if site.alive else "peer_lost")
        elif self.network.is_down(site.spec.cluster, request.decode.spec.cluster):
            self.network.on_cut(request)
        else:
            site.grant(request)

    def open_stream(self, request: Request) -> Stream:
        """The way of the prompt's KV from its prefill to its decode worker."""
        site, decode = request.site, request.decode
        assert site is not None
        assert decode is not None
        page = decode.spec.page_size
        pages = -(-(request.prompt - 1) // page) - request.cached // page
        source, target = site.spec.cluster, decode.spec.cluster
        rtt_s = self.network.rtt_s(source, target)
        meter = site.meters.get(target)
        if meter is None:
            meter = site.meters[target] = Meter(rtt_s)
        tail_s = 1.5 * rtt_s + self.network.cold_s(site.name, decode.name, source, target)
        total = pages * self.page_bytes + self.state_bytes
        pipes = self.network.pipes(site.name, decode.name, source, target)
        return Stream(pipes, meter, total, tail_s, self._landed, (request, request.attempt))

    def _landed(self, stream: Stream) -> None:
        request, attempt = stream.owner
        if request.attempt != attempt or request.state != FETCHING:
            return
        decode, site = request.decode, request.site
        request.stream = None
        sent = int(stream.total)
        self.recorder.kv_bytes[request.index] += sent
        self.prefilled(request, site.report(request, self.loop.now_s - request.placed_s, sent))
        if site.alive:
            site.landed(request)
        decode.kv_complete(request)
        self._look_if_idle(site)

    def prefilled(self, request: Request, report: PrefillReport) -> None:
        """The prompt's KV is complete on the decode worker."""
        row = request.index
        self.recorder.decode_cached[row] = report.decode_cached_tokens
        self.recorder.site_cached[row] = report.cached_tokens
        self.router.hear(
            PrefillReported(
                request_id=request.id,
                attempt=request.attempt,
                report=report,
                now_s=self.router.due_s(self.loop.now_s),
            )
        )

    # ------------------------------------------------------------ the answer

    def first_token(self, request: Request, at_s: float) -> None:
        """The answer's first token will be there at `at_s`, at the end of the step that has just begun."""
        request.first_token_s = at_s
        due_s = self.router.due_s(at_s)
        self.router.hear(FirstToken(request_id=request.id, ttft_s=due_s - request.arrival_s, now_s=due_s))

    def finished(self, request: Request) -> None:
        """The last token is there."""
        now_s = self.loop.now_s
        self.recorder.served(request, now_s)
        self.router.hear(
            Finished(request_id=request.id, completion_tokens=request.output, now_s=self.router.due_s(now_s))
        )
        worker = request.decode
        assert worker is not None
        self._over(request)
        self._look_if_idle(worker)

    # ------------------------------------------------------------ failures

    def prefill_failed(self, request: Request, reason: str) -> None:
        """The prefill leg is over without a complete prompt. What has arrived of it is dropped (live, its
        longest complete prefix stays cached)."""
        site, decode = request.site, request.decode
        assert site is not None
        assert decode is not None
        self.end_sending(request)
        decode.give_up(request)
        self._look_if_idle(decode)
        self.attempt_failed(request, site.name, reason)

    def end_sending(self, request: Request) -> None:
        """Nothing more is computed or sent for this attempt."""
        site = request.site
        if request.stream is not None:
            self.links.drop(request.stream)
            self.recorder.kv_bytes[request.index] += int(request.stream.sent)
            request.stream = None
        if site is not None and site.alive and site.live.get(request.index) is request:
            site.give_up(request)
            self._look_if_idle(site)

    def attempt_failed(self, request: Request, site: str, reason: str) -> None:
        """The gateway hears of it and places again, unless text was streamed or it was the last attempt."""
        now_s = self.loop.now_s
        streamed = 0 <= request.first_token_s <= now_s
        request.state = ENDED
        due_s = self.router.due_s(now_s)
        self.router.hear(
            Failed(request_id=request.id, attempt=request.attempt, site=site, reason=reason, now_s=due_s)
        )
        if streamed or request.attempt >= MAX_ATTEMPTS:
            self.recorder.failed(request, reason, now_s)
            self._over(request)
            return
        request.first_token_s = -1.0
        request.avoid = tuple(sorted({*request.avoid, site}))
        self.loop.at(due_s, self._again, (request, request.attempt))

    def failed_for_good(self, request: Request, reason: str) -> None:
        """Trying again would not help."""
        decode = request.decode
        assert decode is not None
        now_s = self.loop.now_s
        self.router.hear(
            Failed(
                request_id=request.id,
                attempt=request.attempt,
                site=decode.name,
                reason=reason,
                now_s=self.router.due_s(now_s),
            )
        )
        self.recorder.failed(request, reason, now_s)
        self._over(request)
        self._look_if_idle(decode)

    def _again(self, argument: tuple[Request, int]) -> None:
        request, attempt = argument
        if request.attempt == attempt:
            self._place(request)

    def _look_if_idle(self, worker: Worker) -> None:
        """A draining worker with nothing left is told so, once it is through with what it is doing."""
        if not worker.ready and worker.alive and not worker.live:
            self.loop.at(self.loop.now_s, self.on_idle, worker)

    def _over(self, request: Request) -> None:
        self.unfinished -= 1
        for listener in self.on_ended:
            listener(request)

    # ------------------------------------------------------------ work done

    def busy_s(self, worker: Worker, now_s: float) -> float:
        """Busy seconds under this name so far, what runs now included."""
        return self.retired_s.get(worker.name, 0.0) + worker.busy_s + worker.running_s(now_s)

    def total_busy_s(self, name: str) -> float:
        """Busy seconds of a worker or link direction over the run."""
        if name in self.workers:
            return self.busy_s(self.workers[name], self.loop.now_s)
        pipe = self.network.link_pipes[name]
        return pipe.moved / pipe.nominal


class Network:
    """Which pipes lie between two workers."""

    def __init__(self, loop: Loop, local_rate: dict[str, float], local_rtt_s: float, ramp_s: float) -> None:
        """
        Args:
            local_rate: bytes per second of each worker's network, in and out, by cluster.
            ramp_s: what a transfer loses on a connection between clusters that has gone cold.
        """
        self._loop = loop
        self._ramp_s = ramp_s
        self._used_s: dict[tuple[str, str], float] = {}
        self.link_pipes: dict[str, Pipe] = {}
        """By direction, `source->target`."""
        self.on_cut: Callable[[Request], None] = lambda request: None
        """Called with a request whose grant meets a link that is down."""
        self._local_rate = local_rate
        self._local_rtt_s = local_rtt_s
        self._rtts_s: dict[tuple[str, str], float] = {}
        self._out: dict[str, Pipe] = {}
        self._in: dict[str, Pipe] = {}

    def add_link(self, clusters: tuple[str, str], bytes_per_s: float, rtt_s: float) -> None:
        for source, target in (clusters, clusters[::-1]):
            name = f"{source}->{target}"
            self.link_pipes[name] = Pipe(name, bytes_per_s)
            self._rtts_s[source, target] = rtt_s

    def rtt_s(self, source: str, target: str) -> float:
        return self._local_rtt_s if source == target else self._rtts_s[source, target]

    def is_down(self, source: str, target: str) -> bool:
        return source != target and self.link_pipes[f"{source}->{target}"].capacity <= 0

    def cold_s(self, sender: str, receiver: str, source: str, target: str) -> float:
        """What the next transfer over this connection loses: the ramp, if it was not used lately."""
        if source == target or not self._ramp_s:
            return 0.0
        now_s = self._loop.now_s
        last_s = self._used_s.get((sender, receiver), -inf)
        self._used_s[sender, receiver] = now_s
        return self._ramp_s if now_s - last_s > COLD_AFTER_S else 0.0

    def pipes(self, sender: str, receiver: str, source: str, target: str) -> tuple[Pipe, ...]:
        out = self._out.get(sender)
        if out is None:
            out = self._out[sender] = Pipe(f"{sender} out", self._local_rate[source])
        into = self._in.get(receiver)
        if into is None:
            into = self._in[receiver] = Pipe(f"{receiver} in", self._local_rate[target])
        if source == target:
            return out, into
        return out, self.link_pipes[f"{source}->{target}"], into

"""Life of one choice: place, run on the decode worker, and place again when an attempt fails.

Only the gateway places. A worker that cannot go on says so with a typed failure; nothing here falls back
by itself to another site: the scheduler is asked again, with the workers that failed to be avoided.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

from prfaas.config import GatewayConfig, TimeoutsConfig
from prfaas.protocol.messages import (
    Finished,
    GenerateFrame,
    GenerateRequest,
    Prefilled,
    PrefillSite,
    Sampling,
    Tokens,
)
from prfaas.protocol.openai_errors import ApiError
from router.answer import Placed, Restarted, Update
from router.backends.base import Backend
from router.brain import Brain
from router.core import events
from router.core.decision import Decision, NoCapacity
from router.errors import AttemptFailed, failure_answer, verdict
from router.metrics import GatewayMetrics
from router.trace import Trace
from router.watch import Watch
from router.workers import Workers

logger = logging.getLogger(__name__)
FIRST_PAUSE_S = 0.05
"""Before an attempt that must use a worker which just failed; doubles with each attempt."""
SHORTEST_ATTEMPT_S = 0.25
"""With less time left than this no further attempt is worth its load."""
GATEWAY_SITE = "gateway"
"""Names ourselves as the site of a failure."""
Emit = Callable[[Update], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One choice to generate, ready to be placed."""

    request_id: str
    """Unique among choices, and unchanged over attempts."""
    token_ids: list[int]
    block_hashes: tuple[int, ...]
    sampling: Sampling
    arrival_s: float
    """When the last body byte was read, on the gateway's clock."""
    cache_salt: str = ""
    session: str = ""
    """Conversation, where the client names one."""
    streaming: bool = False
    """Tokens reach the client as they come: after the first, no other attempt can take over."""
    pair: tuple[str, str] | None = None
    """Warm-up: (decode worker, prefill site) to use whatever the policy says."""

    def place_request(self, attempt: int, avoid: frozenset[str], now_s: float) -> events.PlaceRequest:
        """The scheduler's input."""
        return events.PlaceRequest(
            request_id=self.request_id,
            prompt_tokens=len(self.token_ids),
            max_tokens=self.sampling.max_tokens,
            arrival_s=self.arrival_s,
            block_hashes=self.block_hashes,
            attempt=attempt,
            session=self.session,
            avoid=tuple(sorted(avoid)),
            pair=self.pair,
            now_s=now_s,
        )


class Dispatcher:
    """Carries out jobs."""

    def __init__(
        self,
        brain: Brain,
        workers: Workers,
        backend: Backend,
        metrics: GatewayMetrics,
        gateway: GatewayConfig,
        timeouts: TimeoutsConfig,
    ) -> None:
        self._brain = brain
        self._workers = workers
        self._backend = backend
        self._metrics = metrics
        self._gateway = gateway
        self._timeouts = timeouts

    async def run(self, job: Job, trace: Trace, emit: Emit) -> None:
        """Generate one choice; every update goes to `emit`, the last one is `Finished`.

        Raises:
            ApiError: the request failed for good.
        """
        avoid: frozenset[str] = frozenset()
        failure: AttemptFailed | None = None
        for attempt in range(1, self._gateway.max_attempts + 1):
            decision = self._place(job, attempt, avoid, failure, trace)
            emit(_placed(decision))
            again = failure is not None and bool({decision.decode, decision.site} & avoid)
            try:
                await self._attempt(job, decision, trace, emit, FIRST_PAUSE_S * 2**attempt if again else 0.0)
                return
            except AttemptFailed as error:
                failure = error
                if not self._may_replan(job, trace, error):
                    raise failure_answer(error, attempt) from error
            avoid |= {failure.site}
            self._metrics.migrations.labels(failure.reason).inc()
            emit(Restarted())
        assert failure is not None
        raise failure_answer(failure, self._gateway.max_attempts) from failure

    def _place(
        self,
        job: Job,
        attempt: int,
        avoid: frozenset[str],
        failure: AttemptFailed | None,
        trace: Trace,
    ) -> Decision:
        started_s = time.perf_counter()
        try:
            decision = self._brain.place(job.place_request(attempt, avoid, self._brain.now()))
        except NoCapacity as refusal:
            if failure is not None and failure.reason == "overloaded":
                raise failure_answer(failure, attempt - 1) from refusal
            raise no_capacity(refusal, failure) from refusal
        trace.placed(decision, job.sampling.max_tokens, time.perf_counter() - started_s)
        return decision

    def _may_replan(self, job: Job, trace: Trace, failure: AttemptFailed) -> bool:
        if job.streaming and trace.has_first_token:
            return False
        if failure.reason == "deadline":
            # A worker's own deadline (a lease, say) may pass long before the request's.
            return failure.site != GATEWAY_SITE and min(self._time_left(job)) > SHORTEST_ATTEMPT_S
        if not verdict(failure.reason).retry:
            return False
        # A full queue is a refusal, not a failed prefill: it is placed again whatever the setting.
        return failure.reason == "overloaded" or self._gateway.on_prefill_failure == "replan"

    async def _attempt(self, job: Job, decision: Decision, trace: Trace, emit: Emit, pause_s: float) -> None:
        """Run one placed attempt after a pause; its booking is given back however it ends."""
        booked = True
        try:
            if pause_s:
                await asyncio.sleep(pause_s)
            await self._stream(job, decision, trace, emit)
            booked = False
        except AttemptFailed as failure:
            booked = False
            logger.warning(
                "event=attempt_failed request=%s attempt=%d decode=%s site=%s at_fault=%s reason=%s why=%s",
                job.request_id, decision.attempt, decision.decode, decision.site,
                failure.site, failure.reason, failure,
            )  # fmt: skip
            trace.failed(failure.reason, str(failure))
            self._brain.apply(
                events.Failed(
                    request_id=job.request_id,
                    attempt=decision.attempt,
                    site=failure.site,
                    reason=failure.reason,
                    now_s=self._brain.now(),
                )
            )
            raise
        finally:
            if booked:
                self._brain.apply(events.Released(request_id=job.request_id, now_s=self._brain.now()))

    async def _stream(self, job: Job, decision: Decision, trace: Trace, emit: Emit) -> None:
        """Follow the decode worker's frames within the deadlines."""
        first_token_s, whole_s = self._time_left(job)
        watch: Watch | None = None
        finished = False
        try:
            async with asyncio.timeout(min(first_token_s, whole_s)) as timeout:
                with self._workers.watches.on(decision.decode, timeout) as watch:
                    request = self._request(job, decision, whole_s)
                    url = self._workers.site(decision.decode).url
                    async with aclosing(self._backend.generate(decision.decode, url, request)) as frames:
                        async for frame in frames:
                            self._hear(frame, job, decision, trace, watch)
                            finished = isinstance(frame, Finished)
                            if isinstance(frame, Prefilled):
                                emit(frame.report)
                            elif isinstance(frame, Tokens | Finished):
                                emit(frame)
        except TimeoutError as error:
            if finished:
                return
            if watch is not None and watch.lost:
                raise AttemptFailed(decision.decode, "peer_lost", "the decode worker is lost") from error
            stage = "request" if trace.has_first_token else "first token"
            raise AttemptFailed(GATEWAY_SITE, "deadline", f"the {stage} deadline has passed") from error

    def _hear(self, frame: GenerateFrame, job: Job, decision: Decision, trace: Trace, watch: Watch) -> None:
        """Pass one frame on to the scheduler and the record."""
        now_s = self._brain.now()
        match frame:
            case Prefilled(report=report):
                trace.prefilled(report)
                self._brain.apply(
                    events.PrefillReported(
                        request_id=job.request_id, attempt=decision.attempt, report=report, now_s=now_s
                    )
                )
            case Tokens():
                first = not trace.has_first_token
                trace.tokens(frame)
                if first:
                    watch.extend_to(self._time_left(job)[1])
                    self._brain.apply(
                        events.FirstToken(
                            request_id=job.request_id, ttft_s=now_s - job.arrival_s, now_s=now_s
                        )
                    )
            case Finished():
                trace.finished(frame)
                self._brain.apply(
                    events.Finished(
                        request_id=job.request_id, completion_tokens=frame.completion_tokens, now_s=now_s
                    )
                )

    def _request(self, job: Job, decision: Decision, deadline_s: float) -> GenerateRequest:
        site: PrefillSite | None = None
        if decision.prefill_worker is not None:
            site = self._workers.site(decision.prefill_worker)
        return GenerateRequest(
            request_id=job.request_id,
            attempt=decision.attempt,
            token_ids=job.token_ids,
            sampling=job.sampling,
            prefill=site,
            cache_salt=job.cache_salt,
            deadline_s=max(0.001, deadline_s),
        )

    def _time_left(self, job: Job) -> tuple[float, float]:
        """Seconds left for (the first token, the whole request); never negative."""
        spent_s = self._brain.now() - job.arrival_s
        return max(0.0, self._timeouts.first_token - spent_s), max(0.0, self._timeouts.request - spent_s)


def no_capacity(refusal: NoCapacity, failure: AttemptFailed | None = None) -> ApiError:
    """The client's error when the scheduler cannot place."""
    after = "" if failure is None else f" (after {failure.site}: {failure.reason}: {failure})"
    return ApiError(
        refusal.http_status,
        f"{refusal}{after}",
        code=refusal.reason,
        retry_after_s=refusal.retry_after_s or None,
    )


def _placed(decision: Decision) -> Placed:
    return Placed(
        attempt=decision.attempt,
        kind=decision.kind.label,
        decode=decision.decode,
        site=decision.site,
        summary=decision.header,
    )

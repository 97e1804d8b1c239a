"""Follows one choice through its attempts: fills its decision records and the metrics drawn from them."""

from __future__ import annotations

import time
from collections.abc import Callable

from policies.types import Outcome
from prfaas.config import Config
from prfaas.protocol.messages import Finished, PrefillReport, Tokens
from router.core.decision import Decision
from router.decision_log import FIRST_TEXT_CHARS, DecisionLog, DecisionRecord
from router.metrics import GatewayMetrics


class Recorder:
    """What all traces share."""

    def __init__(
        self,
        config: Config,
        log: DecisionLog,
        metrics: GatewayMetrics,
        now: Callable[[], float],
        page_size: int,
    ) -> None:
        self.log = log
        self.metrics = metrics
        self.now = now
        self.page_size = page_size
        self._config = config
        self._live: dict[str, Trace] = {}
        """Traces with a running attempt, by their request id."""

    def outcome(self, outcome: Outcome) -> None:
        """The scheduler's verdict on a placed request: what each term was, as it defines the terms."""
        trace = self._live.get(outcome.request_id)
        if trace is not None:
            trace.learned(outcome)

    def began(self, request_id: str, trace: Trace) -> None:
        self._live[request_id] = trace

    def ended(self, request_id: str) -> None:
        self._live.pop(request_id, None)

    def link_between(self, decode: str, site: str) -> tuple[str, float] | None:
        """(name, configured bytes per second) of the link that joins two workers' clusters."""
        found = self._config.link_between(self._config.worker(decode)[0], self._config.worker(site)[0])
        return None if found is None else (found[0], float(found[1].capacity))

    def trace(self, arrival_s: float, overhead_s: dict[str, float], *, calibration: bool = False) -> Trace:
        return Trace(self, arrival_s, overhead_s, calibration)


class Trace:
    """One choice's records, one per attempt; the last one is current."""

    def __init__(
        self, recorder: Recorder, arrival_s: float, overhead_s: dict[str, float], calibration: bool
    ) -> None:
        self._recorder = recorder
        self._arrival_s = arrival_s
        self._overhead_s = overhead_s
        self._calibration = calibration
        self._record: DecisionRecord | None = None
        self._link: tuple[str, float] | None = None
        self._placed_s = 0.0
        self._first_token_s: float | None = None
        self._wrote_s: float | None = None
        self._last_frame_s = 0.0
        self.phase = "prepare"
        """One of `router.metrics.PHASES`; stays the last one when all is over."""
        self._counted = False

    @property
    def attempts(self) -> int:
        return 0 if self._record is None else self._record.attempt

    @property
    def has_first_token(self) -> bool:
        return self._first_token_s is not None

    def placed(self, decision: Decision, max_tokens: int, place_s: float) -> None:
        """A new attempt begins."""
        metrics = self._recorder.metrics
        self._link = self._recorder.link_between(decision.decode, decision.site)
        self._placed_s = self._recorder.now() - self._arrival_s
        self._first_token_s = self._wrote_s = None
        self._record = DecisionRecord(
            request_id=decision.request_id,
            attempt=decision.attempt,
            time_unix_s=time.time(),
            calibration=self._calibration,
            prompt_tokens=decision.prompt_tokens,
            max_tokens=max_tokens,
            kind=decision.kind.label,
            decode=decision.decode,
            site=decision.site,
            link=None if self._link is None else self._link[0],
            predicted_ttft_s=decision.ttft_s,
            decision=decision.as_record(),
            overhead_s={**self._overhead_s, "place": place_s},
        )
        self._recorder.log.opened(self._record)
        self._recorder.began(decision.request_id, self)
        self._enter("prefill")
        reason = "least_cost" if decision.least_cost else "policy"
        metrics.decisions.labels(decision.kind.label, reason).inc()
        for stage, seconds in self._record.overhead_s.items():
            metrics.overhead.labels(stage).observe(seconds)
        metrics.overhead.labels("total").observe(sum(self._record.overhead_s.values()))
        cached = decision.candidates.site_cached_tokens
        if int(cached[decision.chosen]) < int(cached.max()):
            metrics.non_max_overlap.inc()
        metrics.hit_rate_predicted.observe(int(cached[decision.chosen]) / max(1, decision.prompt_tokens))

    def prefilled(self, report: PrefillReport) -> None:
        """How the prompt's KV came to be; may be told after the first token."""
        record = self._current()
        record.report = report
        record.actual["ready_s"] = report.ready_s
        if self._link is not None and report.kv_bytes > 0:
            at_rate_s = report.kv_bytes / self._link[1]
            record.hidden_fraction = max(0.0, 1 - report.tail_s / at_rate_s)

    def tokens(self, tokens: Tokens) -> None:
        """A frame of tokens has arrived."""
        record = self._current()
        now_s = self._recorder.now() - self._arrival_s
        if self._first_token_s is None:
            self._first_token_s = now_s
            self._enter("decode")
        elif tokens.token_ids:
            gap_s = (now_s - self._last_frame_s) / len(tokens.token_ids)
            self._recorder.metrics.inter_token.observe(gap_s)
        self._last_frame_s = now_s
        if len(record.first_text) < FIRST_TEXT_CHARS:
            record.first_text = (record.first_text + tokens.text)[:FIRST_TEXT_CHARS]

    def wrote(self) -> None:
        """Content was written to the client."""
        if self._wrote_s is None:
            self._wrote_s = self._recorder.now() - self._arrival_s

    def finished(self, finished: Finished) -> None:
        record = self._current()
        record.outcome = "ok"
        record.completion_tokens = finished.completion_tokens

    def learned(self, outcome: Outcome) -> None:
        """The scheduler has compared predicted with actual terms."""
        record = self._current()
        record.actual.update((name, actual_s) for name, (_, actual_s) in outcome.terms.items())

    def failed(self, reason: str, message: str) -> None:
        """The current attempt is over without an answer; its record is final."""
        record = self._current()
        record.outcome, record.error = reason, message
        self._recorder.metrics.transfer_failures.labels(reason).inc()
        self._close(record)

    def close(self) -> None:
        """The response has ended, one way or another."""
        record = self._record
        if record is None or record.total_s is not None:
            return
        if record.outcome == "running":
            record.outcome = "client_gone"
        self._close(record)

    def _close(self, record: DecisionRecord) -> None:
        record.total_s = self._recorder.now() - self._arrival_s
        self._recorder.ended(record.request_id)
        self._enter("")
        first_s = self._wrote_s if self._wrote_s is not None else self._first_token_s
        if record.report is not None and self._first_token_s is not None:
            ready_s = self._placed_s + record.report.ready_s
            record.actual["step_s"] = max(0.0, self._first_token_s - ready_s)
        if first_s is not None:
            record.ttft_s = record.actual["ttft_s"] = first_s
        self._recorder.log.closed(record)
        if record.outcome == "ok":
            self._measure(record)

    def _measure(self, record: DecisionRecord) -> None:
        metrics, report = self._recorder.metrics, record.report
        metrics.input_tokens.observe(record.prompt_tokens)
        metrics.output_tokens.observe(record.completion_tokens)
        if record.ttft_s is not None and not record.calibration:
            metrics.ttft.labels(record.kind).observe(record.ttft_s)
        if report is not None:
            self._measure_prefill(record, report)
        if not record.calibration:
            self._compare(record)

    def _measure_prefill(self, record: DecisionRecord, report: PrefillReport) -> None:
        metrics = self._recorder.metrics
        metrics.cached_tokens.observe(report.cached_tokens)
        metrics.hit_rate.observe(report.cached_tokens / max(1, record.prompt_tokens))
        metrics.queue_wait.observe(report.queue_s)
        metrics.prefill_duration.observe(report.prefill_s)
        lost_tokens = int(record.decision["chosen"]["site_cached_tokens"]) - report.cached_tokens
        if lost_tokens > 0:
            metrics.overlap_blocks_lost.inc(lost_tokens / self._recorder.page_size)
        if report.kv_bytes:
            metrics.transfer_bytes.labels(record.link or "local").inc(report.kv_bytes)
            metrics.transfer_duration.observe(report.transfer_s)
            metrics.transfer_tail.observe(report.tail_s)

    def _compare(self, record: DecisionRecord) -> None:
        """Predicted against actual, for every term that was measured."""
        metrics, predicted = self._recorder.metrics, dict(record.decision["chosen"])
        predicted["ready_s"] = predicted["start_s"] + predicted["prefill_s"] + predicted["transfer_s"]
        for name, actual_s in record.actual.items():
            term = name.removesuffix("_s")
            # Learned overheads may be below 0, and a histogram's sum must not fall.
            metrics.predicted.labels(term).observe(max(0.0, predicted[name]))
            metrics.actual.labels(term).observe(max(0.0, actual_s))
            if actual_s > 0:
                error = abs(predicted[name] - actual_s) / actual_s
                metrics.prediction_error.labels(term).observe(error)

    def _enter(self, phase: str) -> None:
        """Count this choice in `phase` from here on; empty = it is over, and `phase` stays what it was."""
        gauge = self._recorder.metrics.stage_requests
        if self._counted:
            gauge.labels("worker", self.phase).dec()
        self._counted = bool(phase)
        if phase:
            self.phase = phase
            gauge.labels("worker", phase).inc()

    def _current(self) -> DecisionRecord:
        if self._record is None:
            raise RuntimeError("the trace has no attempt yet")
        return self._record

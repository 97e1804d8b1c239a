"""What the gateway counts and measures, in Prometheus' form (names follow the field's, prefix `prfaas_`)."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)
_MICRO = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.5, 1)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_RATIO = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5)

TERMS = ("start", "prefill", "transfer", "ready", "step", "overhead", "ttft")
"""Cost terms whose prediction is compared with what happened; `ready` = start + prefill + transfer. For the
others there is no measurement: nobody sees when a slot would have been free, or how long others waited."""
STAGES = ("tokenize", "hash", "place", "total")
PHASES = ("prepare", "prefill", "decode")
"""Of a request at the gateway: not placed yet, before its first token, after it."""
ENDPOINTS = ("chat", "completions")


class GatewayMetrics:
    """One gateway's metrics in a registry of their own; label values are bounded sets."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests()
        self._placement()
        self._transfer()
        self._predictions()
        self._fleet()

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self.registry)

    def add_collector(self, collector: Collector) -> None:
        """Further metrics that are read when scraped."""
        self.registry.register(collector)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"prfaas_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"prfaas_{name}", text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
    ) -> Histogram:
        return Histogram(f"prfaas_{name}", text, labels, registry=self.registry, buckets=buckets)

    def _requests(self) -> None:
        self.requests = self._counter("requests", "Answers by HTTP status", ("endpoint", "code"))
        self.request_duration = self._histogram(
            "request_duration_seconds", "Last body byte to last byte of the answer", _SECONDS, ("endpoint",)
        )
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "Last body byte read to first content", _SECONDS, ("kind",)
        )
        self.inter_token = self._histogram(
            "inter_token_latency_seconds", "Between frames of a stream, per token", _SECONDS
        )
        self.input_tokens = self._histogram("input_tokens", "Prompt tokens", _TOKENS)
        self.output_tokens = self._histogram("output_tokens", "Completion tokens", _TOKENS)
        self.cached_tokens = self._histogram("cached_tokens", "Prompt tokens cached at the site", _TOKENS)
        self.stage_requests = self._gauge(
            "stage_requests", "Requests (`gateway`) and choices (`worker`) now", ("stage", "phase")
        )
        self.rejections = self._counter("queue_rejections", "Requests refused before placement", ("reason",))
        self.cancellations = self._counter("cancellation", "Clients that went away", ("phase",))
        self.queue_wait = self._histogram(
            "queue_wait_seconds", "Grant, or submission, to the prompt's first chunk", _SECONDS
        )
        for endpoint in ENDPOINTS:
            self.request_duration.labels(endpoint)
        for phase in PHASES:
            self.stage_requests.labels("gateway" if phase == "prepare" else "worker", phase)
            self.cancellations.labels(phase)

    def _placement(self) -> None:
        self.decisions = self._counter("router_decisions", "Placements", ("decision", "reason"))
        self.overhead = self._histogram(
            "router_overhead_seconds", "Time a request spends in the gateway itself", _MICRO, ("stage",)
        )
        self.migrations = self._counter("migration", "Placements after a failed attempt", ("reason",))
        self.non_max_overlap = self._counter(
            "non_max_overlap_selections", "Placements that left a longer cached prefix elsewhere"
        )
        self.overlap_blocks_lost = self._counter(
            "overlap_blocks_lost", "Cached blocks that were predicted at the site and not found there"
        )
        self.hit_rate_predicted = self._histogram(
            "kv_hit_rate_predicted", "Predicted cached share of the prompt at the site", _RATIO
        )
        self.hit_rate = self._histogram("kv_hit_rate", "Cached share of the prompt at the site", _RATIO)
        for stage in STAGES:
            self.overhead.labels(stage)

    def _transfer(self) -> None:
        self.prefill_duration = self._histogram(
            "pd_prefill_duration_seconds", "First chunk to last layer", _SECONDS
        )
        self.transfer_duration = self._histogram(
            "pd_kv_transfer_duration_seconds", "First write posted to last byte landed", _SECONDS
        )
        self.transfer_tail = self._histogram(
            "pd_kv_transfer_tail_seconds", "Last byte landed after the last layer was computed", _SECONDS
        )
        self.transfer_bytes = self._counter("kv_transfer_bytes", "KV bytes moved for requests", ("link",))
        self.transfer_failures = self._counter("kv_transfer_failures", "Attempts that failed", ("kind",))

    def _predictions(self) -> None:
        self.predicted = self._histogram(
            "predicted_term_seconds", "Cost terms as predicted", _SECONDS, ("term",)
        )
        self.actual = self._histogram("actual_term_seconds", "Cost terms as measured", _SECONDS, ("term",))
        self.prediction_error = self._histogram(
            "prediction_error_ratio", "Absolute difference over the measured term", _RATIO, ("term",)
        )
        for term in TERMS:
            for family in (self.predicted, self.actual, self.prediction_error):
                family.labels(term)

    def _fleet(self) -> None:
        worker = ("worker", "worker_type")
        self.worker_health = self._gauge("worker_health", "1 = ready, 0.5 = draining, 0 = not", worker)
        self.worker_prefill_tokens = self._gauge(
            "worker_active_prefill_tokens", "Prompt tokens not computed yet", worker
        )
        self.worker_decode_blocks = self._gauge(
            "worker_active_decode_blocks", "Pages that cannot be had at once", worker
        )
        self.pending_requests = self._gauge("queue_pending_requests", "Requests waiting at a worker", worker)
        self.pending_tokens = self._gauge("queue_pending_tokens", "Prompt tokens waiting at a worker", worker)
        self.worker_losses = self._counter(
            "worker_lost", "Workers lost: silence or a cut stream", ("worker",)
        )
        self.index_gaps = self._counter("index_gap", "KV event streams that had to start over", ("worker",))

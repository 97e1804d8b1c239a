"""Prometheus metrics of one worker, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prfaas.engine.interface import EngineLoad
from prfaas.protocol.messages import PrefillReport, WorkerStatus

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKENS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)


class WorkerMetrics:
    """Counters that the services bump, and gauges read from the worker when it is scraped.

    Args:
        status, load: read at each scrape.
    """

    def __init__(self, status: Callable[[], WorkerStatus], load: Callable[[], EngineLoad]) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.registry.register(_LiveGauges(status, load))
        counter = self._counter
        self.requests = counter("prfaas_requests", "Generate requests by how they ended", ["code"])
        self.cancellations = counter("prfaas_cancellation", "Requests given up by the client", ["phase"])
        self.transfer_failures = counter("prfaas_kv_transfer_failures", "Prefill legs that failed", ["kind"])
        self.leases_expired = counter("prfaas_kv_lease_expired", "Grants whose lease was not renewed")
        self.fences = counter("prfaas_fences", "Sessions ended because quarantined pages were overdue")
        self.peer_refusals = counter("prfaas_peer_refusals", "Peer sessions refused at the handshake")
        self.corrupt_pages = counter("prfaas_corrupt_pages", "Pages whose checksum differed (test mode)")
        self.prefill_s = self._histogram(
            "prfaas_pd_prefill_duration_seconds", "First chunk started to last layer computed", _SECONDS
        )
        self.transfer_s = self._histogram(
            "prfaas_pd_kv_transfer_duration_seconds", "First write posted to last byte landed", _SECONDS
        )
        self.tail_s = self._histogram(
            "prfaas_pd_kv_transfer_tail_seconds", "Last layer computed to last byte landed", _SECONDS
        )
        self.ready_s = self._histogram(
            "prfaas_prompt_ready_seconds", "Request arrival to complete KV on the decode worker", _SECONDS
        )
        self.input_tokens = self._histogram("prfaas_input_tokens", "Prompt tokens", _TOKENS)
        self.output_tokens = self._histogram("prfaas_output_tokens", "Generated tokens", _TOKENS)
        self.cached_tokens = self._histogram(
            "prfaas_cached_tokens", "Prompt tokens cached at the site that prefilled", _TOKENS
        )

    def observe_transfer(self, report: PrefillReport) -> None:
        """A finished grant, at the prefill worker."""
        self.prefill_s.observe(report.prefill_s)
        self.transfer_s.observe(report.transfer_s)
        self.tail_s.observe(report.tail_s)

    def _counter(self, name: str, text: str, labels: list[str] | None = None) -> Counter:
        return Counter(name, text, labels or [], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)


class _LiveGauges(Collector):
    """Gauges and totals that the worker knows anyway, read at scrape time."""

    def __init__(self, status: Callable[[], WorkerStatus], load: Callable[[], EngineLoad]) -> None:
        self._status = status
        self._load = load

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        status, load = self._status(), self._load()
        yield _gauge("prfaas_worker_requests", "Requests by place", "state",
                     {"waiting": status.waiting, "running": status.running})  # fmt: skip
        yield _gauge("prfaas_kv_pages", "KV pages by state", "state", {
            "free_or_cached": status.free_pages, "cached": status.cached_pages,
            "pinned": status.pinned_pages, "quarantined": status.quarantined_pages,
        })  # fmt: skip
        yield _gauge("prfaas_worker_ready", "1 while requests are taken", "state",
                     {status.state: float(status.state == "ready")})  # fmt: skip
        yield _plain("prfaas_live_grants", "Grants not over yet", status.live_grants)
        yield _plain("prfaas_peer_sessions", "Peer sessions not destroyed", status.sessions)
        yield _plain(
            "prfaas_waiting_prefill_tokens", "Prompt tokens to compute", status.waiting_prefill_tokens
        )
        yield _total("prfaas_prefill_tokens", "Prompt tokens computed", load.prefill_tokens_total)
        yield _total("prfaas_decode_tokens", "Tokens generated", load.decode_tokens_total)
        yield _total("prfaas_engine_steps", "Engine steps", load.steps_total)
        yield _total("prfaas_engine_busy_seconds", "Time in engine steps", load.busy_s_total)
        sent = CounterMetricFamily("prfaas_kv_transfer_bytes", "KV bytes landed, by cluster", labels=["link"])
        for link in status.links:
            sent.add_metric([link.cluster], link.bytes_total)
        yield sent


def _gauge(name: str, text: str, label: str, values: dict[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _plain(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _total(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)

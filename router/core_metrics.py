"""The scheduler's own numbers, read when scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.admission import Admission
from router.core.scheduler import Scheduler


class SchedulerCollector(Collector):
    """Links, index, bookings, and the policy's faults."""

    def __init__(self, scheduler: Scheduler, admission: Admission) -> None:
        self._scheduler = scheduler
        self._admission = admission

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._links()
        yield from self._workers()
        yield from self._totals()
        yield GaugeMetricFamily("prfaas_bookings", "Placements in flight", value=self._scheduler.bookings)
        yield GaugeMetricFamily("prfaas_inflight_requests", "Choices held", value=self._admission.inflight)

    def _links(self) -> Iterator[Metric]:
        links = list(self._scheduler.links())
        for name, text, attribute in (
            ("link_bandwidth_estimate_bytes_per_second", "Estimated rate", "rate_bytes_per_s"),
            ("link_confidence", "Weight of samples against the configured rate", "confidence"),
            ("link_probe_due", "1 = no sample of its rate lately", "probe_due"),
            ("link_rtt_seconds", "Smallest round trip seen lately", "rtt_s"),
            ("link_backlog_bytes", "Booked bytes that have not crossed", "backlog_bytes"),
        ):
            family = GaugeMetricFamily(f"prfaas_{name}", text, labels=["link"])
            for link in links:
                family.add_metric([f"{link.source}->{link.target}"], float(getattr(link, attribute)))
            yield family

    def _workers(self) -> Iterator[Metric]:
        workers = list(self._scheduler.workers())
        for name, text, attribute in (
            ("index_entries", "Blocks the index holds", "cached_blocks"),
            ("worker_prefill_backlog_seconds", "Predicted wait for prefill", "prefill_backlog_s"),
            ("worker_prefill_factor", "Actual over profiled prefill time", "prefill_factor"),
            ("worker_decode_factor", "Actual over profiled step time", "decode_factor"),
            ("worker_profile_measured", "1 = calibrated, 0 = default profile", "measured"),
        ):
            family = GaugeMetricFamily(f"prfaas_{name}", text, labels=["worker"])
            for worker in workers:
                family.add_metric([worker.name], float(getattr(worker, attribute)))
            yield family

    def _totals(self) -> Iterator[Metric]:
        counters = self._scheduler.counters()
        refused = CounterMetricFamily("prfaas_placements_refused", "By reason", labels=["reason"])
        for reason, count in counters.refused.items():
            refused.add_metric([reason], count)
        yield refused
        for name, text, value in (
            ("index_replay", "Snapshots of workers' caches taken in", counters.index_snapshots),
            ("policy_faults", "Exceptions and wrong answers of the policy", counters.policy_faults),
            ("policy_overruns", "Choices beyond the time budget", counters.policy_overruns),
            ("bookings_expired", "Bookings that leaked and were swept", counters.bookings_expired),
            ("not_least_cost", "Placements that were not the cheapest", counters.not_least_cost),
        ):
            yield CounterMetricFamily(f"prfaas_{name}", text, value=value)
        yield GaugeMetricFamily(
            "prfaas_policy_replaced",
            "1 = the policy was replaced",
            value=float(bool(counters.policy_replaced)),
        )

"""All links by direction, and their table of numbers."""

from __future__ import annotations

from collections.abc import Iterator

from prfaas.protocol.messages import LinkCounters
from router.core import tables as t
from router.core.config import SchedulerConfig
from router.core.links import LinkEstimator, LinkState


class Network:
    """Links between clusters as configured, and one inside each cluster."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self.links: dict[tuple[str, str], LinkState] = {}
        """By (source cluster, target cluster)."""
        self.table = t.Table(t.LINK_ROWS)
        self.columns: dict[str, int] = {}
        """Column of each direction in the table, by `source->target`."""
        self.version = 0
        self.table.values[t.RATE, self.table.take()] = 1.0  # topology.NO_LINK

    def __iter__(self) -> Iterator[LinkState]:
        return iter(self.links.values())

    def add_cluster(self, cluster: str, now_s: float) -> None:
        """Make sure that there is a link inside `cluster`."""
        if (cluster, cluster) not in self.links:
            rate, rtt_s = self._config.local_rate_bytes_per_s, self._config.local_rtt_s
            self._add(f"local:{cluster}", cluster, cluster, rate, rtt_s, now_s)

    def configure(
        self, name: str, clusters: tuple[str, str], rate: float, rtt_s: float, now_s: float
    ) -> None:
        """Make or change the link between two clusters, in both directions."""
        for source, target in (clusters, clusters[::-1]):
            link = self.links.get((source, target))
            if link is None:
                self._add(name, source, target, rate, rtt_s, now_s)
            else:
                link.estimator.configure(rate, rtt_s)
                self.refresh(link, now_s)

    def observe(self, source: str, worker: str, counters: LinkCounters, now_s: float) -> None:
        """Counters of `worker`'s sending from cluster `source`."""
        link = self.links.get((source, counters.cluster))
        if link is not None:
            link.estimator.observe(worker, counters, now_s)
            self.refresh(link, now_s)

    def forget_sender(self, worker: str) -> None:
        for link in self:
            link.estimator.forget_sender(worker)

    def refresh(self, link: LinkState, now_s: float) -> None:
        """Write what the estimate says into the link's column."""
        values, row = self.table.values, link.row
        values[t.RATE, row] = link.estimator.rate(now_s)
        values[t.RTT, row] = link.estimator.rtt_s

    def _add(self, name: str, source: str, target: str, rate: float, rtt_s: float, now_s: float) -> None:
        estimator = LinkEstimator(rate, rtt_s, self._config.link_quiet_s)
        link = LinkState(name, source, target, self.table.take(), estimator)
        self.links[source, target] = link
        self.columns = {**self.columns, f"{source}->{target}": link.row}
        self.version += 1
        self.refresh(link, now_s)

"""The fleet as the gateway hears it: feeds the scheduler, ends attempts on lost workers, keeps gauges."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from aiohttp import ClientSession

from prfaas.config import Config
from prfaas.engine.interface import StepProfile
from prfaas.protocol.messages import KVEvent, PrefillSite, WorkerInfo, WorkerStatus
from router.brain import Brain
from router.core.events import KVReceived, StatusReceived, WorkerJoined, WorkerLost, WorkerProfile
from router.metrics import GatewayMetrics
from router.subscriptions import Listener, Subscription
from router.watch import Watches

logger = logging.getLogger(__name__)
_HEALTH = {"ready": 1.0, "draining": 0.5}


class Workers(Listener):
    """Every configured worker."""

    def __init__(self, config: Config, session: ClientSession, brain: Brain, metrics: GatewayMetrics) -> None:
        self._brain = brain
        self._metrics = metrics
        self.watches = Watches()
        self.infos: dict[str, WorkerInfo] = {}
        self.statuses: dict[str, WorkerStatus] = {}
        self._profiles: dict[str, StepProfile] = {}
        self._changed = asyncio.Event()
        self.on_rejoin: Callable[[str], None] = lambda worker: None
        """Called when a worker has joined (set by the gateway once calibration at start is over)."""
        self._roles: dict[str, str] = {}
        self._sites: dict[str, PrefillSite] = {}
        self._subscriptions = []
        for cluster_name, cluster in config.clusters.items():
            for name, worker in cluster.workers.items():
                url = f"http://{worker.host}:{worker.port}"
                self._roles[name] = worker.role
                self._sites[name] = PrefillSite(worker=name, url=url, cluster=cluster_name)
                self._subscriptions.append(Subscription(name, url, session, config.timeouts, self, brain.now))
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to follow every worker."""
        self._tasks = [asyncio.create_task(one.run()) for one in self._subscriptions]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def names(self, role: str | None = None) -> list[str]:
        """Configured workers, of one role or all."""
        return [name for name, its in self._roles.items() if role in (None, its)]

    def ready(self, role: str | None = None) -> list[str]:
        """Workers that take requests now."""
        return [name for name in self.names(role) if self._state(name) == "ready"]

    def site(self, worker: str) -> PrefillSite:
        """Address of a worker.

        Raises:
            KeyError: no such worker is configured.
        """
        return self._sites[worker]

    def context_length(self) -> int | None:
        """Tokens that every decode worker's context holds; None while none has joined."""
        lengths = [info.context_length for info in self.infos.values() if info.role == "decode"]
        return min(lengths, default=None)

    async def wait_for_decode(self, timeout_s: float) -> bool:
        """Wait until a decode worker is ready; False if none is after `timeout_s`."""
        return await self._wait(lambda: bool(self.ready("decode")), timeout_s)

    async def wait_ready(self, timeout_s: float) -> bool:
        """Wait until every configured worker is ready; False if some are not after `timeout_s`."""
        return await self._wait(lambda: len(self.ready()) == len(self._roles), timeout_s)

    async def _wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def set_profile(self, worker: str, profile: StepProfile) -> None:
        """Tell the scheduler measured step times; kept for the worker's next incarnations."""
        self._profiles[worker] = profile
        if worker in self.infos:
            self._brain.apply(WorkerProfile(worker=worker, profile=profile, now_s=self._brain.now()))

    def has_profile(self, worker: str) -> bool:
        return worker in self._profiles

    # ------------------------------------------------------------ Listener

    def joined(self, info: WorkerInfo) -> None:
        logger.info("event=worker_joined worker=%s incarnation=%s", info.worker, info.incarnation)
        self.infos[info.worker] = info
        self._brain.apply(WorkerJoined(info=info, now_s=self._brain.now()))
        if info.worker in self._profiles:
            self.set_profile(info.worker, self._profiles[info.worker])

    def status(self, status: WorkerStatus) -> None:
        became_ready = status.state == "ready" and self._state(status.worker) != "ready"
        self.statuses[status.worker] = status
        self._brain.apply(StatusReceived(status=status, now_s=self._brain.now()))
        self._show(status)
        if became_ready:
            self._changed.set()
            self.on_rejoin(status.worker)

    def kv(self, worker: str, event: KVEvent) -> None:
        self._brain.apply(KVReceived(worker=worker, event=event, now_s=self._brain.now()))

    def gap(self, worker: str) -> None:
        self._metrics.index_gaps.labels(worker).inc()

    def lost(self, worker: str, why: str) -> None:
        self.infos.pop(worker, None)
        self.statuses.pop(worker, None)
        self._brain.apply(WorkerLost(worker=worker, now_s=self._brain.now()))
        ended = self.watches.fire(worker)
        self._metrics.worker_losses.labels(worker).inc()
        self._metrics.worker_health.labels(worker, self._roles[worker]).set(0)
        logger.warning("event=worker_lost worker=%s attempts_ended=%d why=%s", worker, ended, why)

    def _state(self, worker: str) -> str:
        status = self.statuses.get(worker)
        return status.state if status is not None else "absent"

    def _show(self, status: WorkerStatus) -> None:
        labels = (status.worker, self._roles[status.worker])
        metrics = self._metrics
        metrics.worker_health.labels(*labels).set(_HEALTH.get(status.state, 0.0))
        metrics.worker_prefill_tokens.labels(*labels).set(status.waiting_prefill_tokens)
        metrics.worker_decode_blocks.labels(*labels).set(status.total_pages - status.free_pages)
        metrics.pending_requests.labels(*labels).set(status.waiting)
        metrics.pending_tokens.labels(*labels).set(status.waiting_prefill_tokens)

"""Start a fleet's services as children, keep them running, stop them in order.

Start: workers first, all at once, then the gateway. Stop: the gateway first, which lets running requests
finish, then the workers; whoever outlives its time is killed with its process group. If this process dies,
however it dies, the kernel kills the children (`die_with_parent`), and they their own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from launcher.service import Service, ServiceFailed, ServiceSpec, describe_status
from prfaas.config import TimeoutsConfig

logger = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
"""On top of `timeouts.drain`: time to close what draining left open."""
_MOST_DOUBLINGS = 64
"""A service may fail for days: beyond this the power would not fit a float."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays between restarts of one service: doubling, reset once it has lived for a while."""

    first_s: float = 0.5
    longest_s: float = 30.0
    healthy_after_s: float = 60.0

    def delay_s(self, failures_in_row: int) -> float:
        """Delay before the restart after the n-th failure in a row, n counting from 1."""
        return float(min(self.longest_s, self.first_s * 2 ** min(failures_in_row - 1, _MOST_DOUBLINGS)))


@dataclass(frozen=True, slots=True)
class FleetEvent:
    """Something that a person watching wants to know."""

    service: str
    state: str
    """`starting`, `ready`, `died`, `restarting`, `stopping`, `stopped`, `killed`."""
    detail: str = ""


class Supervisor:
    """The services of one run. `async with` stops them whatever happens."""

    def __init__(
        self,
        workers: Sequence[ServiceSpec],
        gateway: ServiceSpec,
        timeouts: TimeoutsConfig,
        *,
        restart: bool,
        report: Callable[[FleetEvent], None] = lambda event: None,
        backoff: Backoff | None = None,
    ) -> None:
        self.workers = [Service(spec) for spec in workers]
        self.gateway = Service(gateway)
        self.restarts: dict[str, int] = {}
        self._timeouts = timeouts
        self._restart = restart
        self._report = report
        self._backoff = backoff or Backoff()
        self._keepers: list[asyncio.Task[None]] = []
        self._died: asyncio.Future[ServiceFailed] | None = None
        self._session: aiohttp.ClientSession | None = None

    @property
    def services(self) -> list[Service]:
        return [*self.workers, self.gateway]

    async def __aenter__(self) -> Supervisor:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start everything and wait until it is ready.

        Raises:
            ServiceFailed: a service died or was not ready within `timeouts.start`.
        """
        self._session = aiohttp.ClientSession()
        self._died = asyncio.get_running_loop().create_future()
        await _all([self._start_one(service) for service in self.workers])
        await self._start_one(self.gateway)
        self._keepers = [asyncio.create_task(self._keep(service)) for service in self.services]

    async def wait_for_failure(self) -> ServiceFailed:
        """Wait until a service has died for good; never returns while restarts are on."""
        assert self._died is not None, "start() comes first"
        return await asyncio.shield(self._died)

    async def stop(self) -> None:
        """Drain and stop everything; safe to call twice."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._keepers = []
        await self._stop_one(self.gateway)
        await _all([self._stop_one(service) for service in self.workers])
        if self._session is not None:
            await self._session.close()
            self._session = None

    def kill(self) -> None:
        """SIGKILL to every service now; `stop` then only reaps them."""
        for service in self.services:
            service.kill()

    async def _start_one(self, service: Service) -> None:
        assert self._session is not None
        self._report(FleetEvent(service.name, "starting", service.spec.url))
        await service.spawn()
        await service.wait_ready(self._session, self._timeouts.start)
        self._report(FleetEvent(service.name, "ready", service.spec.url))

    async def _stop_one(self, service: Service) -> None:
        if service.pid is None:
            return
        running = service.returncode is None
        if running:
            self._report(FleetEvent(service.name, "stopping"))
        clean = await service.stop(self._timeouts.drain + STOP_GRACE_S)
        if running:
            logger.info("event=stopped service=%s clean=%s", service.name, clean)
            self._report(FleetEvent(service.name, "stopped" if clean else "killed"))

    async def _keep(self, service: Service) -> None:
        """Notice that `service` has died and start it again, or record the failure where restarts are off."""
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            began_s = loop.time()
            status = describe_status(await service.wait())
            logger.warning(
                "event=died service=%s status=%r log=%s", service.name, status, service.spec.log_path
            )
            self._report(FleetEvent(service.name, "died", f"{status}; see {service.spec.log_path.name}"))
            if not self._restart:
                assert self._died is not None
                if not self._died.done():
                    self._died.set_result(service.failure(f"ended with {status}"))
                return
            failures = 1 if loop.time() - began_s > self._backoff.healthy_after_s else failures + 1
            await self._start_again(service, failures)

    async def _start_again(self, service: Service, failures: int) -> None:
        delay_s = self._backoff.delay_s(failures)
        self.restarts[service.name] = self.restarts.get(service.name, 0) + 1
        logger.warning(
            "event=restart service=%s after_s=%.1f restarts=%d",
            service.name,
            delay_s,
            self.restarts[service.name],
        )
        self._report(FleetEvent(service.name, "restarting", f"in {delay_s:.1f} s"))
        await asyncio.sleep(delay_s)
        try:
            await self._start_one(service)
        except (ServiceFailed, OSError) as failure:
            logger.error("event=restart_failed service=%s error=%r", service.name, str(failure))
            service.kill()  # `_keep` sees it end and tries again, later


async def _all(steps: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all steps at once; the first failure cancels the others and is raised by itself."""
    try:
        async with asyncio.TaskGroup() as group:
            for step in steps:
                group.create_task(step)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None

"""One child process of the supervisor: a worker or the gateway."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from prfaas import die_with_parent
from prfaas.config import Config
from prfaas.config_load import is_config_variable
from prfaas.errors import PrfaasError

TAIL_LINES = 25
_POLL_S = 0.1
_PROBE_TIMEOUT_S = 2.0
_SHIM = Path(die_with_parent.__file__)


class ServiceFailed(PrfaasError):
    """A service died or did not become ready; `tail` holds the last lines of its log."""

    def __init__(self, name: str, reason: str, log_path: Path, tail: list[str]) -> None:
        self.name = name
        self.log_path = log_path
        self.tail = tail
        super().__init__(f"{name} {reason}; its log is {log_path}")


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """How to start a service and how to see that it is ready."""

    name: str
    command: tuple[str, ...]
    url: str
    log_path: Path


class Service:
    """A service's process: its own process group, dies with this process, logs to its file."""

    def __init__(self, spec: ServiceSpec) -> None:
        self.spec = spec
        self._process: asyncio.subprocess.Process | None = None
        self._gone = False
        """Process reaped and group killed: its number may belong to others now."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def returncode(self) -> int | None:
        """Exit status; None while it runs or before it was started."""
        return self._process.returncode if self._process else None

    async def spawn(self) -> None:
        """Start the process; its output is appended to the log file."""
        command = (sys.executable, "-I", "-S", str(_SHIM), str(os.getpid()), *self.spec.command)
        with self.spec.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child_environment(),
                process_group=0,  # a terminal's Ctrl-C must reach the supervisor alone: it stops in order
            )
        self._gone = False

    async def wait(self) -> int:
        """Wait for the process to end; kills what is left of its group and returns the exit status."""
        assert self._process is not None, "spawn() comes first"
        status = await self._process.wait()
        self._bury()
        return status

    async def wait_ready(self, session: aiohttp.ClientSession, timeout_s: float) -> None:
        """Poll `/readyz` until it answers 200.

        Raises:
            ServiceFailed: the process ended, or was not ready in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not await self._probe(session):
                    if self.returncode is not None:
                        status = describe_status(self.returncode)
                        raise self.failure(f"ended with {status} before it was ready")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise self.failure(f"was not ready after {timeout_s:.0f} s") from None

    async def _probe(self, session: aiohttp.ClientSession) -> bool:
        try:
            timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)
            async with session.get(f"{self.spec.url}/readyz", timeout=timeout) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def stop(self, timeout_s: float) -> bool:
        """SIGTERM, then SIGKILL to the whole group after `timeout_s`; True if SIGTERM was enough."""
        if self._process is None:
            return True
        try:
            if self._process.returncode is None:
                with suppress(ProcessLookupError):
                    self._process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(timeout_s):
                    await self._process.wait()
        except TimeoutError:
            return False
        finally:
            self.kill()
            await self._process.wait()
            self._gone = True
        return True

    def kill(self) -> None:
        """SIGKILL to every process of the group that is left."""
        if self._process is not None and not self._gone:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _bury(self) -> None:
        self.kill()
        self._gone = True

    def failure(self, reason: str) -> ServiceFailed:
        return ServiceFailed(self.name, reason, self.spec.log_path, self.log_tail())

    def log_tail(self, lines: int = TAIL_LINES) -> list[str]:
        """The last lines of the log; empty if there is none."""
        try:
            with self.spec.log_path.open("rb") as file:
                file.seek(max(0, self.spec.log_path.stat().st_size - 400 * lines))
                return file.read().decode("utf-8", "replace").splitlines()[-lines:]
        except OSError:
            return []


def child_environment() -> dict[str, str]:
    """This environment without configuration twins: they are already in the resolved configuration."""
    return {name: value for name, value in os.environ.items() if not is_config_variable(name)}


def describe_status(status: int) -> str:
    """`exit status 3`, or `signal SIGKILL` for a negative status."""
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def service_specs(
    config: Config, config_path: Path, log_dir: Path, flags: Sequence[str] = ()
) -> tuple[list[ServiceSpec], ServiceSpec]:
    """(workers, gateway) of a resolved configuration.

    Args:
        flags: appended to every command, e.g. `--log-format json`.
    """

    def spec(name: str, command: Sequence[str], host: str, port: int) -> ServiceSpec:
        argv = (sys.executable, "-P", "-m", "launcher", *command, "--config", str(config_path), *flags)
        return ServiceSpec(name, argv, f"http://{host}:{port}", log_dir / f"{name}.log")

    workers = [
        spec(name, ("worker", "--name", name), worker.host, worker.port)
        for cluster in config.clusters.values()
        for name, worker in cluster.workers.items()
    ]
    gateway = config.gateway
    return workers, spec("gateway", ("router",), gateway.host, gateway.port)

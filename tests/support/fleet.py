"""Real worker processes for tests, from a `Config`; everything started here is ended here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import yaml

from prfaas.config import Config
from prfaas.config_load import loads
from prfaas.protocol.messages import (
    ErrorBody,
    Failed,
    Finished,
    GenerateFrame,
    GenerateRequest,
    Prefilled,
    PrefillReport,
    PrefillSite,
    Sampling,
    Tokens,
    WorkerStatus,
)

TOKEN = "test-service-token"
WAIT_S = 60.0
"""Bound on everything a test waits for; generous, because test machines are slow and shared."""
START_S = 180.0
_FRAMES: msgspec.json.Decoder[GenerateFrame] = msgspec.json.Decoder(GenerateFrame)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def fleet_tree(model_path: Path, state_dir: Path) -> dict[str, Any]:
    """A configuration as YAML would hold it: `decode-0` and `prefill-0` in cluster `pd`, `remote-0` in
    cluster `far`, behind an emulated link. Change it, then `make_config`."""

    def worker(role: str) -> dict[str, Any]:
        return {
            "role": role,
            "port": free_port(),
            "page_size": 16,
            "memory": "4MiB",
            "chunk_tokens": 64,
            "max_running": 8,
        }

    return {
        "model": {"path": str(model_path), "name": "test-model"},
        "clusters": {
            "pd": {
                "kind": "pd",
                "workers": {"decode-0": worker("decode"), "prefill-0": worker("prefill")},
            },
            "far": {"kind": "prefill", "workers": {"remote-0": worker("prefill")}},
        },
        "links": {"wan": {"between": ["pd", "far"], "capacity": "200Mbit", "rtt": "20ms", "emulate": True}},
        "auth": {"service_token": TOKEN},
        "state_dir": str(state_dir),
    }


def make_config(tree: dict[str, Any]) -> Config:
    return loads(yaml.safe_dump(tree), environment={})


class Answer:
    """What came of one generate request."""

    def __init__(self) -> None:
        self.status = 200
        self.error: ErrorBody | None = None
        self.frames: list[GenerateFrame] = []

    @property
    def token_ids(self) -> list[int]:
        return [token for frame in self.frames if isinstance(frame, Tokens) for token in frame.token_ids]

    @property
    def text(self) -> str:
        return "".join(frame.text for frame in self.frames if isinstance(frame, Tokens))

    @property
    def report(self) -> PrefillReport:
        (frame,) = [frame for frame in self.frames if isinstance(frame, Prefilled)]
        return frame.report

    @property
    def finished(self) -> Finished:
        last = self.frames[-1]
        assert isinstance(last, Finished), last
        return last

    @property
    def failed(self) -> Failed:
        last = self.frames[-1]
        assert isinstance(last, Failed), last
        return last


class Fleet:
    """Worker processes and an HTTP client for them.

    Args:
        directory: for the configuration file and logs.
    """

    def __init__(self, config: Config, directory: Path, http: aiohttp.ClientSession) -> None:
        self.config = config
        self.http = http
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._requests = 0

    # ------------------------------------------------------------ processes

    async def start(self, *names: str, tree: dict[str, Any] | None = None, ready: bool = True) -> None:
        """Start workers and wait until they are ready.

        Args:
            tree: another configuration than the fleet's own (for a worker that differs).
        """
        for name in names:
            path = self._directory / f"{name}.yaml"
            path.write_text(yaml.safe_dump(tree or self._tree()))
            with self.log_path(name).open("ab") as log:
                self._processes[name] = subprocess.Popen(  # noqa: ASYNC220 - spawning is quick
                    [sys.executable, "-m", "prfaas.worker.main", "-c", str(path), "-n", name,
                     "--die-with-parent"],
                    stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                )  # fmt: skip
        if ready:
            await asyncio.gather(*(self.wait_ready(name) for name in names))

    def _tree(self) -> Any:
        from prfaas.config_load import dump

        return yaml.safe_load(dump(self.config))

    def log_path(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def process(self, name: str) -> subprocess.Popen[bytes]:
        return self._processes[name]

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a worker's control process."""
        self._processes[name].send_signal(number)

    def signal_tree(self, name: str, number: int) -> None:
        """Send a signal to a worker's control process and all its children."""
        for process in self.family(name):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def family(self, name: str) -> list[psutil.Process]:
        root = psutil.Process(self._processes[name].pid)
        return [root, *root.children(recursive=True)]

    async def wait_exit(self, name: str, timeout_s: float = WAIT_S) -> int:
        """The worker's exit status, once it has ended."""
        status = await asyncio.to_thread(self._processes[name].wait, timeout_s)
        del self._processes[name]
        return status

    def stop(self) -> None:
        """End every worker: politely, then not; nothing survives."""
        families = [process for name in list(self._processes) for process in self.family_or_nothing(name)]
        for process in self._processes.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
        deadline_s = time.monotonic() + 10
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline_s - time.monotonic(), 0.1))
            process.kill()
            process.wait()
        _, alive = psutil.wait_procs(families, timeout=5)
        for process in alive:
            process.kill()

    def family_or_nothing(self, name: str) -> list[psutil.Process]:
        try:
            return self.family(name)
        except psutil.NoSuchProcess:
            return []

    # ------------------------------------------------------------ HTTP

    def url(self, name: str) -> str:
        _, spec = self.config.worker(name)
        return f"http://{spec.host}:{spec.port}"

    def site(self, name: str) -> PrefillSite:
        cluster, _ = self.config.worker(name)
        return PrefillSite(worker=name, url=self.url(name), cluster=cluster)

    async def wait_ready(self, name: str, timeout_s: float = START_S) -> None:
        async def ready() -> bool:
            process = self._processes[name]
            if process.poll() is not None:
                log = self.log_path(name).read_text()[-3000:]
                raise AssertionError(f"{name} ended with {process.returncode} before it was ready:\n{log}")
            try:
                async with self.http.get(f"{self.url(name)}/readyz") as answer:
                    return answer.status == 200
            except aiohttp.ClientError:
                return False

        await eventually(ready, f"{name} is ready", timeout_s, poll_s=0.1)

    async def status(self, name: str) -> WorkerStatus:
        async with self.http.get(f"{self.url(name)}/v1/status") as answer:
            answer.raise_for_status()
            return msgspec.json.decode(await answer.read(), type=WorkerStatus)

    def request(
        self,
        token_ids: Sequence[int],
        *,
        site: str | None = None,
        max_tokens: int = 8,
        request_id: str = "",
        attempt: int = 1,
        deadline_s: float = WAIT_S,
        cache_salt: str = "",
        **sampling: Any,
    ) -> GenerateRequest:
        """A generate request; greedy and without EOS unless `sampling` says otherwise."""
        self._requests += 1
        return GenerateRequest(
            request_id=request_id or f"request-{os.getpid()}-{self._requests}",
            attempt=attempt,
            token_ids=list(token_ids),
            sampling=Sampling(**{"max_tokens": max_tokens, "ignore_eos": True, **sampling}),
            prefill=self.site(site) if site else None,
            cache_salt=cache_salt,
            deadline_s=deadline_s,
        )

    async def frames(self, name: str, request: GenerateRequest) -> AsyncIterator[GenerateFrame]:
        """Frames as they come; raises `aiohttp.ClientResponseError` for a refusal. Close it to disconnect."""
        body = msgspec.json.encode(request)
        async with self.http.post(f"{self.url(name)}/v1/generate", data=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                yield _FRAMES.decode(line)

    async def generate(self, name: str, request: GenerateRequest) -> Answer:
        """Run a request to its end."""
        result = Answer()
        body = msgspec.json.encode(request)
        async with asyncio.timeout(WAIT_S):
            async with self.http.post(f"{self.url(name)}/v1/generate", data=body) as answer:
                result.status = answer.status
                if answer.status != 200:
                    result.error = msgspec.json.decode(await answer.read(), type=ErrorBody)
                    return result
                async for line in answer.content:
                    result.frames.append(_FRAMES.decode(line))
        return result

    async def settled(self, *names: str, timeout_s: float = 10.0) -> None:
        """Wait until nothing is live: every page free or cached, every counter zero."""
        for name in names:

            async def quiet(name: str = name) -> bool:
                return not busy_counters(await self.status(name))

            try:
                await eventually(quiet, f"{name} is quiet", timeout_s)
            except AssertionError as error:
                raise AssertionError(f"{error}: {busy_counters(await self.status(name))}") from None


def busy_counters(status: WorkerStatus) -> dict[str, int]:
    """Counters that must be zero when nothing runs, where they are not."""
    live = {
        name: getattr(status, name)
        for name in ("waiting", "running", "waiting_prefill_tokens", "running_context_tokens",
                     "live_grants", "pinned_pages", "quarantined_pages")
    }  # fmt: skip
    live["lost_pages"] = (
        status.total_pages - status.free_pages - status.pinned_pages - status.quarantined_pages
    )
    return {name: value for name, value in live.items() if value}


async def eventually(
    check: Callable[[], Awaitable[bool]], what: str, timeout_s: float = WAIT_S, poll_s: float = 0.02
) -> None:
    """Wait until `check` holds.

    Raises:
        AssertionError: it did not within `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    while not await check():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {timeout_s:.1f} s: {what}")
        await asyncio.sleep(poll_s)


@contextlib.asynccontextmanager
async def running_fleet(tree: dict[str, Any], directory: Path, *names: str) -> AsyncIterator[Fleet]:
    """A fleet with the named workers started; all gone afterwards."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(headers=headers) as http:
        fleet = Fleet(make_config(tree), directory, http)
        try:
            await fleet.start(*names)
            yield fleet
        finally:
            await asyncio.to_thread(fleet.stop)

"""The gateway as a process over real workers; whoever starts one stops it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from fleet import WAIT_S, eventually, free_port
from prometheus_client.parser import text_string_to_metric_families


class GatewayProcess:
    """`prfaas router` over a fleet's workers.

    Args:
        tree: the fleet's configuration, as YAML would hold it.
        gateway: settings of section `gateway`, beyond the tests' own.
    """

    def __init__(self, tree: dict[str, Any], directory: Path, policy: str, **gateway: Any) -> None:
        self.port = free_port()
        self.log_path = directory / f"gateway-{policy}.log"
        self._workers = sum(len(cluster["workers"]) for cluster in tree["clusters"].values())
        config = {
            **tree,
            "policy": {"name": policy},
            "gateway": {"port": self.port, "calibrate": False, "default_max_tokens": 64, **gateway},
        }
        path = directory / f"gateway-{policy}.yaml"
        path.write_text(yaml.safe_dump(config))
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "launcher", "router", "-c", str(path)],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={**os.environ, "PRFAAS_PARENT_PID": ""},
            )  # fmt: skip
        self.url = f"http://127.0.0.1:{self.port}"

    async def wait_ready(self) -> None:
        """Wait until requests are accepted and every worker of the fleet takes them."""

        async def ready() -> bool:
            assert self.process.poll() is None, self.log_path.read_text()[-3000:]
            return len(await self.ready_workers()) == self._workers

        await eventually(ready, "the gateway is ready")

    async def ready_workers(self) -> set[str]:
        """Names of the workers that the gateway would place on; none while it is not ready itself."""
        with contextlib.suppress(aiohttp.ClientError):
            async with aiohttp.ClientSession() as http, http.get(f"{self.url}/readyz") as answer:
                if answer.status == 200:
                    return {name for names in (await answer.json())["workers"].values() for name in names}
        return set()

    async def chat(self, text: str, **fields: Any) -> tuple[int, dict[str, str], dict[str, Any]]:
        """(status, headers, body) of a greedy chat answer."""
        async with aiohttp.ClientSession() as http, asyncio.timeout(WAIT_S):
            url = f"{self.url}/v1/chat/completions"
            async with http.post(url, json=chat_body(text, **fields)) as answer:
                return answer.status, dict(answer.headers), await answer.json()

    async def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples with these labels; 0 where there is none."""
        async with aiohttp.ClientSession() as http, http.get(f"{self.url}/metrics") as answer:
            text = await answer.text()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    async def settled(self, timeout_s: float = 10.0) -> None:
        """Wait until the gateway holds nothing: no request, no choice, no booking."""
        gauges = ("prfaas_inflight_requests", "prfaas_bookings", "prfaas_stage_requests")

        async def quiet() -> bool:
            return not any([await self.metric(name) for name in gauges])

        await eventually(quiet, "the gateway holds nothing", timeout_s)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.asynccontextmanager
async def running_gateway(
    tree: dict[str, Any], directory: Path, policy: str, **gateway: Any
) -> AsyncIterator[GatewayProcess]:
    """A gateway over workers that run, ready for requests; gone afterwards. Args: as for GatewayProcess."""
    process = GatewayProcess(tree, directory, policy, **gateway)
    try:
        await process.wait_ready()
        yield process
    finally:
        process.stop()


def chat_body(text: str, **fields: Any) -> dict[str, Any]:
    """A greedy chat request of 24 tokens, unless `fields` say otherwise."""
    return {
        "model": "test-model", "messages": [{"role": "user", "content": text}], "temperature": 0,
        "max_tokens": 24, "return_token_ids": True, "ignore_eos": True, **fields,
    }  # fmt: skip

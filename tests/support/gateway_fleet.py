"""Helpers for gateway tests: a gateway in this process over scripted workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient
from scripted_worker import ScriptedWorker

from prfaas.config import ClusterConfig, Config, LinkConfig, ModelConfig, WorkerConfig
from prfaas.units import Rate, Seconds
from router.context import Gateway

Client = TestClient[web.Request, web.Application]


@dataclass
class Fleet:
    """Everything a gateway test touches."""

    client: Client
    workers: dict[str, ScriptedWorker]
    gateway: Gateway

    @property
    def decode(self) -> ScriptedWorker:
        return self.workers["decode-0"]

    def forget_warm_up(self) -> None:
        for worker in self.workers.values():
            worker.requests.clear()

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for `condition`, at most five seconds."""
        try:
            async with asyncio.timeout(5):
                while not condition():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        except TimeoutError:
            pytest.fail(f"never happened: {what}")


MakeFleet = Callable[..., Awaitable[Fleet]]


def fleet_config(workers: list[ScriptedWorker], sections: dict[str, dict[str, Any]]) -> Config:
    """A configuration that points at `workers`."""
    members: dict[str, dict[str, WorkerConfig]] = {}
    for worker in workers:
        members.setdefault(worker.cluster, {})[worker.name] = WorkerConfig(
            role="decode" if worker.role == "decode" else "prefill", port=worker.port, page_size=16
        )
    config = Config(
        model=ModelConfig(path="unused", name="tiny"),
        clusters={
            name: ClusterConfig(kind="pd" if name == "pd" else "prefill", workers=workers)
            for name, workers in members.items()
        },
        links={
            "wan": LinkConfig(between=("pd", "far"), capacity=Rate(25e6), rtt=Seconds(0.01)),
        },
    )
    defaults: dict[str, dict[str, Any]] = {
        "gateway": {"calibrate": False, "default_max_tokens": 32},
        "timeouts": {"heartbeat": Seconds(0.05), "silence": Seconds(0.4), "connect": Seconds(0.5)},
    }
    for name in {*defaults, *sections}:
        section = msgspec.structs.replace(
            getattr(config, name), **{**defaults.get(name, {}), **sections.get(name, {})}
        )
        config = msgspec.structs.replace(config, **{name: section})
    return config


def chat(text: str = "Hello there", **fields: Any) -> dict[str, Any]:
    """A chat request's body."""
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}


def events(body: bytes) -> list[dict[str, Any]]:
    """The JSON of every server-sent event but `[DONE]`."""
    lines = [line for line in body.split(b"\n") if line]
    assert all(line.startswith(b"data: ") for line in lines)
    return [msgspec.json.decode(line[6:]) for line in lines if line != b"data: [DONE]"]

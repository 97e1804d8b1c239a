"""A gateway over one or more scripted decode workers, a pool and a remote prefill worker."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from gateway_fleet import Fleet, MakeFleet, fleet_config
from scripted_worker import ScriptedWorker

from router.bodies import SERVER_OPTIONS
from router.context import GATEWAY
from router.gateway import create_app
from router.text_model import HFTextModel


@pytest.fixture(scope="session")
def text_model(tiny_model_path: Path) -> HFTextModel:
    return HFTextModel(tiny_model_path, "tiny")


@pytest.fixture
async def make_fleet(text_model: HFTextModel) -> AsyncIterator[MakeFleet]:
    """Builds fleets; keyword arguments change sections of the configuration (`gateway={...}`)."""
    stops: list[Callable[[], Awaitable[Any]]] = []

    async def make(decodes: int = 1, ready: bool = True, **sections: dict[str, Any]) -> Fleet:
        token = sections.get("auth", {}).get("service_token", "")
        workers = [ScriptedWorker(f"decode-{number}", "decode", "pd", token) for number in range(decodes)]
        workers += [
            ScriptedWorker("pool-0", "prefill", "pd", token),
            ScriptedWorker("remote-0", "prefill", "far", token),
        ]
        for worker in workers:
            await worker.start()
            stops.append(worker.stop)
        config = fleet_config(workers, sections)
        app = create_app(config, text_model)
        server = TestServer(app)
        await server.start_server(shutdown_timeout=0.5, auto_decompress=SERVER_OPTIONS["auto_decompress"])
        client = TestClient(server)
        stops.append(client.close)
        fleet = Fleet(client, {worker.name: worker for worker in workers}, app[GATEWAY])
        if ready:
            await fleet.until(
                lambda: (
                    fleet.gateway.admission.started and len(fleet.gateway.workers.ready()) == len(workers)
                ),
                "the gateway gets ready",
            )
            fleet.forget_warm_up()
        return fleet

    yield make
    for stop in reversed(stops):
        await stop()


@pytest.fixture
async def fleet(make_fleet: MakeFleet) -> Fleet:
    return await make_fleet()

"""Faults around a transfer: the control channel cut or silent in the middle of it, a prefill worker that dies
before it or after it. What came of requests is typed and right, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from fleet import Fleet, eventually, fleet_tree, running_fleet
from msgspec.structs import replace

from prfaas.protocol.messages import GenerateRequest, Tokens

pytestmark = [
    pytest.mark.process,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]
SILENCE_S = 1.5
SETTLE_S = 2.0
LONG = 1500
"""Tokens of a prompt that takes about three seconds on the slow link."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    directory = tmp_path_factory.mktemp("channel")
    tree = fleet_tree(tiny_model_path, directory / "state")
    tree["links"]["wan"].update(capacity="2Mbit")
    async with running_fleet(tree, directory, "decode-0", "remote-0") as running:
        yield running


class Proxy:
    """The control channel's way to `remote-0`, to be cut or blocked; pages do not pass here."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        """Clear it, and bytes stay where they are while the connections live."""
        self.open.set()
        self.url = ""
        self._writers: set[asyncio.StreamWriter] = set()

    @contextlib.asynccontextmanager
    async def to(self, port: int) -> AsyncIterator[Proxy]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", port)
            self._writers |= {writer, back}
            await asyncio.gather(self._pass(reader, back), self._pass(there, writer))

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            self.open.set()
            self.cut()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                await self.open.wait()
                writer.write(data)
                await writer.drain()
        writer.close()

    def cut(self) -> None:
        """Reset every connection."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


@pytest_asyncio.fixture(loop_scope="module")
async def proxy(fleet: Fleet) -> AsyncIterator[Proxy]:
    _, spec = fleet.config.worker("remote-0")
    async with Proxy().to(spec.port) as running:
        yield running
    # The next test's session must be a new one.
    await eventually(lambda: _no_session(fleet), "the session is over", timeout_s=SILENCE_S + SETTLE_S + 5)


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


def through(proxy: Proxy, fleet: Fleet, request: GenerateRequest) -> GenerateRequest:
    return replace(request, prefill=replace(fleet.site("remote-0"), url=proxy.url))


async def transferring(fleet: Fleet) -> None:
    """Wait until bytes of a live grant have landed."""
    before = sum(link.bytes_total for link in (await fleet.status("remote-0")).links)

    async def moving() -> bool:
        status = await fleet.status("remote-0")
        return bool(status.live_grants) and sum(link.bytes_total for link in status.links) > before

    await eventually(moving, "bytes are moving")


async def _no_session(fleet: Fleet) -> bool:
    return (await fleet.status("decode-0")).sessions == 0


async def same_as_local(fleet: Fleet, token_ids: list[int], answer: Any) -> None:
    local = await fleet.generate("decode-0", fleet.request(token_ids, cache_salt="local"))
    assert answer.token_ids == local.token_ids, answer.frames


@pytest.mark.parametrize("fault", ["cut", "silent"])
async def test_a_lost_control_channel_fails_the_request_in_time_and_the_next_session_serves(
    fleet: Fleet, proxy: Proxy, fault: str
) -> None:
    token_ids = prompt(LONG, seed=len(fault))
    request = through(proxy, fleet, fleet.request(token_ids))
    running = asyncio.create_task(fleet.generate("decode-0", request))
    await transferring(fleet)
    if fault == "cut":
        proxy.cut()
    else:
        proxy.open.clear()
    answer = await asyncio.wait_for(running, SILENCE_S + SETTLE_S)
    assert (answer.failed.site, answer.failed.reason) == ("remote-0", "peer_lost")
    await fleet.settled("decode-0", "remote-0", timeout_s=SILENCE_S + SETTLE_S + 1)

    proxy.open.set()
    again = through(proxy, fleet, fleet.request(token_ids, request_id=request.request_id, attempt=2))
    await same_as_local(fleet, token_ids, await fleet.generate("decode-0", again))
    await fleet.settled("decode-0", "remote-0")


async def test_a_prefill_worker_that_dies_before_the_grant_is_peer_lost_at_once(fleet: Fleet) -> None:
    warm = prompt(90, seed=31)
    await same_as_local(fleet, warm, await fleet.generate("decode-0", fleet.request(warm, site="remote-0")))
    fleet.signal("remote-0", signal.SIGKILL)
    await fleet.wait_exit("remote-0")
    answer = await fleet.generate("decode-0", fleet.request(prompt(200, seed=32), site="remote-0"))
    assert answer.failed.reason == "peer_lost"
    await fleet.settled("decode-0", timeout_s=SETTLE_S)
    await fleet.start("remote-0")


async def test_a_prefill_worker_that_dies_after_the_transfer_does_not_matter_to_the_answer(
    fleet: Fleet,
) -> None:
    token_ids = prompt(120, seed=33)
    request = fleet.request(token_ids, site="remote-0", max_tokens=300)
    generated: list[int] = []
    killed = False
    async for frame in fleet.frames("decode-0", request):
        if isinstance(frame, Tokens):
            generated += frame.token_ids
            if not killed:
                fleet.signal("remote-0", signal.SIGKILL)
                killed = True
    await fleet.wait_exit("remote-0")
    local = await fleet.generate("decode-0", fleet.request(token_ids, cache_salt="local", max_tokens=300))
    assert generated == local.token_ids
    await fleet.settled("decode-0", timeout_s=SILENCE_S + SETTLE_S)
    await fleet.start("remote-0")

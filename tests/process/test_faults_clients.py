"""Clients that send nonsense or go away, at a real gateway over real workers: 4xx that name what is wrong,
and afterwards every page is free or cached and every counter zero."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from fleet import WAIT_S, Fleet, fleet_tree, running_fleet
from gateway_process import GatewayProcess, chat_body, running_gateway

pytestmark = [
    pytest.mark.process,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]
WORKERS = ("decode-0", "prefill-0", "remote-0")
SENTENCE = "You may copy, change and pass on the program. "
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ABORTS = 500
AT_ONCE = 24


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(
    tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Fleet, GatewayProcess]]:
    """Round robin over all pairs: local, pool and remote prefill take turns; pages are compared."""
    directory = tmp_path_factory.mktemp("clients")
    tree = fleet_tree(tiny_model_path, directory / "state")
    for cluster in tree["clusters"].values():
        for worker in cluster["workers"].values():
            # 256 pages are two of the longest prompts: many wait for pages, and pages change hands quickly.
            worker.update(memory="2MiB", checksum_pages=True)
    async with (
        running_fleet(tree, directory, *WORKERS) as fleet,
        running_gateway(tree, directory, "round_robin") as gateway,
    ):
        yield fleet, gateway


@pytest.fixture
def fleet(running: tuple[Fleet, GatewayProcess]) -> Fleet:
    return running[0]


@pytest.fixture
def gateway(running: tuple[Fleet, GatewayProcess]) -> GatewayProcess:
    return running[1]


def chat(**fields: Any) -> bytes:
    return json.dumps(chat_body("hello", **fields)).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "test-model", "prompt": "hello", **fields}).encode()


BAD_BODIES: list[tuple[str, bytes, int, str | None]] = [
    (CHAT, b"", 400, None),
    (CHAT, b'{"model": "test-model", "messages": [', 400, None),
    (CHAT, b"[1, 2]", 400, None),
    (CHAT, b'{"model":"test-model","messages":[{"role":"user","content":"\xff\xfe"}]}', 400, None),
    (COMPLETIONS, b'{"model":"test-model","prompt":"\xc3("}', 400, None),
    (COMPLETIONS, b"x" * 10_000_000, 413, None),
    (CHAT, chat(user="x" * 10_000_000), 413, None),
    (CHAT, chat(messages="hello"), 400, "messages"),
    (CHAT, chat(messages=[]), 400, "messages"),
    (CHAT, chat(messages=[{"role": "user", "content": 5}]), 400, "messages[0].content"),
    (CHAT, chat(max_tokens="many"), 400, "max_tokens"),
    (CHAT, chat(stream="yes"), 400, "stream"),
    (CHAT, chat(temperature=[1]), 400, "temperature"),
    (CHAT, chat(model="gpt-4"), 404, "model"),
    (COMPLETIONS, completion(model=""), 404, "model"),
    (COMPLETIONS, completion(prompt=""), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[]), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[2**31 - 1]), 400, "prompt"),
    (COMPLETIONS, completion(prompt=[7] * 2048), 400, "prompt"),
    (COMPLETIONS, completion(prompt=["fits", "word " * 5000]), 400, "prompt"),
    (CHAT, chat(messages=[{"role": "user", "content": SENTENCE * 2000}]), 400, "messages"),
    (CHAT, chat(max_tokens=10**9), 400, "max_tokens"),
    (CHAT, chat(max_tokens=10**30), 400, "max_tokens"),
    (CHAT, chat(max_tokens=-1), 400, "max_tokens"),
    (CHAT, chat(max_tokens=None, max_completion_tokens=2048), 400, "max_completion_tokens"),
    (CHAT, chat(n=1000), 400, "n"),
    (CHAT, chat(temprature=1), 400, "temprature"),
    (CHAT, chat(kv_transfer_params={"do_remote_prefill": True}), 400, "kv_transfer_params"),
    (COMPLETIONS, completion(kv_transfer_params={"remote_host": "10.0.0.1"}), 400, "kv_transfer_params"),
    (COMPLETIONS, completion(prefill={"url": "http://10.0.0.1"}), 400, "prefill"),
    (CHAT, chat(bootstrap_room=1), 400, "bootstrap_room"),
    (CHAT, chat(tools=[{"type": "function"}]), 400, "tools"),
]


async def test_bad_bodies_are_4xx_that_name_the_parameter_and_hold_nothing(
    fleet: Fleet, gateway: GatewayProcess
) -> None:
    async with aiohttp.ClientSession() as http, asyncio.timeout(WAIT_S):
        for path, body, status, param in BAD_BODIES:
            async with http.post(gateway.url + path, data=io.BytesIO(body)) as answer:
                error = (await answer.json())["error"]
                seen = (answer.status, error["param"])
                assert seen == (status, param), (path, body[:100], error)
                assert set(error) == {"message", "type", "param", "code"}
                assert error["message"]
    await gateway.settled()
    await fleet.settled(*WORKERS)
    assert (await gateway.chat("Still fine?"))[0] == 200


JUNK_HEADERS = [
    b"Content-Type: \x7f/garbage; charset=klingon", b"Content-Encoding: gzip", b"Content-Length: -5",
    b"Authorization: Bearer \x80\xff", b"X-Request-Id: \xf0\x9f\x92\xa9" + b"a" * 4000, b"no colon here",
    b"X-Long: " + b"a" * 20_000, b"X-Nul: a\x00b", b"Transfer-Encoding: chunked", b"Expect: 200-maybe",
    b"x-prfaas-decode-worker: nobody\r\nx-prfaas-attempts: 99\r\nx-prfaas-placement: remote",
]  # fmt: skip


async def test_header_junk_is_served_or_refused_and_holds_nothing(
    fleet: Fleet, gateway: GatewayProcess
) -> None:
    body = chat(max_tokens=2)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n".encode()
    for header in JUNK_HEADERS:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        try:
            writer.write(head + header + b"\r\n\r\n" + body)
            status_line = await asyncio.wait_for(reader.readline(), WAIT_S)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        assert 200 <= int(status_line.split()[1]) < 500, (header[:40], status_line)
    await gateway.settled()
    await fleet.settled(*WORKERS)


@dataclass
class Asked:
    """One request of many, and what came of it."""

    body: dict[str, Any]
    status: int = 0
    """0 where its client gave it up."""
    answer: dict[str, Any] | None = None
    """Where it was neither given up nor streamed."""


async def give_up_somewhere(
    http: aiohttp.ClientSession, gateway: GatewayProcess, number: int, rng: random.Random
) -> Asked:
    """Ask for something, and stop listening at a random moment."""
    text = f"Number {number % 100}. " + SENTENCE * rng.randrange(1, 25)
    choices, stream, pause_s = rng.choice([1, 1, 2]), rng.random() < 0.5, rng.random() ** 2 * 1.5
    asked = Asked(chat_body(text, max_tokens=rng.choice([1, 20, 200]), stream=stream, n=choices))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(pause_s), http.post(gateway.url + CHAT, json=asked.body) as answer:
            data = await answer.read()
            asked.status = answer.status
            asked.answer = None if stream else json.loads(data)
    return asked


async def check_text(gateway: GatewayProcess, asked: Asked) -> None:
    """The same request, undisturbed and from nothing cached, has the same answer."""
    async with aiohttp.ClientSession() as http, asyncio.timeout(WAIT_S):
        body = {**asked.body, "cache_salt": "afterwards"}
        async with http.post(gateway.url + CHAT, json=body) as answer:
            assert answer.status == 200
            assert asked.answer is not None
            assert (await answer.json())["choices"] == asked.answer["choices"]


async def test_500_requests_aborted_at_random_moments_leave_nothing_behind(
    fleet: Fleet, gateway: GatewayProcess
) -> None:
    _, _, body = await gateway.chat(SENTENCE * 10, cache_salt="before", max_tokens=60)
    before = Asked(chat_body(SENTENCE * 10, max_tokens=60), 200, body)
    rng, places = random.Random(11), asyncio.Semaphore(AT_ONCE)

    async def one(number: int) -> Asked:
        async with places:
            return await give_up_somewhere(http, gateway, number, rng)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        asked = await asyncio.gather(*(one(number) for number in range(ABORTS)))
    statuses = [each.status for each in asked]
    assert set(statuses) <= {0, 200, 429}
    assert statuses.count(0) > ABORTS / 10

    await gateway.settled(timeout_s=20)
    await fleet.settled(*WORKERS, timeout_s=20)
    for kind in ("local", "pool", "remote"):
        assert await gateway.metric("prfaas_router_decisions_total", decision=kind) > 0, kind
    assert await gateway.metric("prfaas_requests_total", code="499") > 0
    assert await gateway.metric("prfaas_requests_total", code="500") == 0
    assert await gateway.metric("prfaas_bookings_expired_total") == 0
    assert await gateway.metric("prfaas_kv_transfer_failures_total", kind="corrupt") == 0
    for name in WORKERS:
        assert "Traceback" not in fleet.log_path(name).read_text(), name
    finished = [each for each in asked if each.status == 200 and each.answer is not None]
    for each in [before, *finished[:3], *finished[-3:]]:
        await check_text(gateway, each)

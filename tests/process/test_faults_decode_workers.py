"""Decode workers that die, stop or are full behind a real gateway: another one answers unseen, a stream
that has begun ends cleanly, and a worker that is back is used again."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from fleet import WAIT_S, Fleet, eventually, fleet_tree, running_fleet
from gateway_process import GatewayProcess, chat_body, running_gateway

pytestmark = [
    pytest.mark.process,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]
DECODES = ("decode-0", "decode-1")
WORKERS = (*DECODES, "prefill-0")
TEXT = "Whoever keeps the copies must keep this notice with them. " * 6
LONG_ANSWER = 200
"""Tokens; with the engine's share of the CPU that is seconds."""
QUEUE = 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("decode-workers")


@pytest.fixture(scope="module")
def tree(tiny_model_path: Path, directory: Path) -> dict[str, Any]:
    """Two slow decode workers with short queues, and a prefill worker beside them."""
    tree = fleet_tree(tiny_model_path, directory / "state")
    other = fleet_tree(tiny_model_path, directory / "state")["clusters"]["pd"]["workers"]["decode-0"]
    workers = tree["clusters"]["pd"]["workers"]
    workers["decode-1"] = other
    for name in DECODES:
        workers[name].update(cpu_share=0.25, max_running=2, max_queue=QUEUE)
    del tree["clusters"]["far"]
    tree["links"] = {}
    return tree


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tree: dict[str, Any], directory: Path) -> AsyncIterator[Fleet]:
    async with running_fleet(tree, directory, *WORKERS) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(fleet: Fleet, tree: dict[str, Any], directory: Path) -> AsyncIterator[GatewayProcess]:
    """Every placement in turn: each decode worker gets its share, with prefill here and there."""
    async with running_gateway(tree, directory, "round_robin") as running:
        yield running


def content(body: dict[str, Any]) -> str:
    return str(body["choices"][0]["message"]["content"])


async def expected_text(gateway: GatewayProcess, text: str) -> str:
    """The undisturbed answer, from nothing cached."""
    status, _, body = await gateway.chat(text, max_tokens=LONG_ANSWER, cache_salt="expected")
    assert status == 200, body
    return content(body)


async def decoding_on(fleet: Fleet) -> str:
    """The decode worker whose engine decodes by now."""
    found: list[str] = []

    async def one_runs() -> bool:
        found[:] = [name for name in DECODES if (await fleet.status(name)).running_context_tokens]
        return bool(found)

    await eventually(one_runs, "a decode worker decodes")
    return found[0]


async def kill(fleet: Fleet, name: str) -> None:
    fleet.signal(name, signal.SIGKILL)
    await fleet.wait_exit(name)


async def used_again(gateway: GatewayProcess, name: str) -> None:
    """Wait until the gateway places on a worker that is back, and get an answer from it."""

    async def ready() -> bool:
        return name in await gateway.ready_workers()

    async def answers() -> bool:
        status, headers, _ = await gateway.chat("Are you there?", max_tokens=2)
        assert status == 200
        return headers["x-prfaas-decode-worker"] == name

    await eventually(ready, f"{name} is ready for the gateway")
    await eventually(answers, f"{name} answers")


async def all_quiet(fleet: Fleet, gateway: GatewayProcess, *names: str) -> None:
    await fleet.settled(*names, timeout_s=20)
    await gateway.settled()


async def test_a_killed_decode_worker_is_replaced_unseen_and_used_again_once_it_is_back(
    fleet: Fleet, gateway: GatewayProcess
) -> None:
    expected = await expected_text(gateway, TEXT)
    pending = asyncio.create_task(gateway.chat(TEXT, max_tokens=LONG_ANSWER, cache_salt="killed"))
    victim = await decoding_on(fleet)
    (survivor,) = {*DECODES} - {victim}
    await kill(fleet, victim)
    status, headers, body = await pending
    assert status == 200, body
    assert (headers["x-prfaas-attempts"], headers["x-prfaas-decode-worker"]) == ("2", survivor)
    assert content(body) == expected
    assert body["usage"]["completion_tokens"] == LONG_ANSWER
    await all_quiet(fleet, gateway, survivor, "prefill-0")

    await fleet.start(victim)
    await used_again(gateway, victim)
    await all_quiet(fleet, gateway, *WORKERS)


async def test_a_stopped_decode_worker_is_replaced_unseen_and_used_again_when_it_goes_on(
    fleet: Fleet, gateway: GatewayProcess
) -> None:
    text = "Stopped. " + TEXT
    expected = await expected_text(gateway, text)
    pending = asyncio.create_task(gateway.chat(text, max_tokens=LONG_ANSWER, cache_salt="stopped"))
    victim = await decoding_on(fleet)
    fleet.signal_tree(victim, signal.SIGSTOP)
    try:
        status, headers, body = await pending
        assert status == 200, body
        assert headers["x-prfaas-attempts"] == "2"
        assert headers["x-prfaas-decode-worker"] != victim
        assert content(body) == expected
        assert victim not in await gateway.ready_workers()
    finally:
        fleet.signal_tree(victim, signal.SIGCONT)
    await used_again(gateway, victim)
    await all_quiet(fleet, gateway, *WORKERS)


async def test_a_decode_worker_killed_in_mid_stream_ends_it_with_an_error_event_and_without_done(
    fleet: Fleet, gateway: GatewayProcess
) -> None:
    body = chat_body("Stream. " + TEXT, max_tokens=LONG_ANSWER, stream=True)
    lines: list[bytes] = []
    async with aiohttp.ClientSession() as http, asyncio.timeout(WAIT_S):
        async with http.post(f"{gateway.url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
            victim = answer.headers["x-prfaas-decode-worker"]
            async for line in answer.content:  # ends, and without a torn chunk, or this raises
                lines.append(line.strip())
                if len(lines) == 4:
                    await kill(fleet, victim)
    events = [json.loads(line.removeprefix(b"data: ")) for line in lines if line]
    assert b"data: [DONE]" not in lines
    assert events[-1]["error"]["code"] == "peer_lost"
    assert all("choices" in event for event in events[:-1])
    (survivor,) = {*DECODES} - {victim}
    await all_quiet(fleet, gateway, survivor, "prefill-0")
    await fleet.start(victim)
    await used_again(gateway, victim)


async def test_beyond_all_queues_requests_are_429_with_retry_after_and_the_others_are_right(
    fleet: Fleet, gateway: GatewayProcess
) -> None:
    _, _, alone = await gateway.chat(TEXT, max_tokens=80, cache_salt="alone")
    answers = await asyncio.gather(
        *(gateway.chat(TEXT, max_tokens=80, cache_salt=f"crowd-{number}") for number in range(30))
    )
    by_status = {status: [one for one in answers if one[0] == status] for status in {a[0] for a in answers}}
    assert set(by_status) == {200, 429}
    for _, headers, body in by_status[429]:
        assert int(headers["Retry-After"]) >= 1
        assert body["error"]["type"] == "rate_limit_error"
    for _, _, body in by_status[200]:
        assert content(body) == content(alone)
    await all_quiet(fleet, gateway, *WORKERS)
    assert (await gateway.chat("After the crowd."))[0] == 200


async def test_without_a_decode_worker_requests_are_503_with_retry_after_until_one_is_back(
    fleet: Fleet, gateway: GatewayProcess
) -> None:
    await asyncio.gather(*(kill(fleet, name) for name in DECODES))

    async def known() -> bool:
        return not await gateway.ready_workers()

    await eventually(known, "the gateway knows that they are gone")
    for stream in (False, True):
        status, headers, body = await gateway.chat("Anybody?", stream=stream)
        assert (status, body["error"]["code"]) == (503, "no_decode_worker")
        assert int(headers["Retry-After"]) >= 1
    await all_quiet(fleet, gateway, "prefill-0")
    await fleet.start("decode-1")
    await used_again(gateway, "decode-1")
    await all_quiet(fleet, gateway, "decode-1", "prefill-0")

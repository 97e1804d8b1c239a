"""The gateway as a process over real workers: real clients, equal answers wherever prefill ran, faults."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from fleet import WAIT_S, Fleet, eventually, fleet_tree, running_fleet
from gateway_process import GatewayProcess, running_gateway

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]
WORKERS = ("decode-0", "prefill-0", "remote-0")
LONG = "The licence says that you may copy, change and pass on the program. " * 12


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gateway")


@pytest.fixture(scope="module")
def tree(tiny_model_path: Path, directory: Path) -> dict[str, Any]:
    return fleet_tree(tiny_model_path, directory / "state")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tree: dict[str, Any], directory: Path) -> AsyncIterator[Fleet]:
    async with running_fleet(tree, directory, *WORKERS) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(fleet: Fleet, tree: dict[str, Any], directory: Path) -> AsyncIterator[GatewayProcess]:
    async with running_gateway(tree, directory, "cost_model") as running:
        yield running


@pytest.fixture
def extra_gateways(tree: dict[str, Any], directory: Path) -> Iterator[Any]:
    """Further gateways over the same workers."""
    made: list[GatewayProcess] = []

    def make(policy: str, **gateway: Any) -> GatewayProcess:
        made.append(GatewayProcess(tree, directory, policy, **gateway))
        return made[-1]

    yield make
    for process in made:
        process.stop()


async def test_the_openai_client_chats_streams_and_counts(gateway: GatewayProcess) -> None:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:
        assert [model.id async for model in client.models.list()] == ["test-model"]
        messages: Any = [{"role": "user", "content": "Say something."}]
        whole = await client.chat.completions.create(
            model="test-model", messages=messages, temperature=0, max_tokens=12, logprobs=True, top_logprobs=2
        )
        stream = await client.chat.completions.create(
            model="test-model", messages=messages, temperature=0, max_tokens=12, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        plain = await client.completions.create(model="test-model", prompt=["a b", "c d"], max_tokens=3, n=2)

    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content[0].top_logprobs) == 2
    assert len(plain.choices) == 4


async def test_local_and_remote_prefill_give_identical_tokens(fleet: Fleet, extra_gateways: Any) -> None:
    answers = {}
    for policy in ("always_local", "always_remote"):
        gateway = extra_gateways(policy)
        await gateway.wait_ready()
        status, headers, body = await gateway.chat(LONG, cache_salt=policy)
        assert status == 200, body
        answers[headers["x-prfaas-placement"]] = body["choices"][0]["token_ids"]
    assert set(answers) == {"local", "remote"}
    assert answers["local"] == answers["remote"]
    assert len(answers["local"]) == 24


async def test_a_repeated_prompt_is_a_reuse_with_honest_cached_tokens(gateway: GatewayProcess) -> None:
    text = "Reuse this. " + LONG
    await gateway.chat(text)

    async def reused() -> bool:
        _, headers, body = await gateway.chat(text)
        cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        prompt = body["usage"]["prompt_tokens"]
        return headers["x-prfaas-placement"] == "reuse" and prompt - 32 <= cached < prompt

    await eventually(reused, "the prefix is reused")


async def test_a_client_that_goes_away_leaves_nothing_running(fleet: Fleet, extra_gateways: Any) -> None:
    gateway = extra_gateways("always_remote")
    await gateway.wait_ready()
    for pause_s in (0.01, 0.05, 0.15, 0.3):
        pending = asyncio.create_task(gateway.chat(f"{pause_s} {LONG}", max_tokens=400))
        await asyncio.sleep(pause_s)
        pending.cancel()
        await asyncio.gather(pending, return_exceptions=True)
    await fleet.settled(*WORKERS)


async def test_a_killed_prefill_worker_is_replaced_unseen_and_its_successor_used(
    fleet: Fleet, gateway: GatewayProcess, extra_gateways: Any
) -> None:
    _, _, expected = await gateway.chat(LONG, cache_salt="expected")
    remote = extra_gateways("always_remote")
    await remote.wait_ready()
    pending = [asyncio.create_task(remote.chat(LONG, cache_salt=f"kill-{number}")) for number in range(4)]
    await asyncio.sleep(0.1)
    fleet.signal_tree("remote-0", signal.SIGKILL)
    await fleet.wait_exit("remote-0")
    for status, _headers, body in await asyncio.gather(*pending):
        if status == 200:
            assert body["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
        else:  # a policy that promises remote never becomes local by itself
            assert status in (502, 503)
    await fleet.settled("decode-0", "prefill-0")
    await fleet.start("remote-0")

    async def remote_again() -> bool:
        status, headers, _ = await remote.chat(LONG, cache_salt="after")
        return status == 200 and headers["x-prfaas-placement"] == "remote"

    await eventually(remote_again, "the restarted worker is used")


async def test_a_stopped_decode_worker_ends_the_stream_in_time_and_serves_after_it_continues(
    fleet: Fleet, gateway: GatewayProcess
) -> None:
    pending = asyncio.create_task(gateway.chat(LONG, max_tokens=300))
    await asyncio.sleep(0.2)
    fleet.signal_tree("decode-0", signal.SIGSTOP)
    try:
        status, headers, _ = await asyncio.wait_for(pending, 10)
    finally:
        fleet.signal_tree("decode-0", signal.SIGCONT)
    assert status in (502, 503)
    assert status == 502 or "Retry-After" in headers

    async def serves() -> bool:
        return (await gateway.chat("hello again"))[0] == 200

    await eventually(serves, "the worker serves again")
    await fleet.settled(*WORKERS)


async def test_sigterm_lets_running_answers_finish(extra_gateways: Any, fleet: Fleet) -> None:
    gateway = extra_gateways("always_local")
    await gateway.wait_ready()
    pending = asyncio.create_task(gateway.chat("finish this", max_tokens=200))
    await asyncio.sleep(0.2)
    gateway.process.send_signal(signal.SIGTERM)
    status, _, body = await pending
    assert status == 200
    assert body["usage"]["completion_tokens"] == 200
    assert await asyncio.to_thread(gateway.process.wait, WAIT_S) == 0


async def test_a_killed_gateway_leaves_nothing_on_the_workers_and_its_successor_serves(
    fleet: Fleet, extra_gateways: Any
) -> None:
    gateway = extra_gateways("always_remote")
    await gateway.wait_ready()
    pending = asyncio.create_task(gateway.chat("orphan " + LONG, max_tokens=400))
    await asyncio.sleep(0.2)
    gateway.process.kill()
    await asyncio.gather(pending, return_exceptions=True)
    await fleet.settled(*WORKERS)
    successor = extra_gateways("always_remote")
    await successor.wait_ready()
    assert (await successor.chat("successor " + LONG))[0] == 200


async def test_a_stopped_gateway_goes_on_where_it_was(fleet: Fleet, extra_gateways: Any) -> None:
    gateway = extra_gateways("always_remote")
    await gateway.wait_ready()
    pending = asyncio.create_task(gateway.chat("pause " + LONG, max_tokens=200))
    await asyncio.sleep(0.2)
    gateway.process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(2.5)  # longer than `timeouts.silence`
    gateway.process.send_signal(signal.SIGCONT)
    status, headers, body = await pending
    assert (status, headers["x-prfaas-attempts"]) == (200, "1")
    assert body["usage"]["completion_tokens"] == 200
    await fleet.settled(*WORKERS)

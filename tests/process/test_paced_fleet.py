"""Paced workers in one real process: the whole protocol with true bytes, and the gateway over them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml
from fleet import TOKEN, WAIT_S, Answer, Fleet, eventually, fleet_tree, free_port, make_config
from gateway_process import running_gateway

from prfaas.protocol.messages import Finished, Tokens

pytestmark = [pytest.mark.process, pytest.mark.asyncio(loop_scope="module")]
NAMES = ("decode-0", "decode-1", "prefill-0", "remote-0")
STEP_TIMES = {
    "prefill_base": "2ms", "prefill_token": "100us", "decode_base": "5ms", "decode_sequence": "1ms",
    "time_scale": 0.5,
}  # fmt: skip
LAYERS, KV_BYTES_PER_TOKEN = 2, 2 * 2 * 2 * 16 * 4
"""Of the tiny model: layers · (K, V) · heads · head dimension · float32."""


def paced_tree(model: Path, directory: Path) -> dict[str, Any]:
    tree = fleet_tree(model, directory / "state")
    pd = tree["clusters"]["pd"]["workers"]
    pd["decode-1"] = {**pd["decode-0"], "port": free_port()}
    for cluster in tree["clusters"].values():
        for worker in cluster["workers"].values():
            worker |= {"engine": "paced", "paced": STEP_TIMES, "checksum_pages": True}
    return tree


def start_many(tree: dict[str, Any], directory: Path, names: Sequence[str]) -> subprocess.Popen[bytes]:
    path = directory / "paced.yaml"
    path.write_text(yaml.safe_dump(tree))
    arguments = [argument for name in names for argument in ("-n", name)]
    with (directory / "paced.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "prfaas.worker.many", "-c", str(path), "--die-with-parent", *arguments],
            stdout=log, stderr=log, stdin=subprocess.DEVNULL,
        )  # fmt: skip


@contextlib.asynccontextmanager
async def running(
    tree: dict[str, Any], directory: Path
) -> AsyncIterator[tuple[Fleet, subprocess.Popen[bytes]]]:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as http:
        fleet = Fleet(make_config(tree), directory, http)
        process = start_many(tree, directory, NAMES)
        try:
            for name in NAMES:

                async def ready(name: str = name) -> bool:
                    assert process.poll() is None, (directory / "paced.log").read_text()[-3000:]
                    with contextlib.suppress(aiohttp.ClientError):
                        async with http.get(f"{fleet.url(name)}/readyz") as answer:
                            return answer.status == 200
                    return False

                await eventually(ready, f"{name} is ready", poll_s=0.1)
            yield fleet, process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, 15)
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("paced")


@pytest.fixture(scope="module")
def tree(tiny_model_path: Path, directory: Path) -> dict[str, Any]:
    return paced_tree(tiny_model_path, directory)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tree: dict[str, Any], directory: Path) -> AsyncIterator[Fleet]:
    async with running(tree, directory) as (fleet, _):
        yield fleet


@pytest.mark.parametrize("site", ["prefill-0", "remote-0"])
async def test_kv_crosses_with_checksums_and_the_answer_is_the_local_one(fleet: Fleet, site: str) -> None:
    prompt = [3 + (7 * i + len(site)) % 290 for i in range(100)]
    local = await fleet.generate("decode-0", fleet.request(prompt, cache_salt="local"))
    moved = await fleet.generate("decode-1", fleet.request(prompt, site=site))
    assert moved.finished.completion_tokens == 8
    assert moved.token_ids == local.token_ids
    report = moved.report
    # 99 tokens lie in seven pages of 16, which cross whole; checksums were compared on arrival.
    assert (report.site, report.computed_tokens) == (site, 99)
    assert report.kv_bytes == 7 * 16 * KV_BYTES_PER_TOKEN
    await fleet.settled(*NAMES)


async def test_a_prompt_seen_before_is_neither_computed_nor_sent_again(fleet: Fleet) -> None:
    prompt = [5 + i % 200 for i in range(161)]
    first = await fleet.generate("decode-0", fleet.request(prompt, site="remote-0"))
    again = await fleet.generate("decode-1", fleet.request(prompt, site="remote-0"))
    once_more = await fleet.generate("decode-0", fleet.request(prompt, site="remote-0"))
    assert first.report.computed_tokens == 160
    # Ten pages were cached at the site: sent to the other decode worker, not computed.
    assert (again.report.computed_tokens, again.report.kv_bytes) == (0, 160 * KV_BYTES_PER_TOKEN)
    # … and on the first one everything was there.
    assert once_more.report.decode_cached_tokens == 160
    assert once_more.report.kv_bytes == 0


async def test_requests_beside_each_other_all_end(fleet: Fleet) -> None:
    async def one(number: int) -> Answer:
        prompt = [3 + (number + i) % 250 for i in range(20 + 11 * number)]
        site = (None, "prefill-0", "remote-0")[number % 3]
        return await fleet.generate(f"decode-{number % 2}", fleet.request(prompt, site=site, max_tokens=20))

    answers = await asyncio.gather(*(one(number) for number in range(24)))
    assert [len(answer.token_ids) for answer in answers] == [20] * 24
    await fleet.settled(*NAMES)


async def test_a_cancelled_request_frees_everything(fleet: Fleet) -> None:
    prompt = [9 + i % 100 for i in range(1500)]
    frames = fleet.frames("decode-0", fleet.request(prompt, site="remote-0", max_tokens=200))
    await anext(frames)
    await frames.aclose()  # type: ignore[attr-defined]
    await fleet.settled(*NAMES)


async def test_the_gateway_serves_token_ids_over_them(
    fleet: Fleet, tree: dict[str, Any], directory: Path
) -> None:
    async with running_gateway(tree, directory, "cost_model", calibrate=True) as gateway:
        body = {
            "model": "test-model", "prompt": [[30 + i % 200 for i in range(600)], [4, 5, 6]],
            "max_tokens": 9, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        async with aiohttp.ClientSession() as http, asyncio.timeout(WAIT_S):
            async with http.post(f"{gateway.url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                choices = (await answer.json())["choices"]
        assert [len(choice["token_ids"]) for choice in choices] == [9, 9]
        direct = await fleet.generate("decode-1", fleet.request([4, 5, 6], max_tokens=9))
        assert choices[1]["token_ids"] == direct.token_ids
        await gateway.settled()


async def test_sigterm_ends_all_of_them_in_order(tiny_model_path: Path, tmp_path: Path) -> None:
    async with running(paced_tree(tiny_model_path, tmp_path), tmp_path) as (fleet, process):
        request = fleet.request([8] * 300, site="remote-0", max_tokens=300)
        tokens, ended = 0, False
        async for frame in fleet.frames("decode-0", request):
            if isinstance(frame, Tokens):
                if not tokens:
                    process.send_signal(signal.SIGTERM)
                tokens += len(frame.token_ids)
            ended = isinstance(frame, Finished)
        assert (tokens, ended) == (300, True)
        assert await asyncio.to_thread(process.wait, 15) == 0


async def test_engines_that_compute_do_not_share_a_process(tiny_model_path: Path, tmp_path: Path) -> None:
    tree = fleet_tree(tiny_model_path, tmp_path / "state")
    process = start_many(tree, tmp_path, ["decode-0"])
    assert await asyncio.to_thread(process.wait, WAIT_S) == 1
    assert "only paced ones share a process" in (tmp_path / "paced.log").read_text()

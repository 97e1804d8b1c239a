"""Real decode and prefill workers: equal answers wherever the prompt was prefilled, bad input refused."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from fleet import WAIT_S, Answer, Fleet, fleet_tree, free_port, running_fleet

from prfaas.engine.interface import StepProfile
from prfaas.kv.hashing import block_hashes
from prfaas.protocol.messages import (
    Accepted,
    KVSnapshot,
    KVStored,
    Prefilled,
    Tokens,
    WarmRequest,
    WorkerEvent,
    WorkerInfo,
    WorkerStatus,
)

pytestmark = [
    pytest.mark.process,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]
PAGE = 16
CHUNK = 64


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    directory = tmp_path_factory.mktemp("fleet")
    tree = fleet_tree(tiny_model_path, directory / "state")
    tree["clusters"]["pd"]["workers"]["decode-1"] = {
        **tree["clusters"]["pd"]["workers"]["decode-0"],
        "port": free_port(),
    }
    for cluster in tree["clusters"].values():
        for worker in cluster["workers"].values():
            worker["checksum_pages"] = True
    async with running_fleet(tree, directory, "decode-0", "decode-1", "prefill-0", "remote-0") as running:
        yield running


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


async def reference(fleet: Fleet, token_ids: list[int], **sampling: Any) -> Answer:
    """The answer computed on the decode worker alone, from nothing (its own salt: no cached prefix)."""
    salt = f"reference-{random.random()}"
    return await fleet.generate("decode-0", fleet.request(token_ids, cache_salt=salt, **sampling))


@pytest.mark.parametrize("site", ["prefill-0", "remote-0"])
@pytest.mark.parametrize("length", [1, 2, PAGE, PAGE + 1, PAGE + 2, 5 * PAGE + 1, 3 * CHUNK + 7, 1500])
async def test_remote_prefill_gives_the_tokens_of_local_prefill(fleet: Fleet, site: str, length: int) -> None:
    token_ids = prompt(length, seed=100 * length + len(site))
    answer = await fleet.generate("decode-0", fleet.request(token_ids, site=site, max_tokens=12))
    local = await reference(fleet, token_ids, max_tokens=12)
    assert answer.token_ids == local.token_ids
    assert answer.text == local.text
    assert answer.finished.completion_tokens == len(answer.token_ids) == 12
    assert answer.finished.finish_reason == "length"
    assert isinstance(answer.frames[0], Accepted)
    report = answer.report
    assert report.computed_tokens == length - 1
    assert report.cached_tokens == report.decode_cached_tokens == 0
    if length > 1:
        assert report.site == site
        pages = -(-(length - 1) // PAGE)
        assert report.kv_bytes == pages * PAGE * 512
    await fleet.settled("decode-0", site)


async def test_only_what_the_decode_worker_lacks_crosses(fleet: Fleet) -> None:
    document = prompt(20 * PAGE, seed=1)
    await fleet.generate("decode-0", fleet.request(document))
    question = document + prompt(3 * PAGE, seed=2)
    answer = await fleet.generate("decode-0", fleet.request(question, site="remote-0"))
    assert answer.token_ids == (await reference(fleet, question)).token_ids
    report = answer.report
    assert report.decode_cached_tokens == 20 * PAGE
    assert report.kv_bytes == 3 * PAGE * 512
    await fleet.settled("decode-0", "remote-0")


async def test_what_the_prefill_worker_has_cached_is_sent_and_not_computed(fleet: Fleet) -> None:
    document = prompt(10 * PAGE, seed=3)
    first = await fleet.generate("decode-0", fleet.request(document, site="prefill-0", cache_salt="a"))
    assert first.report.cached_tokens == 0
    longer = document + prompt(2 * PAGE, seed=4)
    answer = await fleet.generate("decode-0", fleet.request(longer, site="prefill-0", cache_salt="a"))
    assert answer.report.cached_tokens == 9 * PAGE
    assert answer.token_ids == (await reference(fleet, longer)).token_ids


@pytest.mark.parametrize("length", [8 * PAGE + 1, 8 * PAGE + 9])
async def test_a_document_that_another_decode_worker_asked_for_is_sent_from_the_cache(
    fleet: Fleet, length: int
) -> None:
    document = prompt(length, seed=5 + length)
    first = await fleet.generate("decode-0", fleet.request(document, site="remote-0"))
    second = await fleet.generate("decode-1", fleet.request(document, site="remote-0"))
    assert second.token_ids == first.token_ids
    assert second.report.cached_tokens == 8 * PAGE
    assert second.report.computed_tokens == length - 1 - 8 * PAGE
    assert second.report.kv_bytes == first.report.kv_bytes
    await fleet.settled("decode-0", "decode-1", "remote-0")


async def test_a_prompt_that_the_decode_worker_has_wholly_is_not_asked_for(fleet: Fleet) -> None:
    document = prompt(8 * PAGE + 1, seed=25)
    await fleet.generate("decode-0", fleet.request(document, site="remote-0"))
    before = await fleet.status("remote-0")
    again = await fleet.generate("decode-0", fleet.request(document, site="remote-0"))
    assert again.report.site == "decode-0"
    assert again.report.decode_cached_tokens == 8 * PAGE
    assert [link.bytes_total for link in (await fleet.status("remote-0")).links] == [
        link.bytes_total for link in before.links
    ]


async def test_requests_in_parallel_do_not_mix(fleet: Fleet) -> None:
    prompts = [prompt(40 + 37 * number, seed=100 + number) for number in range(12)]
    sites = ["prefill-0", "remote-0", None]
    answers = await asyncio.gather(
        *(
            fleet.generate("decode-0", fleet.request(token_ids, site=sites[number % 3], max_tokens=10))
            for number, token_ids in enumerate(prompts)
        )
    )
    for token_ids, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == (await reference(fleet, token_ids, max_tokens=10)).token_ids
    await fleet.settled("decode-0", "prefill-0", "remote-0")


async def test_siblings_with_one_document_compute_it_once(fleet: Fleet) -> None:
    document = prompt(30 * PAGE, seed=6)
    prompts = [document + prompt(PAGE, seed=200 + number) for number in range(4)]
    answers = await asyncio.gather(
        *(fleet.generate("decode-0", fleet.request(token_ids, site="prefill-0")) for token_ids in prompts)
    )
    cached = sorted(answer.report.cached_tokens for answer in answers)
    assert cached == [0, 30 * PAGE, 30 * PAGE, 30 * PAGE]


async def test_a_stop_string_ends_the_answer_and_frees_the_slot(fleet: Fleet) -> None:
    token_ids = prompt(50, seed=7)
    whole = await reference(fleet, token_ids, max_tokens=60)
    text = whole.text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    answer = await fleet.generate("decode-0", fleet.request(token_ids, max_tokens=60, stop=(stop,)))
    assert answer.text == text[: text.index(stop)]
    assert answer.finished.finish_reason == "stop"
    await fleet.settled("decode-0")


async def test_a_stop_token_ends_the_answer_without_its_text(fleet: Fleet) -> None:
    token_ids = prompt(50, seed=8)
    whole = await reference(fleet, token_ids, max_tokens=20)
    stop = whole.token_ids[9]
    first = whole.token_ids.index(stop)
    answer = await fleet.generate("decode-0", fleet.request(token_ids, max_tokens=20, stop_token_ids=(stop,)))
    assert answer.finished.finish_reason == "stop"
    assert answer.token_ids == whole.token_ids[: first + 1]
    shown = [frame.text for frame in whole.frames if isinstance(frame, Tokens)][:first]
    assert answer.text.rstrip("\ufffd") == "".join(shown)


async def test_logprobs_come_with_every_token(fleet: Fleet) -> None:
    answer = await fleet.generate("decode-0", fleet.request(prompt(30, seed=9), max_tokens=5, logprobs=2))
    logprobs = [entry for frame in answer.frames if isinstance(frame, Tokens) for entry in frame.logprobs]
    assert len(logprobs) == 5
    for token, entry in zip(answer.token_ids, logprobs, strict=True):
        assert len(entry.top) == 2
        assert entry.top[0] == (token, entry.logprob)  # greedy takes the likeliest


async def test_the_report_precedes_the_end_and_comes_once(fleet: Fleet) -> None:
    for site in ("remote-0", None):
        answer = await fleet.generate("decode-0", fleet.request(prompt(90, seed=10), site=site, max_tokens=1))
        assert sum(isinstance(frame, Prefilled) for frame in answer.frames) == 1
        assert answer.finished


# ---------------------------------------------------------------- control plane


async def test_calls_without_the_service_token_are_refused(fleet: Fleet) -> None:
    for path in ("/v1/status", "/v1/info", "/v1/events"):
        for header in ({"Authorization": ""}, {"Authorization": "Bearer wrong"}, {"Authorization": "\xe9"}):
            async with fleet.http.get(fleet.url("decode-0") + path, headers=header) as answer:
                assert answer.status == 401
                assert (await answer.json())["reason"] == "bad_request"
    for path in ("/healthz", "/readyz", "/metrics"):
        async with fleet.http.get(fleet.url("decode-0") + path, headers={"Authorization": ""}) as answer:
            assert answer.status == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"request_id": 5}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"request_id":"r","attempt":1,"token_ids":[1e99],"sampling":{"max_tokens":1},"deadline_s":1}',
        b'{"request_id":"r","attempt":1,"token_ids":[],"sampling":{"max_tokens":1},"deadline_s":1}',
        b'{"request_id":"r","attempt":1,"token_ids":[99999],"sampling":{"max_tokens":1},"deadline_s":1}',
        b'{"request_id":"r","attempt":1,"token_ids":[5],"sampling":{"max_tokens":-1},"deadline_s":1}',
    ],
)
async def test_bad_bodies_are_400_with_a_reason(fleet: Fleet, body: bytes) -> None:
    async with fleet.http.post(f"{fleet.url('decode-0')}/v1/generate", data=body) as answer:
        assert answer.status == 400
        error = await answer.json()
        assert error["reason"] == "bad_request"
        assert error["message"]
    await fleet.settled("decode-0")


async def test_a_body_over_the_bound_is_413_and_an_unknown_path_404(fleet: Fleet) -> None:
    async with fleet.http.post(
        f"{fleet.url('decode-0')}/v1/generate", data=io.BytesIO(b" " * (10 * 2**20))
    ) as answer:
        assert answer.status == 413
    async with fleet.http.get(f"{fleet.url('prefill-0')}/v1/generate") as answer:
        assert answer.status == 404
        assert (await answer.json())["reason"] == "bad_request"


async def test_a_running_attempt_cannot_be_sent_twice(fleet: Fleet) -> None:
    request = fleet.request(prompt(20, seed=11), max_tokens=400)
    frames = fleet.frames("decode-0", request)
    await anext(frames)
    assert (await fleet.generate("decode-0", request)).status == 400
    await frames.aclose()
    await fleet.settled("decode-0")


async def test_info_tells_what_does_not_change(fleet: Fleet) -> None:
    async with fleet.http.get(f"{fleet.url('decode-0')}/v1/info") as answer:
        info = msgspec.json.decode(await answer.read(), type=WorkerInfo)
    assert (info.worker, info.cluster, info.role) == ("decode-0", "pd", "decode")
    assert info.layout.page_size == info.compat.page_size == PAGE
    assert info.context_length == 2048


async def test_calibration_measures_positive_times(fleet: Fleet) -> None:
    async with fleet.http.post(f"{fleet.url('prefill-0')}/v1/calibrate") as answer:
        assert answer.status == 200
        profile = msgspec.json.decode(await answer.read(), type=StepProfile)
    assert profile.chunk_tokens == CHUNK
    assert profile.prefill_base_s + CHUNK * profile.prefill_token_s > 0
    assert profile.decode_base_s + profile.decode_sequence_s > 0
    await fleet.settled("prefill-0")


async def test_warming_opens_a_session_and_measures_the_round_trip(fleet: Fleet) -> None:
    body = msgspec.json.encode(WarmRequest(prefill=fleet.site("remote-0")))
    async with fleet.http.post(f"{fleet.url('decode-0')}/v1/warm", data=body) as answer:
        assert answer.status == 200
    await fleet.generate("decode-0", fleet.request(prompt(200, seed=12), site="remote-0"))
    async with asyncio.timeout(WAIT_S):
        while True:
            (link,) = (await fleet.status("remote-0")).links
            if link.rtt_s:
                break
            await asyncio.sleep(0.05)
    assert link.cluster == "pd"
    assert link.rtt_s >= 0.02
    assert link.bytes_total > 0


async def test_metrics_are_prometheus_text_with_the_agreed_names(fleet: Fleet) -> None:
    async with fleet.http.get(f"{fleet.url('decode-0')}/metrics") as answer:
        text = await answer.text()
    for name in (
        "prfaas_requests_total",
        "prfaas_kv_pages",
        "prfaas_worker_requests",
        "prfaas_decode_tokens_total",
        "prfaas_prompt_ready_seconds_bucket",
        "prfaas_kv_transfer_failures_total",
    ):
        assert name in text


async def test_events_start_with_status_and_snapshot_and_then_name_new_blocks(fleet: Fleet) -> None:
    decoder = msgspec.json.Decoder(WorkerEvent)
    token_ids = prompt(6 * PAGE + 1, seed=13)
    expected = block_hashes(token_ids, PAGE)
    async with asyncio.timeout(WAIT_S), fleet.http.get(f"{fleet.url('decode-0')}/v1/events") as stream:
        status = decoder.decode(await stream.content.readline())
        snapshot = decoder.decode(await stream.content.readline())
        assert isinstance(status, WorkerStatus)
        assert status.state == "ready"
        assert isinstance(snapshot, KVSnapshot)
        assert not set(expected) & set(snapshot.block_hashes)
        await fleet.generate("decode-0", fleet.request(token_ids, site="prefill-0", max_tokens=1))
        sequence, stored, statuses = snapshot.sequence, [], 0
        while not set(expected) <= set(stored) or statuses < 3:
            event = decoder.decode(await stream.content.readline())
            if isinstance(event, WorkerStatus):
                statuses += 1
                continue
            assert event.sequence == sequence + 1
            assert event.generation == snapshot.generation
            sequence = event.sequence
            if isinstance(event, KVStored):
                stored += event.block_hashes

"""Workers that die, stop, leave or change their mind: typed failures in time, and nothing left behind."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from fleet import Fleet, eventually, fleet_tree, running_fleet
from tiny_model import make_tiny_model

from prfaas.protocol.messages import Accepted, Failed

pytestmark = [
    pytest.mark.process,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]
PAGE = 16
SILENCE_S = 1.5
SETTLE_S = 2.0
"""Quarantine is empty within 2 s of confirmation or fence."""
LONG = 1500
"""Tokens of a prompt that takes about three seconds on the slow link."""


def fault_tree(model_path: Path, directory: Path) -> dict[str, Any]:
    tree = fleet_tree(model_path, directory / "state")
    tree["links"]["wan"].update(capacity="2Mbit")
    tree["timeouts"] = {"drain": "20s"}
    return tree


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    directory = tmp_path_factory.mktemp("faults")
    tree = fault_tree(tiny_model_path, directory)
    async with running_fleet(tree, directory, "decode-0", "remote-0") as running:
        yield running


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


async def transferring(fleet: Fleet) -> None:
    """Wait until bytes of a live grant have landed."""
    before = sum(link.bytes_total for link in (await fleet.status("remote-0")).links)

    async def moving() -> bool:
        status = await fleet.status("remote-0")
        return bool(status.live_grants) and sum(link.bytes_total for link in status.links) > before

    await eventually(moving, "bytes are moving")


async def check_answers(fleet: Fleet, seed: int) -> None:
    """After a fault: the same pair serves again, and correctly."""
    token_ids = prompt(200, seed)
    remote = await fleet.generate("decode-0", fleet.request(token_ids, site="remote-0"))
    local = await fleet.generate("decode-0", fleet.request(token_ids, cache_salt="local"))
    assert remote.token_ids == local.token_ids, remote.frames
    await fleet.settled("decode-0", "remote-0")


async def test_a_prefill_worker_killed_in_a_transfer_fails_the_request_in_time_and_frees_all(
    fleet: Fleet,
) -> None:
    token_ids = prompt(LONG, seed=1)
    running = asyncio.create_task(fleet.generate("decode-0", fleet.request(token_ids, site="remote-0")))
    await transferring(fleet)
    fleet.signal("remote-0", signal.SIGKILL)
    killed_s = time.monotonic()
    answer = await asyncio.wait_for(running, SILENCE_S + SETTLE_S + 10)
    assert time.monotonic() - killed_s < SILENCE_S + 2
    failed = answer.failed
    assert (failed.site, failed.reason, failed.attempt) == ("remote-0", "peer_lost", 1)
    await fleet.settled("decode-0", timeout_s=SETTLE_S)
    await eventually(lambda: _sessions_gone(fleet), "the session is over", timeout_s=SETTLE_S)
    await fleet.wait_exit("remote-0")

    # What had arrived is kept, and a second attempt elsewhere (here: locally) builds on it.
    again = await fleet.generate("decode-0", fleet.request(token_ids, attempt=2))
    assert again.report.decode_cached_tokens == failed.complete_tokens
    fresh = await fleet.generate("decode-0", fleet.request(token_ids, cache_salt="fresh"))
    assert again.token_ids == fresh.token_ids

    # No worker there: the failure is immediate and typed. Then it returns on the same address.
    gone = await fleet.generate("decode-0", fleet.request(prompt(100, seed=2), site="remote-0"))
    assert gone.failed.reason == "peer_lost"
    await fleet.start("remote-0")
    await check_answers(fleet, seed=3)


async def test_a_decode_worker_killed_in_a_transfer_leaves_nothing_on_the_prefill_worker(
    fleet: Fleet,
) -> None:
    running = asyncio.create_task(
        fleet.generate("decode-0", fleet.request(prompt(LONG, seed=10), site="remote-0"))
    )
    await transferring(fleet)
    fleet.signal("decode-0", signal.SIGKILL)
    with pytest.raises(aiohttp.ClientError):
        await running
    await fleet.settled("remote-0", timeout_s=SILENCE_S + SETTLE_S)
    await fleet.wait_exit("decode-0")
    await fleet.start("decode-0")
    await check_answers(fleet, seed=11)


async def test_a_stopped_decode_worker_is_lost_to_the_prefill_worker_and_fails_typed_when_it_goes_on(
    fleet: Fleet,
) -> None:
    running = asyncio.create_task(
        fleet.generate("decode-0", fleet.request(prompt(LONG, seed=12), site="remote-0"))
    )
    await transferring(fleet)
    fleet.signal_tree("decode-0", signal.SIGSTOP)
    try:
        await fleet.settled("remote-0", timeout_s=SILENCE_S + SETTLE_S + 1)
    finally:
        fleet.signal_tree("decode-0", signal.SIGCONT)
    answer = await running
    assert answer.failed.reason == "peer_lost"
    await fleet.settled("decode-0", timeout_s=SETTLE_S)
    await check_answers(fleet, seed=13)


async def _sessions_gone(fleet: Fleet) -> bool:
    return (await fleet.status("decode-0")).sessions == 0


async def test_a_stopped_prefill_worker_is_lost_after_the_silence_bound_and_welcome_when_it_goes_on(
    fleet: Fleet,
) -> None:
    running = asyncio.create_task(
        fleet.generate("decode-0", fleet.request(prompt(LONG, seed=4), site="remote-0"))
    )
    await transferring(fleet)
    fleet.signal_tree("remote-0", signal.SIGSTOP)
    try:
        answer = await asyncio.wait_for(running, SILENCE_S + 10)
        assert answer.failed.reason == "peer_lost"
        await fleet.settled("decode-0", timeout_s=SETTLE_S + 1)
    finally:
        fleet.signal_tree("remote-0", signal.SIGCONT)
    await fleet.settled("decode-0", "remote-0")
    await check_answers(fleet, seed=5)


async def test_a_short_pause_of_the_prefill_worker_loses_nothing(fleet: Fleet) -> None:
    token_ids = prompt(400, seed=6)
    running = asyncio.create_task(fleet.generate("decode-0", fleet.request(token_ids, site="remote-0")))
    await transferring(fleet)
    fleet.signal_tree("remote-0", signal.SIGSTOP)
    await asyncio.sleep(0.5)
    fleet.signal_tree("remote-0", signal.SIGCONT)
    answer = await running
    local = await fleet.generate("decode-0", fleet.request(token_ids, cache_salt="local"))
    assert answer.token_ids == local.token_ids, answer.frames


async def test_a_client_that_leaves_in_the_prefill_frees_both_workers(fleet: Fleet) -> None:
    for seed in range(20, 23):
        frames = fleet.frames("decode-0", fleet.request(prompt(LONG, seed), site="remote-0"))
        assert isinstance(await anext(frames), Accepted)
        await transferring(fleet)
        await frames.aclose()
        await fleet.settled("decode-0", "remote-0", timeout_s=SETTLE_S + 1)
    assert (await fleet.status("decode-0")).sessions == 1  # no fence was needed
    await check_answers(fleet, seed=23)


async def test_a_client_that_leaves_while_decoding_frees_the_slot(fleet: Fleet) -> None:
    frames = fleet.frames("decode-0", fleet.request(prompt(100, seed=24), max_tokens=1900))
    for _ in range(4):
        await anext(frames)
    await frames.aclose()
    await fleet.settled("decode-0", timeout_s=SETTLE_S)


async def test_a_short_request_behind_cancelled_long_ones_does_not_wait_for_them(fleet: Fleet) -> None:
    streams = []
    for seed in range(30, 36):
        frames = fleet.frames("decode-0", fleet.request(prompt(LONG, seed), site="remote-0"))
        await anext(frames)
        streams.append(frames)
    for frames in streams:
        await frames.aclose()
    began_s = time.monotonic()
    answer = await fleet.generate("decode-0", fleet.request(prompt(40, seed=36), site="remote-0"))
    assert answer.finished
    assert time.monotonic() - began_s < 3.0  # six long ones would keep the link busy for eighteen
    await fleet.settled("decode-0", "remote-0")


async def test_aborts_at_random_moments_leave_nothing_behind(fleet: Fleet) -> None:
    rng = random.Random(7)

    async def abort(seed: int) -> None:
        length = rng.randrange(2, 700)
        site = rng.choice(["remote-0", "remote-0", None])
        try:
            async with asyncio.timeout(rng.random() * 0.8):
                await fleet.generate("decode-0", fleet.request(prompt(length, seed), site=site))
        except TimeoutError:
            pass

    for start in range(1000, 1500, 25):
        await asyncio.gather(*(abort(seed) for seed in range(start, start + 25)))
    await fleet.settled("decode-0", "remote-0")
    await check_answers(fleet, seed=8)


async def test_a_deadline_ends_the_request_and_both_legs(fleet: Fleet) -> None:
    request = fleet.request(prompt(LONG, seed=40), site="remote-0", deadline_s=0.8)
    answer = await fleet.generate("decode-0", request)
    assert answer.failed.reason == "deadline"
    await fleet.settled("decode-0", "remote-0", timeout_s=SETTLE_S + 1)


async def test_a_prompt_beyond_the_pages_of_the_prefill_worker_is_overloaded_there(
    fleet: Fleet, tiny_model_path: Path, tmp_path: Path
) -> None:
    tree = fault_tree(tiny_model_path, tmp_path)
    tree["clusters"]["pd"]["workers"]["prefill-0"]["memory"] = "80KiB"  # ten pages
    async with running_fleet(tree, tmp_path, "prefill-0") as small:
        request = fleet.request(prompt(300, seed=41))
        answer = await fleet.generate("decode-0", _at(request, small, "prefill-0"))
        assert answer.failed.reason == "overloaded"
        assert answer.failed.site == "prefill-0"
        fits = await fleet.generate("decode-0", _at(fleet.request(prompt(100, seed=42)), small, "prefill-0"))
        assert fits.finished
        await small.settled("prefill-0")
        await fleet.settled("decode-0")


@pytest.mark.parametrize("field", ["page_size", "weights"])
async def test_an_incompatible_prefill_worker_refuses_by_name_and_stays_up(
    fleet: Fleet, tiny_model_path: Path, tmp_path: Path, field: str
) -> None:
    tree = fault_tree(tiny_model_path, tmp_path)
    if field == "page_size":
        for cluster in tree["clusters"].values():
            for worker in cluster["workers"].values():
                worker["page_size"] = 32
    else:
        tree["model"]["path"] = str(make_tiny_model(tmp_path / "other", seed=9))
    async with running_fleet(tree, tmp_path, "prefill-0") as other:
        answer = await fleet.generate("decode-0", _at(fleet.request(prompt(50, seed=50)), other, "prefill-0"))
        assert answer.failed.reason == "incompatible"
        assert field in answer.failed.message
        assert (await other.status("prefill-0")).state == "ready"
        await fleet.settled("decode-0")
        await other.settled("prefill-0")


def _at(request: Any, fleet: Fleet, name: str) -> Any:
    from msgspec.structs import replace

    return replace(request, prefill=fleet.site(name))


async def test_draining_finishes_what_runs_refuses_the_rest_and_exits_zero(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    tree = fault_tree(tiny_model_path, tmp_path)
    async with running_fleet(tree, tmp_path, "decode-0", "remote-0") as fleet:
        token_ids = prompt(500, seed=60)
        running = asyncio.create_task(fleet.generate("decode-0", fleet.request(token_ids, site="remote-0")))
        await transferring(fleet)
        fleet.signal("remote-0", signal.SIGTERM)

        async def draining() -> bool:
            return (await fleet.status("remote-0")).state == "draining"

        await eventually(draining, "remote-0 is draining")
        async with fleet.http.get(f"{fleet.url('remote-0')}/readyz") as ready:
            assert ready.status == 503
        refused = await fleet.generate("decode-0", fleet.request(prompt(90, seed=61), site="remote-0"))
        assert (refused.failed.site, refused.failed.reason) == ("remote-0", "draining")
        assert (await running).finished
        assert await fleet.wait_exit("remote-0") == 0

        frames = fleet.frames("decode-0", fleet.request(prompt(90, seed=62), max_tokens=300))
        await anext(frames)
        fleet.signal("decode-0", signal.SIGTERM)

        async def refusing() -> bool:
            answer = await fleet.generate("decode-0", fleet.request(prompt(9, seed=63)))
            return answer.status == 503 and answer.error is not None and answer.error.reason == "draining"

        await eventually(refusing, "decode-0 refuses")
        rest = [frame async for frame in frames]
        assert not isinstance(rest[-1], Failed)
        assert await fleet.wait_exit("decode-0") == 0


async def test_a_second_signal_ends_at_once_and_leaves_no_child(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    tree = fault_tree(tiny_model_path, tmp_path)
    async with running_fleet(tree, tmp_path, "decode-0") as fleet:
        family = fleet.family("decode-0")
        frames = fleet.frames("decode-0", fleet.request(prompt(90, seed=64), max_tokens=1900))
        await anext(frames)
        fleet.signal("decode-0", signal.SIGTERM)
        await asyncio.sleep(0.2)
        fleet.signal("decode-0", signal.SIGTERM)
        assert await fleet.wait_exit("decode-0", timeout_s=5) == 128 + signal.SIGTERM
        with pytest.raises(Exception):  # noqa: B017, PT011 - cut, in whatever words the client has
            async for _ in frames:
                pass

        async def gone() -> bool:
            return not any(process.is_running() and process.status() != "zombie" for process in family)

        await eventually(gone, "the runner has ended, too", timeout_s=10)


async def test_an_engine_that_dies_fails_its_requests_and_the_worker_with_them(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    tree = fault_tree(tiny_model_path, tmp_path)
    async with running_fleet(tree, tmp_path, "decode-0") as fleet:
        frames = fleet.frames("decode-0", fleet.request(prompt(90, seed=65), max_tokens=1900))
        await anext(frames)
        for child in fleet.family("decode-0")[1:]:
            child.kill()
        rest = [frame async for frame in frames]
        assert isinstance(rest[-1], Failed)
        assert rest[-1].reason == "engine_failed"
        assert await fleet.wait_exit("decode-0") == 1


async def test_an_idle_pair_with_an_open_session_uses_next_to_no_cpu(
    tiny_model_path: Path, tmp_path: Path
) -> None:
    tree = fault_tree(tiny_model_path, tmp_path)
    async with running_fleet(tree, tmp_path, "decode-0", "prefill-0") as fleet:
        answer = await fleet.generate("decode-0", fleet.request(prompt(90, seed=66), site="prefill-0"))
        assert answer.finished
        assert (await fleet.status("decode-0")).sessions == 1
        await asyncio.sleep(1.0)
        before = {name: _cpu_s(fleet, name) for name in ("decode-0", "prefill-0")}
        await asyncio.sleep(4.0)
        used = {name: (_cpu_s(fleet, name) - before[name]) / 4.0 for name in before}
        assert all(core < 0.05 for core in used.values()), used


def _cpu_s(fleet: Fleet, name: str) -> float:
    """CPU seconds of a worker's whole process tree."""
    times = [process.cpu_times() for process in fleet.family(name)]
    return sum(each.user + each.system for each in times)

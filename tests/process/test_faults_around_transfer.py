"""Workers killed or stopped before a transfer and after it (in the middle: test_worker_faults.py). Answers
are right or the failure is typed, nothing is left behind, and the pair serves again."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest
import pytest_asyncio
from fleet import WAIT_S, Fleet, eventually, fleet_tree, running_fleet

from prfaas.protocol.messages import Failed, GenerateFrame, Tokens

pytestmark = [
    pytest.mark.process,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]
LOST_S = 1.5 + 2.0 + 2.0
"""Silence, quarantine, and slack for a busy machine."""
LONG_ANSWER = 300
"""Tokens; with the engine's share of the CPU that is a second or more."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    directory = tmp_path_factory.mktemp("around")
    tree = fleet_tree(tiny_model_path, directory / "state")
    tree["clusters"]["pd"]["workers"]["decode-0"]["cpu_share"] = 0.3
    async with running_fleet(tree, directory, "decode-0", "remote-0") as running:
        yield running


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


async def local_tokens(fleet: Fleet, token_ids: list[int], max_tokens: int = 8) -> list[int]:
    """The right answer: computed on the decode worker alone, from nothing."""
    request = fleet.request(token_ids, cache_salt="local", max_tokens=max_tokens)
    return (await fleet.generate("decode-0", request)).token_ids


async def check_answers(fleet: Fleet, seed: int) -> None:
    """The pair serves over its session (a new one after a fault), and correctly; nothing stays behind."""
    token_ids = prompt(200, seed)
    remote = await fleet.generate("decode-0", fleet.request(token_ids, site="remote-0"))
    assert remote.token_ids == await local_tokens(fleet, token_ids), remote.frames
    assert remote.report.site == "remote-0"
    await fleet.settled("decode-0", "remote-0")


async def sessions_are(fleet: Fleet, name: str, count: int) -> None:
    async def there() -> bool:
        return (await fleet.status(name)).sessions == count

    await eventually(there, f"{name} has {count} sessions", LOST_S)


async def first_tokens(frames: AsyncIterator[GenerateFrame]) -> list[int]:
    """Read until tokens came: the transfer is over, the answer is not."""
    async for frame in frames:
        if isinstance(frame, Tokens):
            return list(frame.token_ids)
    raise AssertionError("no token came")


async def rest(frames: AsyncIterator[GenerateFrame]) -> list[int]:
    async with asyncio.timeout(WAIT_S):
        return [token async for frame in frames if isinstance(frame, Tokens) for token in frame.token_ids]


async def kill(fleet: Fleet, name: str) -> None:
    """kill -9 of the control process alone; its children must not outlive it."""
    family = fleet.family(name)
    fleet.signal(name, signal.SIGKILL)
    await fleet.wait_exit(name)
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, timeout=10)
    assert not alive


async def test_a_decode_worker_killed_before_a_transfer_leaves_no_session_and_is_welcome_again(
    fleet: Fleet,
) -> None:
    await check_answers(fleet, seed=1)
    await kill(fleet, "decode-0")
    await sessions_are(fleet, "remote-0", 0)
    await fleet.settled("remote-0")
    await fleet.start("decode-0")
    await check_answers(fleet, seed=2)


async def test_a_decode_worker_killed_after_a_transfer_leaves_nothing_on_the_prefill_worker(
    fleet: Fleet,
) -> None:
    request = fleet.request(prompt(200, seed=3), site="remote-0", max_tokens=1800)  # it never gets so far
    frames = fleet.frames("decode-0", request)
    await first_tokens(frames)
    await kill(fleet, "decode-0")
    with pytest.raises(aiohttp.ClientError):
        await rest(frames)
    await fleet.settled("remote-0")
    await sessions_are(fleet, "remote-0", 0)
    await fleet.start("decode-0")
    await check_answers(fleet, seed=4)


async def test_a_decode_worker_stopped_before_a_transfer_serves_what_came_meanwhile(fleet: Fleet) -> None:
    await check_answers(fleet, seed=5)
    token_ids = prompt(200, seed=6)
    fleet.signal_tree("decode-0", signal.SIGSTOP)
    try:
        pending = asyncio.create_task(fleet.generate("decode-0", fleet.request(token_ids, site="remote-0")))
        await sessions_are(fleet, "remote-0", 0)
    finally:
        fleet.signal_tree("decode-0", signal.SIGCONT)
    answer = await pending
    # It may still believe in the session that the prefill worker has ended: then the failure is typed.
    if isinstance(answer.frames[-1], Failed):
        assert (answer.failed.site, answer.failed.reason) == ("remote-0", "peer_lost")
    else:
        assert answer.token_ids == await local_tokens(fleet, token_ids)
    await check_answers(fleet, seed=7)


async def test_a_decode_worker_stopped_after_a_transfer_goes_on_with_the_right_text(fleet: Fleet) -> None:
    token_ids = prompt(200, seed=8)
    expected = await local_tokens(fleet, token_ids, LONG_ANSWER)
    frames = fleet.frames("decode-0", fleet.request(token_ids, site="remote-0", max_tokens=LONG_ANSWER))
    generated = await first_tokens(frames)
    fleet.signal_tree("decode-0", signal.SIGSTOP)
    try:
        await sessions_are(fleet, "remote-0", 0)
        await fleet.settled("remote-0")
    finally:
        fleet.signal_tree("decode-0", signal.SIGCONT)
    generated += await rest(frames)
    assert generated == expected
    await check_answers(fleet, seed=9)


async def test_a_prefill_worker_stopped_before_a_transfer_is_peer_lost_and_welcome_when_it_goes_on(
    fleet: Fleet,
) -> None:
    await check_answers(fleet, seed=10)
    token_ids = prompt(200, seed=11)
    fleet.signal_tree("remote-0", signal.SIGSTOP)
    try:
        answer = await fleet.generate("decode-0", fleet.request(token_ids, site="remote-0"))
        assert (answer.failed.site, answer.failed.reason) == ("remote-0", "peer_lost")
        await fleet.settled("decode-0", timeout_s=LOST_S)
        # Whoever meets it without a session is told, too.
        again = await fleet.generate("decode-0", fleet.request(token_ids, site="remote-0"))
        assert (again.failed.site, again.failed.reason) == ("remote-0", "peer_lost")
        await fleet.settled("decode-0", timeout_s=LOST_S)
    finally:
        fleet.signal_tree("remote-0", signal.SIGCONT)
    await fleet.settled("decode-0", "remote-0")
    await check_answers(fleet, seed=12)


async def test_a_prefill_worker_stopped_after_a_transfer_does_not_matter_to_the_answer(fleet: Fleet) -> None:
    token_ids = prompt(200, seed=13)
    expected = await local_tokens(fleet, token_ids, LONG_ANSWER)
    frames = fleet.frames("decode-0", fleet.request(token_ids, site="remote-0", max_tokens=LONG_ANSWER))
    generated = await first_tokens(frames)
    fleet.signal_tree("remote-0", signal.SIGSTOP)
    try:
        generated += await rest(frames)
        assert generated == expected
        await fleet.settled("decode-0", timeout_s=LOST_S)
    finally:
        fleet.signal_tree("remote-0", signal.SIGCONT)
    await sessions_are(fleet, "remote-0", 0)
    await check_answers(fleet, seed=14)

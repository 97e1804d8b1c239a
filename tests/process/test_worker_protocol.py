"""A real prefill worker against a decode worker driven by hand: what the peer protocol refuses and bounds."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from fleet import Fleet, fleet_tree, running_fleet

from prfaas.kv.shared_buffer import SharedBuffer
from prfaas.protocol.messages import (
    Cancel,
    Grant,
    GrantFailed,
    Hello,
    PeerMessage,
    Refused,
    Welcome,
    WorkerInfo,
)
from prfaas.transfer.agent import AgentOptions
from prfaas.transfer.receiver import PageReceiver
from prfaas.worker.peer_channel import ChannelClosed, PeerChannel

pytestmark = [
    pytest.mark.process,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]
BOUND_S = 20.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    directory = tmp_path_factory.mktemp("protocol")
    tree = fleet_tree(tiny_model_path, directory / "state")
    tree["links"]["wan"].update(capacity="500kbit", rtt="2ms")
    async with running_fleet(tree, directory, "remote-0") as running:
        yield running


class Peer:
    """The decode side of a session, by hand: a channel and, once welcome, a receive agent."""

    def __init__(self, channel: PeerChannel, hello: Hello) -> None:
        self.channel = channel
        self.hello = hello

    async def expect(self, kind: type[Any]) -> Any:
        """The next message of type `kind`; others are skipped."""
        async with asyncio.timeout(BOUND_S):
            while not isinstance(message := await self.channel.receive(), kind):
                pass
        return message

    async def closed(self) -> str:
        """Why the prefill worker ended the session."""
        async with asyncio.timeout(BOUND_S):
            while self.channel.closed_reason is None:
                with contextlib.suppress(ChannelClosed):
                    await self.channel.receive()
        return self.channel.closed_reason


@contextlib.asynccontextmanager
async def peer(fleet: Fleet, name: str, *, welcome: bool = True, **changes: Any) -> AsyncIterator[Peer]:
    """Connect to `remote-0` as a decode worker; `changes` are made to its Hello."""
    async with fleet.http.get(f"{fleet.url('remote-0')}/v1/info") as answer:
        info = msgspec.json.decode(await answer.read(), type=WorkerInfo)
    buffer = SharedBuffer(info.layout.pool_bytes)
    receiver = PageReceiver(
        buffer,
        info.layout,
        asyncio.get_running_loop(),
        quarantine_s=60.0,
        options=AgentOptions(net_devices="lo"),
    )
    session = f"by-hand-{name}"
    hello = Hello(
        session=session,
        worker=name,
        cluster="pd",
        incarnation="i",
        compat=info.compat,
        layout=info.layout,
        pool_address=buffer.address,
        agent_metadata=await receiver.open(session, lambda due: None),
    )
    hello = msgspec.structs.replace(hello, **changes)
    socket = await fleet.http.ws_connect(f"{fleet.url('remote-0')}/v1/peer")
    channel = PeerChannel(socket, heartbeat_s=0.1, silence_s=10.0)
    try:
        channel.post(hello)
        there = Peer(channel, hello)
        if welcome:
            receiver.connect(session, (await there.expect(Welcome)).agent_metadata)
        yield there
    finally:
        await channel.close()
        await receiver.stop()
        buffer.close()


def grant(request_id: str, attempt: int = 1, length: int = 1500, **changes: Any) -> Grant:
    full = Grant(
        request_id=request_id,
        attempt=attempt,
        token_ids=[3 + (number * 7) % 290 for number in range(length)],
        cache_salt=request_id,
        first_page=0,
        page_ids=list(range(-(-(length - 1) // 16))),
        lease_s=60.0,
        deadline_s=60.0,
    )
    return msgspec.structs.replace(full, **changes)


async def test_grants_whose_lease_is_not_renewed_end_though_the_peer_still_talks(fleet: Fleet) -> None:
    async with peer(fleet, "lease") as there:
        there.channel._tasks[1].cancel()  # no heartbeats any more
        there.channel.post(grant("lease", lease_s=0.8))

        async def talk() -> None:
            while True:
                there.channel.post(Cancel(request_id="unknown", attempt=1))
                await asyncio.sleep(0.1)

        talking = asyncio.create_task(talk())
        failed = await there.expect(GrantFailed)
        talking.cancel()
        assert (failed.request_id, failed.reason) == ("lease", "deadline")
        assert "lease" in failed.message
    await fleet.settled("remote-0")


async def test_a_grant_past_its_deadline_fails_and_frees_its_pages(fleet: Fleet) -> None:
    async with peer(fleet, "deadline") as there:
        there.channel.post(grant("deadline", deadline_s=0.5))
        failed = await there.expect(GrantFailed)
        assert failed.reason == "deadline"
        await fleet.settled("remote-0")


async def test_a_stale_attempt_is_refused(fleet: Fleet) -> None:
    async with peer(fleet, "stale") as there:
        there.channel.post(grant("stale", attempt=2, deadline_s=0.2))
        await there.expect(GrantFailed)
        for attempt in (1, 2):
            there.channel.post(grant("stale", attempt=attempt))
            failed = await there.expect(GrantFailed)
            assert (failed.attempt, failed.reason) == (attempt, "bad_request")


async def test_a_grant_that_comes_twice_while_it_runs_ends_the_session(fleet: Fleet) -> None:
    async with peer(fleet, "twice") as there:
        there.channel.post(grant("twice"))
        there.channel.post(grant("twice"))
        assert "came twice" in await there.closed()
    await fleet.settled("remote-0")


@pytest.mark.parametrize(
    "changes",
    [{"page_ids": [5] * 94}, {"page_ids": [10**6] * 94}, {"token_ids": [5]}, {"first_page": 94}],
)
async def test_impossible_grants_are_refused_and_the_session_goes_on(
    fleet: Fleet, changes: dict[str, Any]
) -> None:
    async with peer(fleet, "impossible") as there:
        for _ in range(2):
            there.channel.post(grant("impossible", **changes))
            failed = await there.expect(GrantFailed)
            assert failed.reason == "bad_request"


async def test_a_new_session_of_the_same_worker_ends_the_old_one(fleet: Fleet) -> None:
    async with peer(fleet, "same", session="by-hand-same") as old:
        old.channel.post(grant("old"))
        async with peer(fleet, "same-again", worker="same"):
            assert "opened a new session" in await old.closed()
    await fleet.settled("remote-0")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 99}, "incompatible"),
        ({"agent_metadata": b"not an agent"}, "bad_request"),
        ({"pool_address": 0}, "bad_request"),
    ],
)
async def test_a_wrong_hello_is_refused_with_a_reason(
    fleet: Fleet, changes: dict[str, Any], reason: str
) -> None:
    async with peer(fleet, f"wrong-{next(iter(changes))}", welcome=False, **changes) as there:
        refused = await there.expect(Refused)
        assert refused.reason == reason
    await fleet.wait_ready("remote-0")


async def test_anything_but_hello_first_ends_the_session(fleet: Fleet) -> None:
    first: PeerMessage = grant("first")
    socket = await fleet.http.ws_connect(f"{fleet.url('remote-0')}/v1/peer")
    channel = PeerChannel(socket, heartbeat_s=0.1, silence_s=10.0)
    channel.post(first)
    with pytest.raises(ChannelClosed, match="Grant before Hello"):
        await asyncio.wait_for(channel.receive(), BOUND_S)
    await channel.close()

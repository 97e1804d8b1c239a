"""NIXL loses the peer while the control channel lives: the session must end, not confirm its attempts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from prfaas.engine.interface import LayerCounter
from prfaas.kv.layout import CacheGroup, CompatRecord, KVLayout
from prfaas.kv.shared_buffer import SharedBuffer
from prfaas.protocol.messages import Hello
from prfaas.transfer import receiver as receiver_module
from prfaas.transfer.agent import TransferError
from prfaas.transfer.events import AttemptKey, FenceDue, SendFailed
from prfaas.transfer.link import DirectLink
from prfaas.transfer.receiver import PageReceiver
from prfaas.transfer.sender import PageSender

GROUP = CacheGroup(kind="full", layers=(0, 1), kv_heads=1, head_dim=8)
LAYOUT = KVLayout(groups=(GROUP,), page_size=4, dtype="float32", num_pages=4)
HELLO = Hello(
    session="s",
    worker="decode-0",
    cluster="pd",
    incarnation="1",
    compat=CompatRecord(1, "w", "t", "gqa", "HND", 4, "float32", (GROUP,)),
    layout=LAYOUT,
    pool_address=4096,
    agent_metadata=b"",
)
KEY = AttemptKey("request", 1)


class NoLayers(LayerCounter):
    def value(self) -> int:
        return 0


class DisconnectedAgent:
    """Takes writes and finds the peer gone, at the post or later."""

    metadata = b""

    def __init__(self, at_post: bool) -> None:
        self.at_post = at_post
        self.destroyed = False
        self.posted = 0

    def write(self, *_: object) -> int:
        if self.at_post:
            raise TransferError("remote disconnected")
        self.posted += 1
        return self.posted

    def done(self, handle: int) -> bool:
        raise TransferError("remote disconnected")

    def notifications(self) -> list[Any]:
        return []

    def destroy(self) -> None:
        self.destroyed = True


@pytest.mark.parametrize("at_post", [True, False], ids=["post", "completion"])
async def test_a_lost_write_breaks_the_session_before_its_attempt_ends(
    at_post: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, buffer = DisconnectedAgent(at_post), SharedBuffer(LAYOUT.pool_bytes)
    sender = PageSender(buffer, LAYOUT, NoLayers(), asyncio.get_running_loop())
    monkeypatch.setattr(sender, "_make_agent", lambda hello: agent)
    heard: list[Any] = []
    ended = asyncio.Event()

    def on_event(event: Any) -> None:
        heard.append(event)
        ended.set()

    await sender.open(HELLO, DirectLink(), heard.append)
    sender.begin("s", KEY, 0, [0, 1], on_event)
    sender.send_cached(KEY, {0: 0, 1: 1})
    await asyncio.wait_for(ended.wait(), 5)
    assert heard[0] == "remote disconnected"
    assert isinstance(heard[1], SendFailed)
    await sender.stop()
    assert agent.destroyed
    assert len(heard) == 2
    buffer.close()


async def test_a_receive_agent_that_fails_asks_for_the_fence_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class FailingAgent(DisconnectedAgent):
        def notifications(self) -> list[Any]:
            raise TransferError("agent is broken")

    agent, buffer = FailingAgent(at_post=False), SharedBuffer(LAYOUT.pool_bytes)
    monkeypatch.setattr(receiver_module, "TransferAgent", lambda *_: agent)
    receiver = PageReceiver(buffer, LAYOUT, asyncio.get_running_loop(), quarantine_s=5.0)
    due: list[FenceDue] = []
    asked = asyncio.Event()

    def on_fence_due(fence: FenceDue) -> None:
        due.append(fence)
        asked.set()

    await receiver.open("s", on_fence_due)
    receiver.expect("s", KEY, 0, [0, 1], lambda event: None)
    await asyncio.wait_for(asked.wait(), 5)
    await asyncio.sleep(0.05)  # many polls
    assert [fence.session for fence in due] == ["s"]
    assert "agent is broken" in due[0].why
    await receiver.stop()
    assert agent.destroyed
    buffer.close()

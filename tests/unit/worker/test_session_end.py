"""A decode worker's peer session tells everybody who waits for it that it is over."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decode_service.grants import GrantFailure
from decode_service.session import PrefillSession
from prfaas.protocol.messages import PrefillSite

SITE = PrefillSite(worker="prefill-0", url="http://127.0.0.1:1", cluster="pd")


async def test_a_session_ended_before_its_first_step_fails_those_who_wait_for_it() -> None:
    ended: list[PrefillSession] = []
    host = cast("Any", SimpleNamespace(name="decode-0"))
    session = PrefillSession(host, cast("Any", None), SITE, ended.append)
    waiting = asyncio.ensure_future(asyncio.shield(session.opened))
    session.end("prefill-0 moved")
    with pytest.raises(GrantFailure, match="prefill-0 moved"):
        await asyncio.wait_for(waiting, 5)
    assert session.ended
    assert ended == [session]


async def test_an_agent_that_is_never_made_ends_the_session_in_time() -> None:
    async def hang(*_: object) -> bytes:
        await asyncio.Event().wait()
        return b""

    async def close(session: str) -> None:
        """There is nothing to fence."""

    receiver = SimpleNamespace(open=hang, close=close)
    host = cast("Any", SimpleNamespace(name="decode-0", receiver=receiver, handshake_s=0.05))
    session = PrefillSession(host, cast("Any", None), SITE, lambda ended: None)
    with pytest.raises(GrantFailure, match="no receive agent within") as caught:
        await asyncio.wait_for(asyncio.shield(session.opened), 5)
    assert (caught.value.site, caught.value.reason) == ("decode-0", "transfer_failed")
    await session.close("test over")

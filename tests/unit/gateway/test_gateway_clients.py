"""Clients that leave or stall at awkward moments hold nothing afterwards."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from gateway_fleet import Fleet, chat
from scripted_worker import answer, fail

from router import dispatch, streaming

CHAT = "/v1/chat/completions"


async def test_a_client_that_leaves_in_the_pause_before_a_replacement_leaves_no_booking(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "FIRST_PAUSE_S", 30.0)
    fleet.decode.script = fail("engine_failed", "decode-0")
    pending = asyncio.create_task(fleet.client.post(CHAT, json=chat()))
    scheduler = fleet.gateway.brain.scheduler
    await fleet.until(
        lambda: len(fleet.decode.requests) == 1 and scheduler.bookings == 1 and not fleet.decode.open_streams,
        "the first attempt has failed and the second one is booked",
    )
    await asyncio.sleep(0.05)
    pending.cancel()
    await asyncio.gather(pending, return_exceptions=True)

    await fleet.until(lambda: fleet.gateway.admission.inflight == 0, "the request is over")
    assert scheduler.bookings == 0
    assert len(fleet.decode.requests) == 1


async def test_a_client_that_reads_nothing_loses_its_place(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "aiohttp")
    monkeypatch.setattr(streaming, "WRITE_TIMEOUT_S", 0.3)
    fleet.decode.script = answer([([72], "x" * 2**20)] * 40)  # more than any socket buffers
    url = fleet.client.make_url(CHAT)
    _, writer = await asyncio.open_connection(url.host, url.port, limit=1024)
    body = json.dumps(chat(stream=True)).encode()
    writer.write(
        b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        % (CHAT.encode(), len(body), body)
    )
    await fleet.until(lambda: fleet.gateway.admission.inflight == 1, "the request runs")
    await fleet.until(lambda: fleet.gateway.admission.inflight == 0, "the stalled client is given up")
    assert fleet.gateway.brain.scheduler.bookings == 0
    writer.close()

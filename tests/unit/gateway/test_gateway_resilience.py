"""One defect, full disk or broken answer costs one thing, not the service."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from aiohttp import ClientSession
from gateway_fleet import Fleet, chat, fleet_config
from scripted_worker import answer

from prfaas.protocol.messages import GenerateRequest, Sampling
from prfaas.units import Seconds
from router.backends.native import NativeBackend
from router.decision_log import DecisionLog, DecisionRecord
from router.errors import AttemptFailed
from router.gateway import scheduler_config

CHAT = "/v1/chat/completions"


async def test_an_event_that_meets_a_defect_does_not_blind_the_gateway_to_its_worker(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, heard = fleet.gateway.workers, 0
    real = workers.status

    def fail_once(status: Any) -> None:
        nonlocal heard
        heard += status.worker == "decode-0"
        if heard == 1 and status.worker == "decode-0":
            raise RuntimeError("a defect")
        real(status)

    monkeypatch.setattr(workers, "status", fail_once)
    await fleet.until(lambda: heard > 3, "the worker is followed again")
    fleet.decode.script = answer([([72], "fine")])
    assert (await fleet.client.post(CHAT, json=chat())).status == 200


def test_a_full_disk_ends_the_decision_log_and_nothing_else() -> None:
    record = DecisionRecord(
        request_id="r", attempt=1, time_unix_s=0.0, calibration=False, prompt_tokens=1, max_tokens=1,
        kind="local", decode="d", site="d", link=None, predicted_ttft_s=0.0, decision={}, overhead_s={},
    )  # fmt: skip
    log = DecisionLog("/dev/full")
    log.opened(record)
    log.closed(record)
    log.closed(record)
    assert log.latest(5) == [record]
    log.close()


def test_a_booking_outlives_the_longest_request() -> None:
    config = fleet_config([], {"timeouts": {"request": Seconds(7200)}})
    assert scheduler_config(config).booking_deadline_s > 7200
    short = msgspec.structs.replace(config.timeouts, request=Seconds(1))
    assert scheduler_config(msgspec.structs.replace(config, timeouts=short)).booking_deadline_s >= 600


async def test_long_texts_are_decoded_off_the_event_loop(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, loop_thread = fleet.gateway.model, threading.get_ident()
    threads: list[int] = []
    real = model.decode

    def decode(token_ids: Sequence[int]) -> str:
        threads.append(threading.get_ident())
        return real(token_ids)

    monkeypatch.setattr(model, "decode", decode)
    for count in (3, 20_000):
        response = await fleet.client.post("/detokenize", json={"tokens": [70] * count})
        assert response.status == 200
    assert threads[0] == loop_thread
    assert threads[1] != loop_thread


async def test_a_refusal_that_breaks_off_is_a_lost_worker() -> None:
    async def half_an_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 100\r\n\r\nhalf")
        await writer.drain()
        writer.close()

    request = GenerateRequest(
        request_id="r", attempt=1, token_ids=[1], sampling=Sampling(max_tokens=1), deadline_s=5.0
    )
    server = await asyncio.start_server(half_an_answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, ClientSession() as session:
        frames = NativeBackend(session).generate("decode-0", f"http://127.0.0.1:{port}", request)
        with pytest.raises(AttemptFailed, match="its answer 503 broke") as caught:
            await anext(frames)
    assert caught.value.reason == "peer_lost"

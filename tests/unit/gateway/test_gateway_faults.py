"""Failed attempts, lost workers, deadlines, limits and clients that go away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from gateway_fleet import Fleet, MakeFleet, chat, events
from scripted_worker import Cut, Refuse, Script, answer, fail, hang

from prfaas.protocol.messages import GenerateFrame, GenerateRequest, Tokens
from prfaas.units import Seconds

CHAT = "/v1/chat/completions"


def in_turn(*scripts: Script) -> Script:
    """The first request gets the first script, and so on; the last one stays."""
    left = list(scripts)

    def script(request: GenerateRequest) -> AsyncIterator[GenerateFrame]:
        return (left.pop(0) if len(left) > 1 else left[0])(request)

    return script


async def cut_after_a_word(request: GenerateRequest) -> AsyncIterator[GenerateFrame]:
    yield Tokens(token_ids=[70], text="part ")
    await asyncio.sleep(0.02)
    raise Cut


def refuse(status: int, reason: str) -> Script:
    async def script(request: GenerateRequest) -> AsyncIterator[GenerateFrame]:
        raise Refuse(status, reason)
        yield

    return script


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "reason",
    ["peer_lost", "transfer_failed", "engine_failed", "incompatible", "draining", "overloaded", "corrupt"],
)
async def test_a_failed_attempt_is_replaced_unseen_and_counted(
    fleet: Fleet, reason: str, stream: bool
) -> None:
    fleet.decode.script = in_turn(fail(reason, "remote-0"), answer([([72], "fine")]))
    response = await fleet.client.post(CHAT, json=chat(stream=stream))
    body = await response.read()

    assert response.status == 200
    assert response.headers["x-prfaas-attempts"] == "2"
    assert response.headers["x-prfaas-prefill-worker"] != "remote-0"
    assert b"fine" in body
    assert b"error" not in body
    first, second = fleet.decode.requests
    assert (first.attempt, second.attempt) == (1, 2)
    assert first.request_id == second.request_id
    assert fleet.gateway.brain.scheduler.bookings == 0


async def test_a_whole_answer_survives_its_decode_worker_s_death_after_tokens(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(decodes=2)
    for name in ("decode-0", "decode-1"):
        fleet.workers[name].script = answer([([72], "whole")])
    died: list[str] = []

    async def die_once(request: GenerateRequest) -> AsyncIterator[GenerateFrame]:
        yield Tokens(token_ids=[70], text="lost ")
        if not died:
            died.append(request.request_id)
            await asyncio.sleep(0.02)
            raise Cut
        async for frame in answer([([72], "whole")])(request):
            yield frame

    for worker in fleet.workers.values():
        worker.script = die_once
    response = await fleet.client.post(CHAT, json=chat())
    text = (await response.json())["choices"][0]["message"]["content"]

    assert response.headers["x-prfaas-attempts"] == "2"
    assert text == "lost whole", "what the dead attempt said is void"
    assert died


async def test_after_streamed_text_a_failure_is_an_error_event_without_done(fleet: Fleet) -> None:
    fleet.decode.script = fail("engine_failed", "decode-0", after=2)
    response = await fleet.client.post(CHAT, json=chat(stream=True))
    body = await response.read()

    assert response.status == 200
    assert b"part0 " in body
    last = events(body)[-1]
    assert last["error"]["code"] == "engine_failed"
    assert b"[DONE]" not in body
    assert len(fleet.decode.requests) == 1


async def test_a_cut_stream_is_an_error_event(fleet: Fleet) -> None:
    fleet.decode.script = cut_after_a_word
    body = await (await fleet.client.post(CHAT, json=chat(stream=True))).read()
    assert events(body)[-1]["error"]["code"] == "peer_lost"
    assert b"[DONE]" not in body


async def test_attempts_end_at_the_limit_with_the_reason(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(gateway={"max_attempts": 2})
    fleet.decode.script = fail("transfer_failed", "remote-0")
    response = await fleet.client.post(CHAT, json=chat())
    error = (await response.json())["error"]

    assert (response.status, error["code"]) == (502, "transfer_failed")
    assert "remote-0" in error["message"]
    assert response.headers["x-prfaas-attempts"] == "2"
    assert len(fleet.decode.requests) == 2


async def test_with_fail_nothing_is_placed_again(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(gateway={"on_prefill_failure": "fail"})
    fleet.decode.script = fail("peer_lost", "remote-0")
    response = await fleet.client.post(CHAT, json=chat())
    assert response.status == 502
    assert len(fleet.decode.requests) == 1


async def test_a_worker_s_4xx_is_never_tried_again(fleet: Fleet) -> None:
    fleet.decode.script = refuse(400, "bad_request")
    response = await fleet.client.post(CHAT, json=chat())
    assert response.status == 400
    assert len(fleet.decode.requests) == 1


async def test_overload_everywhere_is_429_with_retry_after(fleet: Fleet) -> None:
    fleet.decode.script = refuse(429, "overloaded")
    response = await fleet.client.post(CHAT, json=chat())
    assert response.status == 429
    assert int(response.headers["Retry-After"]) >= 1
    assert (await response.json())["error"]["type"] == "rate_limit_error"


async def test_no_decode_worker_is_503_with_retry_after(fleet: Fleet) -> None:
    await fleet.decode.stop()
    await fleet.until(lambda: not fleet.gateway.workers.ready("decode"), "the worker is noticed as lost")
    response = await fleet.client.post(CHAT, json=chat())
    assert response.status == 503
    assert int(response.headers["Retry-After"]) >= 1
    assert (await fleet.client.get("/readyz")).status == 503
    assert (await fleet.client.get("/healthz")).status == 200


async def test_a_worker_that_comes_back_on_its_address_serves_again(fleet: Fleet) -> None:
    port = fleet.decode.port
    await fleet.decode.stop()
    await fleet.until(lambda: not fleet.gateway.workers.ready("decode"), "the worker is noticed as lost")
    fleet.decode.incarnation = "decode-0-2"
    await fleet.decode.start(port)
    await fleet.until(lambda: bool(fleet.gateway.workers.ready("decode")), "the worker is back")
    assert (await fleet.client.post(CHAT, json=chat())).status == 200


async def test_requests_on_a_silent_worker_end_without_waiting_for_tcp(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(decodes=2)
    for name in ("decode-0", "decode-1"):
        fleet.workers[name].script = hang()
    pending = asyncio.create_task(fleet.client.post(CHAT, json=chat()))
    await fleet.until(lambda: any(w.open_streams for w in fleet.workers.values()), "the request runs")
    stopped = next(worker for worker in fleet.workers.values() if worker.open_streams)
    for worker in fleet.workers.values():
        worker.script = answer([([72], "elsewhere")])
    stopped.silent = True
    response = await asyncio.wait_for(pending, 5)

    assert response.status == 200
    assert response.headers["x-prfaas-decode-worker"] != stopped.name
    assert stopped.name not in fleet.gateway.workers.ready()


async def test_a_stall_of_the_gateway_itself_loses_no_worker(fleet: Fleet) -> None:
    time.sleep(0.6)  # noqa: ASYNC251 - the stall is what is tested
    await asyncio.sleep(0.1)
    assert len(fleet.gateway.workers.ready()) == 3
    assert b"prfaas_worker_lost_total{" not in fleet.gateway.metrics.render()


@pytest.mark.parametrize("after", [0, 2], ids=["before the first token", "while streaming"])
async def test_a_client_that_goes_away_cancels_the_worker_s_stream_at_once(fleet: Fleet, after: int) -> None:
    fleet.decode.script = hang(after)
    pending = asyncio.create_task(_read(fleet, chat(stream=True)))
    await fleet.until(lambda: fleet.decode.open_streams == 1, "the request runs")
    await asyncio.sleep(0.05)
    pending.cancel()
    await asyncio.gather(pending, return_exceptions=True)

    await fleet.until(lambda: fleet.decode.cancelled == 1, "the worker hears of it")
    await fleet.until(lambda: fleet.gateway.brain.scheduler.bookings == 0, "the booking is released")
    assert fleet.gateway.admission.inflight == 0
    assert fleet.gateway.recorder.log.latest(1)[0].outcome == "client_gone"
    assert b'prfaas_requests_total{code="499",endpoint="chat"} 1.0' in fleet.gateway.metrics.render()


async def test_one_lost_choice_ends_all_streams_of_the_request(fleet: Fleet) -> None:
    fleet.decode.script = in_turn(answer([([72], "a")]), fail("bad_request", "decode-0"), hang())
    response = await fleet.client.post(CHAT, json=chat(n=3))
    assert response.status == 400
    await fleet.until(lambda: fleet.decode.open_streams == 0, "every stream is closed")
    assert fleet.gateway.brain.scheduler.bookings == 0


async def test_the_first_token_deadline_is_504(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(timeouts={"first_token": Seconds(0.2), "heartbeat": Seconds(0.05)})
    fleet.decode.script = hang()
    response = await fleet.client.post(CHAT, json=chat())
    assert response.status == 504
    assert (await response.json())["error"]["code"] == "deadline"
    await fleet.until(lambda: fleet.decode.cancelled == 1, "the worker's stream is closed")


async def test_after_the_first_token_only_the_request_deadline_counts(make_fleet: MakeFleet) -> None:
    limits = {"first_token": Seconds(0.2), "request": Seconds(0.6), "heartbeat": Seconds(0.05)}
    fleet = await make_fleet(timeouts=limits)
    fleet.decode.script = hang(after=1)
    started_s = time.monotonic()
    body = await (await fleet.client.post(CHAT, json=chat(stream=True))).read()
    assert events(body)[-1]["error"]["code"] == "deadline"
    assert time.monotonic() - started_s >= 0.6
    assert fleet.decode.requests[0].deadline_s <= 0.6


async def test_beyond_the_inflight_limit_requests_are_429(make_fleet: MakeFleet) -> None:
    fleet = await make_fleet(gateway={"max_inflight": 2})
    fleet.decode.script = hang()
    pending = asyncio.create_task(fleet.client.post(CHAT, json=chat(n=2)))
    await fleet.until(lambda: fleet.decode.open_streams == 1, "the request runs")
    response = await fleet.client.post(CHAT, json=chat())
    assert response.status == 429
    assert "Retry-After" in response.headers
    pending.cancel()
    await asyncio.gather(pending, return_exceptions=True)
    await fleet.until(lambda: fleet.gateway.admission.inflight == 0, "the places are free again")


async def test_while_draining_new_requests_are_503_and_running_ones_finish(fleet: Fleet) -> None:
    go = asyncio.Event()

    async def wait_then_answer(request: GenerateRequest) -> AsyncIterator[GenerateFrame]:
        await go.wait()
        async for frame in answer([([72], "done")])(request):
            yield frame

    fleet.decode.script = wait_then_answer
    pending = asyncio.create_task(fleet.client.post(CHAT, json=chat()))
    await fleet.until(lambda: fleet.decode.open_streams == 1, "the request runs")
    fleet.gateway.admission.draining = True
    refused = await fleet.client.post(CHAT, json=chat())
    go.set()

    assert refused.status == 503
    assert (await pending).status == 200
    await asyncio.wait_for(fleet.gateway.admission.wait_idle(), 5)


async def test_a_frame_that_is_not_ours_is_a_failed_attempt(fleet: Fleet) -> None:
    class Junk:
        def __call__(self, request: GenerateRequest) -> AsyncIterator[GenerateFrame]:
            return self._frames()

        async def _frames(self) -> AsyncIterator[Any]:
            yield Tokens(token_ids=[1], text="x", logprobs="no list")  # type: ignore[arg-type]

    fleet.decode.script = in_turn(Junk(), answer([([72], "fine")]))
    response = await fleet.client.post(CHAT, json=chat())
    assert response.status == 200
    assert response.headers["x-prfaas-attempts"] == "2"


async def _read(fleet: Fleet, body: dict[str, Any]) -> bytes:
    url = fleet.client.make_url(CHAT)
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        return await response.read()

"""GET /debug/decisions, POST /debug/place: why a request went where it went, or would go."""

from __future__ import annotations

import uuid

import msgspec
from aiohttp import web

from prfaas.protocol.openai import ChatRequest, CompletionRequest, decode
from prfaas.protocol.openai_errors import bad_request
from router.bodies import read_body
from router.completions import Prepared, build_runs, prepare
from router.context import GATEWAY
from router.core.decision import NoCapacity
from router.dispatch import no_capacity

DEFAULT_LIMIT = 50


class _Kind(msgspec.Struct):
    """Only enough of a body to tell which endpoint it is meant for."""

    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def add_routes(app: web.Application) -> None:
    app.router.add_get("/debug/decisions", decisions)
    app.router.add_post("/debug/place", place)


async def decisions(http: web.Request) -> web.Response:
    """The latest decision records, newest first."""
    text = http.query.get("limit", str(DEFAULT_LIMIT))
    if not (text.isascii() and text.isdigit()) or len(text) > 6:
        raise bad_request("`limit` is a number of records, such as 50", "limit")
    records = http.app[GATEWAY].recorder.log.latest(int(text))
    body = msgspec.json.encode({"decisions": records})
    return web.Response(body=body, content_type="application/json")


async def place(http: web.Request) -> web.Response:
    """What would be decided for this chat or completions request now; nothing is booked or run."""
    gateway = http.app[GATEWAY]
    body = await read_body(http)
    arrival_s = gateway.brain.now()
    request: ChatRequest | CompletionRequest
    request = decode(body, ChatRequest) if _is_chat(body) else decode(body, CompletionRequest)
    gateway.check_model(request.model)
    prepared = Prepared(f"preview-{uuid.uuid4().hex}", "debug", request, arrival_s)
    await prepare(gateway, prepared)
    job = build_runs(gateway, prepared)[0].job
    try:
        decision = gateway.brain.preview(job.place_request(1, frozenset(), gateway.brain.now()))
    except NoCapacity as refusal:
        raise no_capacity(refusal) from refusal
    record = {"summary": decision.header, **decision.as_record(top=None)}
    return web.Response(body=msgspec.json.encode(record), content_type="application/json")


def _is_chat(body: bytes) -> bool:
    """Unreadable bodies count as completions; decoding those strictly says what is wrong."""
    try:
        return msgspec.json.decode(body, type=_Kind).messages is not msgspec.UNSET
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False

"""The worker's control plane over HTTP: what both roles answer, authentication, bad input."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Sequence
from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from prfaas.errors import OutOfPages
from prfaas.protocol.messages import MAX_FRAME_BYTES, ErrorBody, Message, WorkerEvent
from prfaas.worker.host import WorkerHost

_LOG = logging.getLogger(__name__)
READ_TIMEOUT_S = 10.0
"""A request body has arrived by then."""
WRITE_TIMEOUT_S = 30.0
"""A reader that takes nothing for so long is gone."""
CLIENT_GONE_STATUS = 499
"""Of an answer that nobody reads: an exception would have aiohttp log a traceback."""
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
"""Paths that need no token: probes and scrapers have none."""
CALIBRATION_CONTEXTS = (0, 512, 1024)
CALIBRATION_BATCHES = (1, 2, 4)
NDJSON = "application/x-ndjson"

Body = TypeVar("Body", bound=Message)


class Refusal(Exception):
    """Answer this request with an error body."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        self.status = status
        self.body = ErrorBody(reason=reason, message=message)
        super().__init__(message)


async def read_body(request: web.Request, kind: type[Body]) -> Body:
    """The JSON body as `kind`.

    Raises:
        Refusal: too long, too slow, not JSON, or not of that shape.
    """
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            data = await request.read()
    except TimeoutError:
        raise Refusal(408, "bad_request", f"the body did not arrive within {READ_TIMEOUT_S:.0f} s") from None
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(400, "bad_request", f"the body is not a valid {kind.__name__}: {error}") from None


def build_app(host: WorkerHost) -> web.Application:
    """The application with the routes that every worker has and those of its role."""
    app = web.Application(
        client_max_size=MAX_FRAME_BYTES,
        middlewares=[_errors, _authenticate(host.config.auth.service_token)],
    )
    routes = _Routes(host)
    app.router.add_routes(
        [
            web.get("/healthz", routes.health),
            web.get("/readyz", routes.ready),
            web.get("/metrics", routes.metrics),
            web.get("/v1/status", routes.status),
            web.get("/v1/info", routes.info),
            web.get("/v1/events", routes.events),
            web.post("/v1/calibrate", routes.calibrate),
            *host.role.routes(),
        ]
    )
    return app


class _Routes:
    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._calibrating = asyncio.Lock()

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"state": self._host.state})

    async def ready(self, request: web.Request) -> web.Response:
        return web.json_response({"state": self._host.state}, status=200 if self._host.ready else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        body = generate_latest(self._host.metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def status(self, request: web.Request) -> web.Response:
        return _json(self._host.status())

    async def info(self, request: web.Request) -> web.Response:
        return _json(self._host.info())

    async def calibrate(self, request: web.Request) -> web.Response:
        """POST /v1/calibrate: time the engine; meant for an idle worker, one at a time."""
        if not self._host.ready:
            raise Refusal(503, "draining", f"{self._host.name} is {self._host.state}")
        async with self._calibrating, asyncio.timeout(self._host.config.timeouts.start):
            longest = self._host.longest_prompt_tokens
            contexts = [c for c in CALIBRATION_CONTEXTS if c + self._host.spec.chunk_tokens < longest]
            try:
                profile = await self._host.engine.calibrate(contexts or [0], CALIBRATION_BATCHES)
            except (RuntimeError, OutOfPages) as error:
                raise Refusal(409, "overloaded", f"only an idle worker can be calibrated: {error}") from error
        return _json(profile)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/events: status, snapshot, then deltas and status, one JSON object a line."""
        host = self._host
        response = web.StreamResponse(headers={"Content-Type": NDJSON})
        await response.prepare(request)
        interval_s = host.config.timeouts.heartbeat
        loop = asyncio.get_running_loop()
        with host.events.subscribe() as reader:
            next_status_s, last_state = 0.0, ""
            while not host.stopping.is_set():
                lines: list[WorkerEvent] = []
                if (now_s := loop.time()) >= next_status_s or host.state != last_state:
                    lines.append(host.status())
                    next_status_s, last_state = now_s + interval_s, host.state
                lines += reader.take()
                await write_lines(response, lines)
                await reader.wait(max(next_status_s - loop.time(), 0.0))
        return response


async def write_lines(response: web.StreamResponse, messages: Sequence[Message]) -> None:
    """Write NDJSON with back-pressure.

    Raises:
        ConnectionError: the reader is gone, or takes nothing any more.
    """
    if not messages:
        return
    data = b"".join(msgspec.json.encode(message) + b"\n" for message in messages)
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await response.write(data)
    except TimeoutError:
        raise ConnectionError(f"the reader took nothing for {WRITE_TIMEOUT_S:.0f} s") from None


def _json(body: msgspec.Struct, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error leaves as an `ErrorBody`; input never causes a 500."""
    try:
        return await handler(request)
    except Refusal as refusal:
        return _json(refusal.body, refusal.status)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        reason = "bad_request" if error.status < 500 else "engine_failed"
        return _json(ErrorBody(reason=reason, message=error.text or error.reason), error.status)
    except ConnectionError:
        if request.transport is not None and not request.transport.is_closing():
            raise  # aiohttp cuts the connection: the answer has begun
        return web.Response(status=CLIENT_GONE_STATUS)
    except Exception as error:
        _LOG.exception("method=%s path=%s failed", request.method, request.path)
        return _json(ErrorBody(reason="engine_failed", message=f"internal error: {error!r}"), 500)


def _authenticate(token: str) -> Middleware:
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if token and request.path not in OPEN_PATHS:
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, expected):
                raise Refusal(401, "bad_request", "missing or wrong service token (auth.service_token)")
        return await handler(request)

    return check

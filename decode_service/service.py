"""The decode role: takes requests, has their prompts prefilled, decodes, streams text."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from aiohttp import web

from decode_service.generate import Emit, Generation
from decode_service.grants import GrantFailure
from decode_service.messenger import DecodeMessenger
from decode_service.request_check import request_problem
from decode_service.text import TextStreams
from prfaas.protocol.messages import (
    Failed,
    GenerateFrame,
    GenerateRequest,
    LinkCounters,
    WarmRequest,
)
from prfaas.transfer.events import AttemptKey
from prfaas.worker.host import WorkerHost
from prfaas.worker.http import NDJSON, Refusal, read_body, write_lines
from prfaas.worker.page_queue import PageQueue
from prfaas.worker.role import RoleLoad

_LOG = logging.getLogger(__name__)


class DecodeService:
    """Mounted by the worker host for role `decode`."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._messenger = DecodeMessenger(host)
        self._pages = PageQueue(host.pool)
        self._texts = TextStreams(Path(host.config.model.path))
        self._live: dict[AttemptKey, Generation] = {}
        self._ended = asyncio.Event()

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/generate", self._generate), web.post("/v1/warm", self._warm)]

    def load(self) -> RoleLoad:
        return RoleLoad(
            waiting=sum(generation.waiting_outside_engine for generation in self._live.values()),
            live=len(self._live),
            live_grants=self._messenger.live_grants,
            sessions=self._messenger.open_sessions,
        )

    def links(self) -> list[LinkCounters]:
        return []

    def fail_all(self, reason: str, message: str) -> None:
        for generation in list(self._live.values()):
            generation.fail(reason, message)

    async def drain(self) -> None:
        """Wait until every request is answered; the host's state refuses new ones."""
        while self._live:
            self._ended.clear()
            await self._ended.wait()

    async def stop(self) -> None:
        """End every peer session and wait for its fence."""
        await self._messenger.close("the worker is shutting down")

    async def _warm(self, request: web.Request) -> web.Response:
        """POST /v1/warm: open the peer session to a prefill worker now."""
        body = await read_body(request, WarmRequest)
        self._require_ready()
        try:
            session = await self._messenger.session(body.prefill)
        except GrantFailure as failure:
            status = 409 if failure.reason == "incompatible" else 502
            raise Refusal(status, failure.reason, failure.message) from failure
        return web.json_response({"session": session.name, "rtt_s": session.rtt_s})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/generate: NDJSON frames; the handler is cancelled when the client goes away."""
        body = await read_body(request, GenerateRequest)
        key = self._admit(body)
        generation = Generation(
            self._host, self._messenger, self._pages, body, self._texts.stream(body.sampling)
        )
        self._live[key] = generation
        response = web.StreamResponse(headers={"Content-Type": NDJSON})

        async def emit(frame: GenerateFrame) -> None:
            await write_lines(response, [frame])

        code = "disconnected"
        try:
            await response.prepare(request)
            code = await self._run(generation, emit)
        except (asyncio.CancelledError, ConnectionError):
            self._host.metrics.cancellations.labels(generation.phase).inc()
            raise
        finally:
            del self._live[key]
            self._ended.set()
            self._host.metrics.requests.labels(code).inc()
        return response

    async def _run(self, generation: Generation, emit: Emit) -> str:
        try:
            return await generation.run(emit)
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception as error:
            # The stream has begun: a typed frame is the only way left to say it.
            _LOG.exception("request=%s attempt=%s failed", *generation.key)
            key = generation.key
            await emit(
                Failed(site=self._host.name, reason="engine_failed", attempt=key.attempt, message=repr(error))
            )
            return "engine_failed"

    def _admit(self, body: GenerateRequest) -> AttemptKey:
        """Refuse what cannot be served, before anything is held.

        Raises:
            Refusal: 400 (wrong), 429 (queue full) or 503 (not ready).
        """
        problem = request_problem(body, self._host.model, self._host.longest_prompt_tokens)
        key = AttemptKey(body.request_id, body.attempt)
        if key in self._live:
            problem = f"attempt {body.attempt} of {body.request_id} is running already"
        if problem:
            raise Refusal(400, "bad_request", problem)
        self._require_ready()
        waiting = sum(generation.phase != "decode" for generation in self._live.values())
        if waiting >= self._host.spec.max_queue:
            raise Refusal(429, "overloaded", f"{self._host.name} has {waiting} requests waiting")
        self._host.metrics.input_tokens.observe(len(body.token_ids))
        return key

    def _require_ready(self) -> None:
        if not self._host.ready:
            raise Refusal(503, "draining", f"{self._host.name} is {self._host.state}")

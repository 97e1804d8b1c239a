"""A worker's HTTP face for gateway tests: real frames over real sockets, answers from a script.

It computes nothing; what it says is what the test scripted. Tests of generated text use real workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
from aiohttp import web
from aiohttp.test_utils import TestServer

from prfaas.engine.interface import StepProfile
from prfaas.kv.layout import CacheGroup, CompatRecord, KVLayout
from prfaas.protocol.messages import (
    Accepted,
    ErrorBody,
    Failed,
    Finished,
    GenerateFrame,
    GenerateRequest,
    KVEvent,
    KVSnapshot,
    Message,
    Prefilled,
    PrefillReport,
    TokenLogprobs,
    Tokens,
    WorkerInfo,
    WorkerStatus,
)

GROUP = CacheGroup(kind="full", layers=(0, 1), kv_heads=2, head_dim=16)
LAYOUT = KVLayout(groups=(GROUP,), page_size=16, dtype="float32", num_pages=512)
COMPAT = CompatRecord(
    protocol=1, weights="w", tokenizer="t", attention="gqa", page_layout="HND", page_size=16,
    kv_dtype="float32", groups=(GROUP,),
)  # fmt: skip
PROFILE = StepProfile(
    chunk_tokens=64, prefill_base_s=1e-3, prefill_token_s=1e-3, prefill_context_s=0.0,
    decode_base_s=5e-3, decode_sequence_s=1e-3, decode_context_s=0.0,
)  # fmt: skip


class Cut(Exception):
    """Raised by a script: break the connection."""


class Refuse(Exception):
    """Raised by a script before its first frame: answer with this status and reason."""

    def __init__(self, status: int, reason: str) -> None:
        self.status = status
        self.reason = reason


Script = Callable[[GenerateRequest], AsyncIterator[GenerateFrame]]


def report(request: GenerateRequest, site: str, cached: int = 0) -> PrefillReport:
    return PrefillReport(
        site=site,
        cached_tokens=cached,
        decode_cached_tokens=0,
        computed_tokens=len(request.token_ids) - 1 - cached,
        queue_s=0.001,
        prefill_s=0.01,
        ready_s=1e-5,
        kv_bytes=0 if request.prefill is None else 1_000_000,
        transfer_s=0.01,
        tail_s=0.001,
    )


def answer(pieces: list[tuple[list[int], str]], cached: int = 0, finish: str = "stop") -> Script:
    """Says `pieces` (token ids and their text), one frame each, with made-up logprobs where asked for."""

    async def script(request: GenerateRequest) -> AsyncIterator[GenerateFrame]:
        site = "decode-0" if request.prefill is None else request.prefill.worker
        yield Accepted(request_id=request.request_id, attempt=request.attempt, decode_cached_tokens=0)
        yield Prefilled(report=report(request, site, cached))
        for ids, text in pieces:
            yield Tokens(token_ids=ids, text=text, logprobs=_logprobs(request, ids))
            await asyncio.sleep(0)
        total = sum(len(ids) for ids, _ in pieces)
        yield Finished(finish_reason=finish, completion_tokens=total)

    return script


def fail(reason: str, site: str, after: int = 0) -> Script:
    """Fails with `reason` after `after` frames of text."""

    async def script(request: GenerateRequest) -> AsyncIterator[GenerateFrame]:
        yield Accepted(request_id=request.request_id, attempt=request.attempt, decode_cached_tokens=0)
        for number in range(after):
            yield Tokens(token_ids=[70 + number], text=f"part{number} ")
        yield Failed(site=site, reason=reason, attempt=request.attempt, message="scripted")

    return script


def hang(after: int = 0) -> Script:
    """Says nothing more after `after` frames of text."""

    async def script(request: GenerateRequest) -> AsyncIterator[GenerateFrame]:
        yield Accepted(request_id=request.request_id, attempt=request.attempt, decode_cached_tokens=0)
        for number in range(after):
            yield Tokens(token_ids=[70 + number], text=f"part{number} ")
        await asyncio.Event().wait()

    return script


def _logprobs(request: GenerateRequest, ids: list[int]) -> list[TokenLogprobs]:
    wanted = request.sampling.logprobs
    if wanted < 0:
        return []
    top = tuple((70 + rank, -1.0 - rank) for rank in range(wanted))
    return [TokenLogprobs(logprob=-0.5, top=top) for _ in ids]


class ScriptedWorker:
    """One worker; `script` answers each generate request and may be changed at any time."""

    def __init__(self, name: str, role: str, cluster: str, token: str = "") -> None:
        self.name = name
        self.role = role
        self.cluster = cluster
        self.incarnation = f"{name}-1"
        self.state = "ready"
        self.script: Script = answer([([72, 73], "Hello"), ([74], " world")])
        self.requests: list[GenerateRequest] = []
        self.paths: list[str] = []
        self.open_streams = 0
        self.cancelled = 0
        self.silent = False
        """Keeps connections open and says nothing, like a stopped process."""
        self._token = token
        self._news: asyncio.Queue[KVEvent] = asyncio.Queue()
        self._server: TestServer | None = None

    @property
    def port(self) -> int:
        assert self._server is not None
        assert self._server.port is not None
        return self._server.port

    async def start(self, port: int | None = None) -> None:
        app = web.Application()
        app.router.add_get("/v1/info", self._info)
        app.router.add_get("/v1/events", self._events)
        app.router.add_post("/v1/generate", self._generate)
        app.router.add_post("/v1/calibrate", self._calibrate)
        app.router.add_post("/v1/warm", self._warm)
        self._server = TestServer(app, port=port)
        await self._server.start_server(shutdown_timeout=0.01)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.close()
            self._server = None

    def publish(self, event: KVEvent) -> None:
        self._news.put_nowait(event)

    def _authorized(self, request: web.Request) -> None:
        if self._token and request.headers.get("Authorization") != f"Bearer {self._token}":
            raise web.HTTPUnauthorized
        self.paths.append(request.path)

    async def _info(self, request: web.Request) -> web.Response:
        self._authorized(request)
        if self.silent:
            await asyncio.Event().wait()
        return _json(
            WorkerInfo(
                worker=self.name, cluster=self.cluster, role=self.role, incarnation=self.incarnation,
                model="tiny", context_length=256, layout=LAYOUT, compat=COMPAT, chunk_tokens=64,
                max_running=8, max_queue=32,
            )
        )  # fmt: skip

    async def _events(self, request: web.Request) -> web.StreamResponse:
        self._authorized(request)
        response = web.StreamResponse()
        await response.prepare(request)
        snapshot = KVSnapshot(generation=self.incarnation, sequence=0, page_size=16, block_hashes=[])
        await response.write(_line(self._status()) + _line(snapshot))
        while True:
            try:
                event = await asyncio.wait_for(self._news.get(), 0.02)
            except TimeoutError:
                event = None
            if self.silent:
                await asyncio.Event().wait()
            try:
                await response.write(_line(self._status() if event is None else event))
            except ConnectionResetError:
                return response

    def _status(self) -> WorkerStatus:
        return WorkerStatus(
            worker=self.name, incarnation=self.incarnation, role=self.role, state=self.state,
            total_pages=512, free_pages=512,
        )  # fmt: skip

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        self._authorized(http)
        request = msgspec.json.decode(await http.read(), type=GenerateRequest)
        self.requests.append(request)
        if self.silent:
            await asyncio.Event().wait()
        response = web.StreamResponse()
        self.open_streams += 1
        frames = self.script(request)
        try:
            async for frame in frames:
                if not response.prepared:
                    await response.prepare(http)
                await response.write(_line(frame))
        except Refuse as refusal:
            body = ErrorBody(reason=refusal.reason, message="scripted")
            return _json(body, refusal.status)
        except Cut:
            assert http.transport is not None
            http.transport.abort()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.open_streams -= 1
            await frames.aclose()  # type: ignore[attr-defined]
        return response

    async def _calibrate(self, request: web.Request) -> web.Response:
        self._authorized(request)
        return _json(PROFILE)

    async def _warm(self, request: web.Request) -> web.Response:
        self._authorized(request)
        return web.json_response({})


def _line(message: Message) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def _json(body: msgspec.Struct, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")

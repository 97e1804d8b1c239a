"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import logging
import re
import secrets
import time
import uuid
from dataclasses import dataclass, field

from aiohttp import web

from prfaas.protocol.messages import Sampling
from prfaas.protocol.openai import ChatRequest, CompletionRequest, GenerationRequest, decode
from prfaas.protocol.openai_errors import ApiError
from router.answer import Choice, usage
from router.bodies import read_body
from router.context import GATEWAY, Gateway
from router.dispatch import Job
from router.errors import CLIENT_GONE_STATUS, error_response
from router.fanout import Fanout, Run
from router.prompts import fit_max_tokens
from router.shapes import ChatShape, CompletionShape, Shape
from router.streaming import EventStream

logger = logging.getLogger(__name__)
CLIENT_GONE = str(CLIENT_GONE_STATUS)
"""Code in metrics for a client that went away (nobody reads the answer)."""
SESSION_CHARACTERS = 256
"""Of a session's name; more tell no two apart."""
_UNSAFE = re.compile(r"[^\x20-\x7e]")


@dataclass(slots=True)
class Prepared:
    """A request whose prompts are tokens."""

    request_id: str
    endpoint: str
    request: ChatRequest | CompletionRequest
    arrival_s: float
    session: str = ""
    """Conversation that the client says this belongs to."""
    prompts: list[list[int]] = field(default_factory=list)
    hashes: list[tuple[int, ...]] = field(default_factory=list)
    max_tokens: list[int] = field(default_factory=list)
    overhead_s: dict[str, float] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    """Its choices, once they are known."""

    @property
    def phase(self) -> str:
        """How far its first choice has come: one of `router.metrics.PHASES`."""
        return self.runs[0].trace.phase if self.runs else "prepare"


def session_of(http: web.Request, request: GenerationRequest) -> str:
    """The conversation a request belongs to: header `x-session-id`, else `prompt_cache_key`, else `user`.

    It only steers policies that keep conversations together; nothing is kept apart by it.
    """
    name = http.headers.get("x-session-id") or request.prompt_cache_key or request.user or ""
    return name[:SESSION_CHARACTERS]


def add_routes(app: web.Application) -> None:
    app.router.add_post("/v1/chat/completions", chat_completions)
    app.router.add_post("/v1/completions", completions)


async def chat_completions(http: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    return await _answer(http, "chat", ChatRequest)


async def completions(http: web.Request) -> web.StreamResponse:
    """POST /v1/completions."""
    return await _answer(http, "completions", CompletionRequest)


async def _answer(
    http: web.Request, endpoint: str, kind: type[ChatRequest] | type[CompletionRequest]
) -> web.StreamResponse:
    """Serve one request and count how it ended."""
    gateway = http.app[GATEWAY]
    request_id = uuid.uuid4().hex
    headers = {"x-request-id": request_id}
    prepared: Prepared | None = None
    code, arrival_s = CLIENT_GONE, gateway.brain.now()
    try:
        body = await read_body(http)
        arrival_s = gateway.brain.now()
        request: ChatRequest | CompletionRequest = decode(body, kind)
        prepared = Prepared(request_id, endpoint, request, arrival_s, session_of(http, request))
        response, code = await _serve(http, gateway, prepared, headers)
        return response
    except ApiError as error:
        code = str(error.status)
        return error_response(error, headers)
    except Exception as error:
        code = _code_of(error)
        raise
    finally:
        if code == CLIENT_GONE:
            gateway.metrics.cancellations.labels(prepared.phase if prepared else "prepare").inc()
        gateway.metrics.requests.labels(endpoint, code).inc()
        gateway.metrics.request_duration.labels(endpoint).observe(gateway.brain.now() - arrival_s)


async def _serve(
    http: web.Request, gateway: Gateway, prepared: Prepared, headers: dict[str, str]
) -> tuple[web.StreamResponse, str]:
    """(the response, its code in metrics). `headers` gets what the placement adds, also for an error."""
    request = prepared.request
    gateway.check_model(request.model)
    texts = 1 if isinstance(request, ChatRequest) else len(request.prompts())
    with gateway.admission.hold(texts * request.choices):
        with gateway.metrics.stage_requests.labels("gateway", "prepare").track_inprogress():
            await prepare(gateway, prepared)
        runs = prepared.runs = build_runs(gateway, prepared)
        shape = _shape(gateway, prepared)
        try:
            async with Fanout(gateway.dispatcher, runs) as fanout:
                if request.streaming:
                    return await _stream(http, prepared, runs, shape, fanout, headers)
                async for _ in fanout.updates():
                    pass
                body = shape.whole([run.choice for run in runs], _usage(prepared, runs))
                headers.update(placement_headers(runs[0]))
                return web.Response(body=body, content_type="application/json", headers=headers), "200"
        except ApiError:
            headers.update(placement_headers(runs[0]))
            raise
        finally:
            for run in runs:
                run.trace.close()


async def _stream(
    http: web.Request,
    prepared: Prepared,
    runs: list[Run],
    shape: Shape,
    fanout: Fanout,
    headers: dict[str, str],
) -> tuple[web.StreamResponse, str]:
    request = prepared.request
    stream = EventStream(
        http,
        shape,
        headers=lambda: {**headers, **placement_headers(runs[0])},
        usage=(lambda: _usage(prepared, runs)) if request.include_usage else None,
        detailed=request.logprobs_count >= 0 or bool(request.return_token_ids),
    )
    response = await stream.write(fanout)
    return response, "200" if stream.failure is None else str(stream.failure.status)


async def prepare(gateway: Gateway, prepared: Prepared) -> None:
    """Fill in tokens, hashes and limits.

    Raises:
        ApiError: 400 where the prompt or `max_tokens` does not fit.
    """
    request, started_s = prepared.request, time.perf_counter()
    if isinstance(request, ChatRequest):
        param = "messages"
        prepared.prompts = [await gateway.prompts.chat(request.conversation())]
    else:
        param = "prompt"
        prepared.prompts = [await gateway.prompts.prompt(prompt) for prompt in request.prompts()]
    gateway.prompts.check_ids(request.stop_token_ids or [], "stop_token_ids")
    tokenized_s = time.perf_counter()
    prepared.max_tokens = [
        fit_max_tokens(
            len(token_ids),
            gateway.context_length(),
            request.token_limit,
            gateway.config.gateway.default_max_tokens,
            param,
        )
        for token_ids in prepared.prompts
    ]
    salt = request.cache_salt or ""
    prepared.hashes = [tuple(await gateway.prompts.hashes(ids, salt)) for ids in prepared.prompts]
    hashed_s = time.perf_counter()
    prepared.overhead_s = {"tokenize": tokenized_s - started_s, "hash": hashed_s - tokenized_s}


def build_runs(gateway: Gateway, prepared: Prepared) -> list[Run]:
    """One run per prompt and choice, in the order of OpenAI's `index`."""
    request = prepared.request
    runs: list[Run] = []
    seed = secrets.randbits(62) if request.seed is None else request.seed
    for prompt, token_ids in enumerate(prepared.prompts):
        for number in range(request.choices):
            index = len(runs)
            job = Job(
                request_id=f"{prepared.request_id}-{index}",
                token_ids=token_ids,
                block_hashes=prepared.hashes[prompt],
                sampling=sampling(request, prepared.max_tokens[prompt], seed + number),
                arrival_s=prepared.arrival_s,
                cache_salt=request.cache_salt or "",
                session=prepared.session,
                streaming=request.streaming,
            )
            trace = gateway.recorder.trace(prepared.arrival_s, prepared.overhead_s)
            runs.append(Run(job, Choice(index, prompt), trace))
    return runs


def sampling(request: ChatRequest | CompletionRequest, max_tokens: int, seed: int) -> Sampling:
    """Every field filled in; OpenAI's defaults where the client is silent."""
    return Sampling(
        max_tokens=max_tokens,
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=max(0, request.top_k or 0),
        min_p=_or(request.min_p, 0.0),
        seed=seed % 2**63,
        stop=request.stop_strings,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logprobs=request.logprobs_count,
    )


def placement_headers(run: Run) -> dict[str, str]:
    """Where the first choice ran; nothing before it was placed."""
    placed = run.choice.placed
    if placed is None:
        return {}
    headers = {
        "x-prfaas-placement": placed.kind,
        "x-prfaas-decode-worker": placed.decode,
        "x-prfaas-prefill-worker": placed.site,
        "x-prfaas-attempts": str(placed.attempt),
        "x-prfaas-decision": placed.summary,
    }
    return {name: _UNSAFE.sub("?", value) for name, value in headers.items()}


def _shape(gateway: Gateway, prepared: Prepared) -> Shape:
    request: GenerationRequest = prepared.request
    kind, prefix = (ChatShape, "chatcmpl") if prepared.endpoint == "chat" else (CompletionShape, "cmpl")
    return kind(
        f"{prefix}-{prepared.request_id}",
        gateway.model.name,
        gateway.model.token_bytes,
        with_usage=request.include_usage,
        with_ids=bool(request.return_token_ids),
    )


def _usage(prepared: Prepared, runs: list[Run]) -> dict[str, object]:
    return usage([len(ids) for ids in prepared.prompts], [run.choice for run in runs])


def _code_of(error: Exception) -> str:
    """Status that `router.errors.error_middleware` will answer with."""
    match error:
        case ConnectionError():
            return CLIENT_GONE
        case web.HTTPException():
            return str(error.status)
        case web.RequestPayloadError():
            return "400"
        case _:
            return "500"


def _or(value: float | None, default: float) -> float:
    return default if value is None else value

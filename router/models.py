"""GET /v1/models, /healthz, /readyz and /metrics."""

from __future__ import annotations

from http import HTTPStatus

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from prfaas.protocol.openai_errors import ApiError
from router.context import GATEWAY, Gateway


def add_routes(app: web.Application) -> None:
    app.router.add_get("/v1/models", models)
    app.router.add_get("/v1/models/{name:.+}", model)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/health", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics)


async def models(request: web.Request) -> web.Response:
    """The one model."""
    return web.json_response({"object": "list", "data": [_card(request.app[GATEWAY])]})


async def model(request: web.Request) -> web.Response:
    """The model by its name; 404 for others."""
    gateway = request.app[GATEWAY]
    gateway.check_model(request.match_info["name"])
    return web.json_response(_card(gateway))


async def healthz(request: web.Request) -> web.Response:
    """The process lives."""
    return web.json_response({"status": "ok"})


async def readyz(request: web.Request) -> web.Response:
    """200 once requests are accepted and at least one decode worker takes them."""
    gateway = request.app[GATEWAY]
    ready = {role: gateway.workers.ready(role) for role in ("decode", "prefill")}
    admission = gateway.admission
    if not admission.started or admission.draining or not ready["decode"]:
        why = (
            "draining" if admission.draining else "starting" if not admission.started else "no_decode_worker"
        )
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"not ready: {why}", code=why, retry_after_s=1.0)
    return web.json_response({"status": "ready", "workers": ready})


async def metrics(request: web.Request) -> web.Response:
    """Prometheus' text exposition."""
    body = request.app[GATEWAY].metrics.render()
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})


def _card(gateway: Gateway) -> dict[str, object]:
    return {
        "id": gateway.model.name,
        "object": "model",
        "created": gateway.started_unix_s,
        "owned_by": "prfaas",
        "max_model_len": gateway.workers.context_length(),
    }

"""Bearer tokens of clients."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from aiohttp import web
from aiohttp.typedefs import Middleware

from prfaas.protocol.openai_errors import ApiError
from router.errors import Handler

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/health", "/metrics"})
"""For probes and scrapers, which carry no client token."""


def auth_middleware(client_tokens: Iterable[str]) -> Middleware:
    """Refuse requests without one of `client_tokens`; with no tokens everybody may enter."""
    accepted = [token.encode() for token in client_tokens]

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if accepted and request.path not in OPEN_PATHS and not _known(request, accepted):
            raise ApiError(
                401,
                "send `Authorization: Bearer <token>` with a token that this service knows",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return await handler(request)

    return check


def _known(request: web.Request, accepted: list[bytes]) -> bool:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    given = token.strip().encode("utf-8", "surrogateescape")
    matches = [hmac.compare_digest(given, one) for one in accepted]
    return scheme.lower() == "bearer" and any(matches)

"""Reading request bodies: bounded in size and time, never decompressed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from aiohttp import web

from prfaas.protocol.openai_errors import ApiError

READ_TIMEOUT_S = 30.0
"""A body has arrived by then."""
SERVER_OPTIONS: Mapping[str, Any] = {"handler_cancellation": True, "auto_decompress": False}
"""How aiohttp is to serve the gateway. A handler is cancelled when its client goes away: that is what stops
both legs at once. Bodies stay as they come: a few compressed bytes must not become gigabytes."""


async def read_body(request: web.Request) -> bytes:
    """The whole body.

    Raises:
        ApiError: 408, too slow; 415, compressed.
        HTTPRequestEntityTooLarge: beyond the application's `client_max_size`.
    """
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise ApiError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            "compressed bodies are not accepted; send plain JSON",
            code="unsupported_encoding",
        )
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        raise ApiError(
            HTTPStatus.REQUEST_TIMEOUT,
            f"the body did not arrive within {READ_TIMEOUT_S:.0f} s",
            code="slow_body",
        ) from None

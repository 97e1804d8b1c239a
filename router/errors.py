"""Failures of workers, and how clients hear of them."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import NamedTuple

from aiohttp import ClientConnectionResetError, web

from prfaas.errors import PrfaasError
from prfaas.protocol.openai_errors import ApiError

logger = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
RETRY_AFTER_S = 1.0
CLIENT_GONE_STATUS = 499
"""Of an answer that nobody reads: an exception would have aiohttp log a traceback."""


class AttemptFailed(PrfaasError):
    """One attempt of a request is over, by no fault of the client's.

    Attributes:
        site: worker at fault.
        reason: one of `prfaas.protocol.messages.FAILURE_REASONS`.
        complete_tokens: prompt tokens whose KV is complete on the decode worker.
    """

    def __init__(self, site: str, reason: str, message: str, complete_tokens: int = 0) -> None:
        super().__init__(message)
        self.site = site
        self.reason = reason
        self.complete_tokens = complete_tokens


class Verdict(NamedTuple):
    """What a failure reason means to the gateway."""

    retry: bool
    """Whether another placement may succeed."""
    status: int
    """The client's status if none does."""


_VERDICTS = {
    "peer_lost": Verdict(True, HTTPStatus.BAD_GATEWAY),
    "incompatible": Verdict(True, HTTPStatus.BAD_GATEWAY),
    "overloaded": Verdict(True, HTTPStatus.TOO_MANY_REQUESTS),
    "transfer_failed": Verdict(True, HTTPStatus.BAD_GATEWAY),
    "engine_failed": Verdict(True, HTTPStatus.BAD_GATEWAY),
    "corrupt": Verdict(True, HTTPStatus.BAD_GATEWAY),
    "cancelled": Verdict(True, HTTPStatus.BAD_GATEWAY),
    "draining": Verdict(True, HTTPStatus.SERVICE_UNAVAILABLE),
    "deadline": Verdict(False, HTTPStatus.GATEWAY_TIMEOUT),
    "bad_request": Verdict(False, HTTPStatus.BAD_REQUEST),
}


def verdict(reason: str) -> Verdict:
    """How to treat a failure; a reason from a newer worker is a bad gateway, not retried."""
    return _VERDICTS.get(reason, Verdict(False, HTTPStatus.BAD_GATEWAY))


def failure_answer(failure: AttemptFailed, attempts: int) -> ApiError:
    """The client's error once no further attempt will be made."""
    status = verdict(failure.reason).status
    busy = status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
    tries = "" if attempts <= 1 else f" (after {attempts} attempts)"
    return ApiError(
        status,
        f"{failure.site}: {failure.reason}: {failure}{tries}",
        code=failure.reason,
        retry_after_s=RETRY_AFTER_S if busy else None,
    )


def error_response(error: ApiError, headers: dict[str, str] | None = None) -> web.Response:
    """The HTTP answer of an `ApiError`."""
    merged = {**(headers or {}), **error.headers}
    if error.retry_after_s is not None:
        merged["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    return web.Response(
        status=error.status, body=error.body(), content_type="application/json", headers=merged
    )


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every answer that is not 2xx gets an OpenAI error body; a defect of ours is logged and says 500."""
    try:
        return await handler(request)
    except ApiError as error:
        return error_response(error)
    except web.HTTPRequestEntityTooLarge as error:
        return error_response(
            ApiError(error.status, f"the body is too large: {error.text}", code="body_too_large")
        )
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        headers = {"Allow": allowed}
        message = f"{request.method} is not allowed here; use {allowed}"
        return error_response(ApiError(error.status, message, code="method_not_allowed", headers=headers))
    except web.HTTPNotFound as error:
        return error_response(ApiError(error.status, f"there is no {request.path}", code="unknown_path"))
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return error_response(ApiError(error.status, error.reason, code="http_error"))
    except web.RequestPayloadError as error:
        return error_response(ApiError(400, f"the body cannot be read: {error}", code="invalid_body"))
    except (ClientConnectionResetError, ConnectionResetError):
        if request.transport is not None and not request.transport.is_closing():
            raise
        return web.Response(status=CLIENT_GONE_STATUS)
    except Exception:
        logger.exception("event=unhandled_error method=%s path=%s", request.method, request.path)
        return error_response(
            ApiError(500, "internal error; the gateway's log has the details", code="internal")
        )

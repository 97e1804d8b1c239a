"""The error body that OpenAI clients understand: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import msgspec

from prfaas.errors import PrfaasError

_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


class ApiError(PrfaasError):
    """An answer that is not 2xx.

    Attributes:
        status: HTTP status.
        message: what is wrong and what to do, for the client.
        param: the request's parameter at fault, where one is.
        code: a stable word for programs (`unknown_field`, `model_not_found`, …).
        retry_after_s: when trying again makes sense; becomes the `Retry-After` header.
        headers: further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """OpenAI's error class, from the status."""
        fallback = "invalid_request_error" if self.status < 500 else "api_error"
        return _TYPES.get(HTTPStatus(self.status), fallback)

    def body(self) -> bytes:
        """The JSON body."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 that names the parameter."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)

"""Our own engine: one NDJSON stream to the decode worker, which talks to the prefill worker itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator

import msgspec
from aiohttp import ClientError, ClientResponse, ClientSession

from prfaas.protocol.messages import ErrorBody, Failed, Finished, GenerateFrame, GenerateRequest
from router.errors import AttemptFailed
from router.ndjson import FrameTooLong, LineReader

logger = logging.getLogger(__name__)
_frames: msgspec.json.Decoder[GenerateFrame] = msgspec.json.Decoder(GenerateFrame)
_errors = msgspec.json.Decoder(ErrorBody)
_encoder = msgspec.json.Encoder()

MAX_ERROR_BYTES = 64 * 1024
EOF_WAIT_S = 1.0
"""After the last frame, the response's end is on its way; past this the connection is not worth keeping."""


class NativeBackend:
    """Implements `router.backends.base.Backend`."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session

    async def generate(
        self, worker: str, url: str, request: GenerateRequest
    ) -> AsyncGenerator[GenerateFrame, None]:
        """See `Backend.generate`; the caller bounds it in time."""
        try:
            response = await self._session.post(
                f"{url}/v1/generate",
                data=_encoder.encode(request),
                headers={"Content-Type": "application/json"},
            )
        except (ClientError, OSError, TimeoutError) as error:
            raise AttemptFailed(worker, "peer_lost", f"cannot reach it: {_words(error)}") from error
        reader = LineReader(response.content)
        try:
            if response.status != 200:
                raise await _refusal(worker, response)
            while not isinstance(frame := await _next_frame(worker, reader), Finished):
                yield frame
            yield frame
            await _drain(response)
        finally:
            # Anything but a stream read to its end means: cancel. Closing at once stops both legs.
            if response.content.at_eof():
                response.release()
            else:
                response.close()


async def _next_frame(worker: str, reader: LineReader) -> GenerateFrame:
    """The next frame; `Failed` is raised."""
    try:
        line = await reader.next()
        if line is None:
            raise AttemptFailed(worker, "peer_lost", "the stream ended before its last frame")
        frame = _frames.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, FrameTooLong) as error:
        raise AttemptFailed(worker, "peer_lost", f"it sent a frame that is not ours: {error}") from error
    except (ClientError, OSError) as error:
        raise AttemptFailed(worker, "peer_lost", f"the stream broke: {_words(error)}") from error
    if isinstance(frame, Failed):
        raise AttemptFailed(frame.site or worker, frame.reason, frame.message, frame.complete_tokens)
    return frame


async def _drain(response: ClientResponse) -> None:
    """Read the response's end so that the connection can serve the next request."""
    try:
        async with asyncio.timeout(EOF_WAIT_S):
            while await response.content.readany():
                pass
    except (ClientError, OSError, TimeoutError) as error:
        logger.debug("event=connection_not_reused reason=%s", _words(error))


async def _refusal(worker: str, response: ClientResponse) -> AttemptFailed:
    """The typed failure in a non-2xx answer."""
    body = b""
    try:
        while len(body) < MAX_ERROR_BYTES and (chunk := await response.content.readany()):
            body += chunk
    except (ClientError, OSError) as broken:
        return AttemptFailed(worker, "peer_lost", f"its answer {response.status} broke: {_words(broken)}")
    try:
        error = _errors.decode(body)
        return AttemptFailed(worker, error.reason, error.message)
    except (msgspec.DecodeError, UnicodeDecodeError):
        reason = {429: "overloaded", 503: "draining", 504: "deadline"}.get(response.status, "engine_failed")
        text = body[:200].decode("utf-8", "replace")
        return AttemptFailed(worker, reason, f"answered {response.status}: {text}")


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__

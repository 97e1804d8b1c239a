"""Answers as server-sent events.

The response is prepared only when the first content is there: until then a failed attempt can be replaced
unseen, and an error can still have its own status.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing

from aiohttp import web

from prfaas.protocol.messages import Finished, Tokens
from prfaas.protocol.openai_errors import ApiError
from router.answer import Update
from router.fanout import Fanout, Run
from router.shapes import SSE_DONE, Shape

logger = logging.getLogger(__name__)
WRITE_TIMEOUT_S = 30.0
"""A client that takes nothing for so long is gone: it would hold its place in the gateway for ever."""


class EventStream:
    """Writes one answer.

    Args:
        headers: the response's headers, asked for when the first content is there.
        usage: the usage to report after the last choice; None = not asked for.
        detailed: chunks carry more than text, so that one without text matters too.
    """

    def __init__(
        self,
        request: web.Request,
        shape: Shape,
        headers: Callable[[], dict[str, str]],
        usage: Callable[[], dict[str, object]] | None,
        *,
        detailed: bool,
    ) -> None:
        self._request = request
        self._shape = shape
        self._headers = headers
        self._usage = usage
        self._detailed = detailed
        self._response: web.StreamResponse | None = None
        self.failure: ApiError | None = None
        """Set when the stream had to end with an error event."""

    async def write(self, fanout: Fanout) -> web.StreamResponse:
        """Write every choice's chunks as they come.

        Raises:
            ApiError: the request failed before anything was written.
        """
        try:
            async with aclosing(fanout.updates()) as updates:
                async for run, update in updates:
                    await self._write_update(run, update)
        except ApiError as error:
            if self._response is None:
                raise
            # Within the stream, and without `[DONE]`: no SDK takes such an answer for complete.
            self.failure = error
            tail = b"data: " + error.body() + b"\n\n"
        else:
            tail = (b"" if self._usage is None else self._shape.usage(self._usage())) + SSE_DONE
        response = await self._send(tail)
        await response.write_eof()
        return response

    async def _write_update(self, run: Run, update: Update) -> None:
        index = run.choice.index
        if isinstance(update, Tokens) and (update.text or self._detailed):
            chunk = self._shape.delta(index, update.text, update.token_ids, update.logprobs)
        elif isinstance(update, Finished):
            chunk = self._shape.closing(index, update.finish_reason)
        else:
            return
        await self._send(chunk)
        run.trace.wrote()

    async def _send(self, data: bytes) -> web.StreamResponse:
        """
        Raises:
            ConnectionError: the client is gone, or takes nothing any more.
        """
        response = await self._open()
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await response.write(data)
        except TimeoutError:
            logger.info("event=client_stalled path=%s", self._request.path)
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError(f"the client took nothing for {WRITE_TIMEOUT_S:.0f} s") from None
        return response

    async def _open(self) -> web.StreamResponse:
        if self._response is None:
            response = web.StreamResponse(
                headers={
                    "Content-Type": "text/event-stream; charset=utf-8",
                    "Cache-Control": "no-cache",
                    "X-Accel-Buffering": "no",
                    **self._headers(),
                }
            )
            await response.prepare(self._request)
            self._response = response
        return self._response

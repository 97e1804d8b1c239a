"""Lines of an NDJSON response, bounded in size."""

from __future__ import annotations

from collections import deque

from aiohttp import StreamReader

from prfaas.protocol.messages import MAX_FRAME_BYTES


class FrameTooLong(ValueError):
    """The peer sent a line beyond the protocol's bound."""


class LineReader:
    """Splits a response's body at line feeds (an object, not a generator, so that nothing needs closing)."""

    def __init__(self, content: StreamReader, limit_bytes: int = MAX_FRAME_BYTES) -> None:
        self._content = content
        self._limit_bytes = limit_bytes
        self._rest = bytearray()
        self._complete: deque[bytes] = deque()

    async def next(self) -> bytes | None:
        """The next line that isn't empty, without its line feed; None at the body's end.

        A last line without a line feed is a cut frame and is dropped.

        Raises:
            FrameTooLong: a line exceeds the limit.
        """
        while not self._complete:
            chunk = await self._content.readany()
            if not chunk:
                return None
            self._feed(chunk)
        return self._complete.popleft()

    def _feed(self, chunk: bytes) -> None:
        self._rest += chunk
        if b"\n" in chunk:
            *complete, tail = self._rest.split(b"\n")
            self._rest = bytearray(tail)
            self._complete.extend(bytes(line) for line in complete if line)
        if len(self._rest) > self._limit_bytes:
            raise FrameTooLong(f"a frame exceeds {self._limit_bytes} bytes")

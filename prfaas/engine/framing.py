"""Frames on the socket pair between control process and runner: u32 little-endian length, then msgpack."""

from __future__ import annotations

import socket
from typing import Any

import msgspec

HEADER_BYTES = 4
MAX_FRAME_BYTES = 64 * 2**20
"""Bound on one frame; a longer one means that the two sides have lost step."""


class FrameWriter:
    """Turns messages into frames."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()

    def frame(self, message: msgspec.Struct) -> bytearray:
        """One message with its length in front."""
        buffer = bytearray(HEADER_BYTES)
        self._encoder.encode_into(message, buffer, HEADER_BYTES)
        buffer[:HEADER_BYTES] = (len(buffer) - HEADER_BYTES).to_bytes(HEADER_BYTES, "little")
        return buffer


class FrameReader:
    """Cuts a byte stream into the payloads of its frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads that `data` completes.

        Raises:
            ValueError: a frame announces more than MAX_FRAME_BYTES.
        """
        self._buffer += data
        payloads = []
        while len(self._buffer) >= HEADER_BYTES:
            length = int.from_bytes(self._buffer[:HEADER_BYTES], "little")
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"frame of {length} bytes exceeds {MAX_FRAME_BYTES}")
            end = HEADER_BYTES + length
            if len(self._buffer) < end:
                break
            payloads.append(bytes(self._buffer[HEADER_BYTES:end]))
            del self._buffer[:end]
        return payloads


class BlockingChannel:
    """The runner's end: one message at a time, no event loop.

    Args:
        incoming: type of the messages received.
    """

    def __init__(self, sock: socket.socket, incoming: Any) -> None:
        self._socket = sock
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._writer = FrameWriter()
        self._reader = FrameReader()
        self._pending: list[bytes] = []

    def send(self, message: msgspec.Struct) -> None:
        """Write one message.

        Raises:
            OSError: the other side is gone.
        """
        self._socket.sendall(self._writer.frame(message))

    def receive(self) -> Any:
        """The next message; None once the other side has closed."""
        while not self._pending:
            data = self._socket.recv(2**20)
            if not data:
                return None
            self._pending = self._reader.feed(data)
        return self._decoder.decode(self._pending.pop(0))

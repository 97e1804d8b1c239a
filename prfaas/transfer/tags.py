"""The tag of a write: which attempt, layer and prompt pages it carries. Sent as its NIXL notification."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

MAX_TAG_BYTES = 16 * 1024

_Index = Annotated[int, Meta(ge=0, lt=2**31)]
_Count = Annotated[int, Meta(ge=1, lt=2**31)]


class WriteTag(msgspec.Struct, frozen=True, array_like=True):
    """One write's content; a msgpack array on the wire."""

    request_id: str
    attempt: _Index
    layer: _Index
    runs: tuple[tuple[_Index, _Count], ...]
    """(first prompt page, count)."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WriteTag)


def encode_tag(tag: WriteTag) -> bytes:
    return _encoder.encode(tag)


def decode_tag(data: bytes) -> WriteTag:
    """
    Raises:
        ValueError: not a tag (too long, malformed, or numbers out of range).
    """
    if len(data) > MAX_TAG_BYTES:
        raise ValueError(f"tag has {len(data)} bytes, over {MAX_TAG_BYTES}")
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(f"not a write tag: {error}") from error


def page_runs(pages: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Ascending page numbers as (first, count) runs."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and page == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return tuple(runs)

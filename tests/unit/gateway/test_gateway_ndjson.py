"""NDJSON lines come out whole however the bytes were cut, and never without bound."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest
from aiohttp import StreamReader
from hypothesis import given, settings
from hypothesis import strategies as st

from router.ndjson import FrameTooLong, LineReader

LINES = st.lists(st.binary(min_size=1, max_size=30).map(lambda raw: raw.replace(b"\n", b"_")), max_size=8)


def stream(chunks: list[bytes]) -> StreamReader:
    # The protocol only matters for flow control, which a stream that is already complete does not need.
    reader = StreamReader(Mock(_reading_paused=False), limit=2**16, loop=asyncio.get_running_loop())
    for chunk in chunks:
        reader.feed_data(chunk)
    reader.feed_eof()
    return reader


def read_all(chunks: list[bytes], limit_bytes: int = 1000) -> list[bytes]:
    async def read() -> list[bytes]:
        reader, found = LineReader(stream(chunks), limit_bytes), []
        while (line := await reader.next()) is not None:
            found.append(line)
        return found

    return asyncio.run(read())


@settings(deadline=None, max_examples=50)
@given(lines=LINES, cuts=st.lists(st.integers(1, 40), max_size=20))
def test_lines_are_whole_however_the_bytes_were_cut(lines: list[bytes], cuts: list[int]) -> None:
    data = b"".join(line + b"\n" for line in lines)
    chunks = []
    for cut in cuts:
        chunks.append(data[:cut])
        data = data[cut:]
    assert read_all([chunk for chunk in [*chunks, data] if chunk]) == lines


def test_a_cut_last_line_and_empty_lines_are_dropped() -> None:
    assert read_all([b"one\n\n\ntwo\nthr"]) == [b"one", b"two"]


def test_a_line_beyond_the_bound_is_refused() -> None:
    with pytest.raises(FrameTooLong):
        read_all([b"x" * 50, b"x" * 51], limit_bytes=100)

"""Tags: what a peer sends is checked before it is believed."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.transfer.tags import MAX_TAG_BYTES, WriteTag, decode_tag, encode_tag, page_runs


@given(
    request_id=st.text(max_size=80),
    attempt=st.integers(0, 100),
    layer=st.integers(0, 200),
    pages=st.sets(st.integers(0, 10_000), min_size=1, max_size=50),
)
def test_round_trip(request_id: str, attempt: int, layer: int, pages: set[int]) -> None:
    tag = WriteTag(request_id, attempt, layer, page_runs(sorted(pages)))
    assert decode_tag(encode_tag(tag)) == tag
    covered = [page for start, count in tag.runs for page in range(start, start + count)]
    assert covered == sorted(pages)


def test_a_run_of_pages_takes_few_bytes() -> None:
    tag = WriteTag("0123456789abcdef0123456789abcdef", 1, 29, page_runs(range(5000, 9000)))
    assert len(encode_tag(tag)) < 50


@given(st.binary(max_size=100))
def test_garbage_is_a_value_error_or_a_valid_tag(data: bytes) -> None:
    try:
        tag = decode_tag(data)
    except ValueError:
        return
    assert all(start >= 0 and count > 0 for start, count in tag.runs)


@pytest.mark.parametrize(
    "fields",
    [
        ["r", -1, 0, [[0, 1]]],
        ["r", 0, -1, [[0, 1]]],
        ["r", 0, 0, [[-1, 1]]],
        ["r", 0, 0, [[0, 0]]],
        ["r", 0, 0, [[0]]],
        ["r", 0, 2**40, [[0, 1]]],
        [7, 0, 0, []],
        ["r", 0, 0],
    ],
)
def test_impossible_numbers_are_refused(fields: list[object]) -> None:
    with pytest.raises(ValueError, match="not a write tag"):
        decode_tag(msgspec.msgpack.encode(fields))


def test_a_long_tag_is_refused_unread() -> None:
    with pytest.raises(ValueError, match="over"):
        decode_tag(b"\x00" * (MAX_TAG_BYTES + 1))

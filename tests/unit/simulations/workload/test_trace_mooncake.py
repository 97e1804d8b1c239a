"""Mooncake's lines and the dialects of them become the same columns; ticks are spread, order is kept."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.errors import ConfigError
from simulations.workload.load import load_trace

LINES = [
    {"timestamp": 100, "input_length": 1100, "output_length": 7, "hash_ids": [5, 9, 12]},
    {"timestamp": 400, "input_length": 1024, "output_length": 1, "hash_ids": [5, 9]},
    {"timestamp": 1600, "input_length": 3, "output_length": 900, "hash_ids": [77]},
]


def written(folder: Path, lines: list[dict[str, object]], name: str = "t.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_lines_become_columns_from_time_zero(tmp_path: Path) -> None:
    trace = load_trace(written(tmp_path, LINES))
    assert trace.name == "t"
    assert trace.arrival_s.tolist() == pytest.approx([0.0, 0.3, 1.5])
    assert trace.prompt_tokens.tolist() == [1100, 1024, 3]
    assert trace.output_tokens.tolist() == [7, 1, 900]
    assert trace.block_offsets.tolist() == [0, 3, 5, 6]
    first, second, third = (trace.blocks[a:b].tolist() for a, b in ((0, 3), (3, 5), (5, 6)))
    assert first[:2] == second
    assert third[0] not in first
    # As the router hashes: full blocks of the prompt without its last token.
    assert [len(trace.block_hashes(index)) for index in range(3)] == [2, 1, 0]


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_compression_is_found_by_content(tmp_path: Path, pack: object) -> None:
    plain = written(tmp_path, LINES)
    packed = tmp_path / "packed.bin"
    packed.write_bytes(pack(plain.read_bytes()))  # type: ignore[operator]
    assert load_trace(packed).arrival_s.tolist() == load_trace(plain).arrival_s.tolist()


def test_dynamos_names_and_sessions(tmp_path: Path) -> None:
    lines = [
        {
            "created_time": 1000,
            "input_tokens": 600,
            "output_tokens": 5,
            "hash_ids": [1, 2],
            "session_id": "a",
        },
        {
            "created_time": 1500,
            "input_tokens": 700,
            "output_tokens": 5,
            "hash_ids": [3, 4],
            "session_id": "b",
        },
        {"input_tokens": 1300, "output_tokens": 5, "hash_ids": [1, 2, 6], "session_id": "a", "delay": 250},
        {
            "input_tokens": 1400,
            "output_tokens": 5,
            "hash_ids": [1, 2, 6],
            "session_id": "a",
            "delay_ms": 2000,
        },
    ]
    trace = load_trace(written(tmp_path, lines))
    # Later turns have no time of their own: an open-loop replay sends them their delay after the turn before.
    assert trace.arrival_s.tolist() == pytest.approx([0.0, 0.25, 0.5, 2.25])
    assert trace.session.tolist() == [0, 0, 1, 0]
    assert trace.think_s.tolist() == pytest.approx([0.0, 0.25, 0.0, 2.0])
    assert trace.prompt_tokens.tolist() == [600, 1300, 700, 1400]


def test_turns_with_think_times(tmp_path: Path) -> None:
    lines = [
        {**LINES[0], "session_id": "s", "turn": 0, "think_ms": -1},
        {**LINES[1], "session_id": "s", "turn": 1, "think_ms": 3000},
    ]
    trace = load_trace(written(tmp_path, lines))
    assert trace.think_s.tolist() == [0.0, 3.0]
    assert trace.session.tolist() == [0, 0]


def test_requests_on_a_tick_spread_before_the_next_and_keep_their_order(tmp_path: Path) -> None:
    stamps = [0] * 5 + [3000] * 4 + [6000] * 3
    lines = [
        {"timestamp": stamp, "input_length": 10 + index, "output_length": 1, "hash_ids": []}
        for index, stamp in enumerate(stamps)
    ]
    path = written(tmp_path, lines)
    trace = load_trace(path, seed=1)
    moved = trace.arrival_s + load_trace(f"{path}?jitter=false").arrival_s[0]
    assert (np.diff(trace.arrival_s) >= 0).all()
    assert trace.prompt_tokens.tolist() == [10 + index for index in range(12)]
    assert len(np.unique(moved)) == 12
    first_s = moved[0]
    spans = [(0, 3), (3, 6), (6, 9)]
    for (begin, end), rows in zip(spans, (slice(1, 5), slice(5, 9), slice(9, 12)), strict=True):
        # Time 0 is the first arrival, which itself has moved by at most one tick.
        assert (moved[rows] >= begin - 3.0).all()
        assert (moved[rows] + first_s <= end).all()
    assert load_trace(path, seed=1).arrival_s.tolist() == trace.arrival_s.tolist()
    assert load_trace(path, seed=2).arrival_s.tolist() != trace.arrival_s.tolist()
    assert load_trace(f"{path}?jitter=false").arrival_s.tolist() == [stamp / 1000 for stamp in stamps]


def test_distinct_timestamps_are_left_alone(tmp_path: Path) -> None:
    assert load_trace(written(tmp_path, LINES), seed=3).arrival_s.tolist() == pytest.approx([0, 0.3, 1.5])


def test_ids_that_name_only_their_own_content_are_chained(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 3]},
        {"timestamp": 1, "input_length": 1024, "output_length": 1, "hash_ids": [2, 3]},
        {"timestamp": 2, "input_length": 1024, "output_length": 1, "hash_ids": [1, 3]},
    ]
    trace = load_trace(written(tmp_path, lines))
    first, second, third = trace.blocks.reshape(3, 2).tolist()
    assert first == third
    assert first[1] != second[1]


def test_the_block_size_is_an_option_and_options_are_strict(tmp_path: Path) -> None:
    path = written(tmp_path, [{**LINES[2], "hash_ids": [1, 2, 3]}])
    assert load_trace(f"{path}?block_tokens=1").block_tokens == 1
    with pytest.raises(ConfigError, match=r"blok_tokens.*did you mean `block_tokens`"):
        load_trace(f"{path}?blok_tokens=1")
    with pytest.raises(ConfigError, match="option=value"):
        load_trace(f"{path}?jitter")


REQUESTS = st.lists(
    st.tuples(st.integers(0, 5000), st.integers(2, 40), st.integers(1, 99), st.integers(0, 3)),
    min_size=1,
    max_size=20,
)


@settings(max_examples=50, deadline=None)
@given(REQUESTS)
def test_what_is_written_is_read(requests: list[tuple[int, int, int, int]]) -> None:
    """Prompts of block size 8 whose content is one of four texts: they share what is full and equal."""
    requests = sorted(requests)
    lines = [
        {
            "timestamp": stamp,
            "input_length": length,
            "output_length": answer,
            "hash_ids": [1000 * text + block for block in range(length // 8)],
        }
        for stamp, length, answer, text in requests
    ]
    with TemporaryDirectory() as folder:
        trace = load_trace(f"{written(Path(folder), lines)}?block_tokens=8&jitter=false")
    assert trace.arrival_s * 1000 == pytest.approx([row[0] - requests[0][0] for row in requests])
    assert trace.prompt_tokens.tolist() == [row[1] for row in requests]
    assert trace.output_tokens.tolist() == [row[2] for row in requests]
    for i, (_, first, _, a) in enumerate(requests):
        for j, (_, second, _, b) in enumerate(requests):
            shared = set(trace.block_hashes(i)) & set(trace.block_hashes(j))
            assert len(shared) == (min((first - 1) // 8, (second - 1) // 8) if a == b else 0)

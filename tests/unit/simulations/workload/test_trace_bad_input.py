"""Bad traces: one sentence with file, line and field; never a part of a trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import zstandard

from prfaas.errors import ConfigError
from simulations.workload.load import load_trace

GOOD = {"timestamp": 10, "input_length": 600, "output_length": 7, "hash_ids": [1, 2]}
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"


def refused(path: Path, **options: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_trace(path, **options)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


def second_line(tmp_path: Path, **changes: object) -> str:
    line = {key: value for key, value in {**GOOD, "timestamp": 20, **changes}.items() if value is not ...}
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(line) + "\n" + json.dumps({**GOOD, "timestamp": 30}))
    message = refused(path)
    assert f"{path}, line 2" in message
    return message


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"input_length": -5}, "input_length", "at least 1"),
        ({"input_length": 0}, "input_length", "at least 1"),
        ({"output_length": 0}, "output_length", "at least 1"),
        ({"input_length": 10**9}, "input_length", "more than"),
        ({"output_length": 10**30}, "output_length", "number of tokens"),
        ({"timestamp": 5}, "timestamp", "before the line above"),
        ({"timestamp": 1e300}, "timestamp", "years"),
        ({"timestamp": "soon"}, "timestamp", "expected"),
        ({"timestamp": ...}, "timestamp", "missing"),
        ({"input_length": ...}, "input_length", "missing"),
        ({"input_length": 600.5}, "input_length", "expected"),
        ({"hash_ids": [1], "input_length": 1100}, "hash_ids", "has 1 ids"),
        ({"hash_ids": [1, 2, 3]}, "hash_ids", "has 3 ids"),
        ({"hash_ids": [1, -2]}, "hash_ids", "whole numbers"),
        ({"hash_ids": [1, 2**64]}, "hash_ids", "whole numbers"),
        ({"hash_ids": ...}, "hash_ids", "missing"),
        ({"hash_ids": 3}, "hash_ids", "expected"),
    ],
)
def test_each_bad_value_is_named(tmp_path: Path, changes: dict[str, object], field: str, says: str) -> None:
    message = second_line(tmp_path, **changes)
    assert f"`{field}`" in message
    assert says in message


def test_nan_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "nan.jsonl"
    path.write_text(json.dumps(GOOD) + '\n{"timestamp": NaN, "input_length": 5, "output_length": 5}\n')
    assert "line 2" in refused(path)


def test_a_line_cut_off_in_the_middle(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD)[:40])
    assert f"{path}, line 2" in refused(path)


def test_lines_of_another_format_in_between(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    path.write_text(json.dumps(GOOD) + "\n2023-11-16 18:15:46.6805900,374,44\n")
    assert f"{path}, line 2" in refused(path)
    path.write_text(json.dumps(GOOD) + '\n{"timestamp": 1, "input": "text", "output": "text"}\n')
    assert "line 2: `input_length` is missing" in refused(path)


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_a_compressed_file_that_was_cut_off(tmp_path: Path, pack: object) -> None:
    lines = "".join(json.dumps({**GOOD, "timestamp": 10 * index}) + "\n" for index in range(3000))
    packed = pack(lines.encode())  # type: ignore[operator]
    path = tmp_path / "cut.jsonl.packed"
    for length in (len(packed) - 1, len(packed) // 2, 10):
        path.write_bytes(packed[:length])
        message = refused(path, format="mooncake")
        assert str(path) in message
        assert "cut off" in message or "damaged" in message


def test_unknown_empty_and_absent_files(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("hello\n")
    assert "line 1: of no known trace format" in refused(path)
    path.write_text("\n\n")
    assert "holds no request" in refused(path)
    assert "holds no request" in refused(path, format="mooncake")
    path.write_bytes(bytes(range(128, 256)))
    refused(path)
    assert "there is no trace" in refused(tmp_path / "none.jsonl")
    assert "did you mean `mooncake`" in refused(path, format="moonkake")
    refused(tmp_path, format="mooncake")  # a folder


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ("2023-11-16 18:15:50,12,x", "GeneratedTokens"),
        ("2023-11-16 18:15:50,,4", "ContextTokens"),
        ("yesterday,12,4", "TIMESTAMP"),
        ("2023-11-16 18:15:30,12,4", "TIMESTAMP"),
        ("2023-11-16 18:15:50,-12,4", "ContextTokens"),
        ("2023-11-16 18:15:50,12,0", "GeneratedTokens"),
        ("2023-11-16 18:15:50,12,nan", "GeneratedTokens"),
        ("2023-11-16 18:15:50,12", "cells"),
    ],
)
def test_azure_rows(tmp_path: Path, row: str, field: str) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE + row + "\n")
    message = refused(path)
    assert f"{path}, line 3" in message
    assert field in message


def test_text_lines(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    good = '{"timestamp": 5, "input": "a", "output": "b", "session_id": "s"}\n'
    path.write_text(good + '{"timestamp": -5, "input": "a", "output": "b"}\n')
    assert "line 2: `timestamp` is negative" in refused(path)
    path.write_text(good + '{"timestamp": 5, "input": 3}\n')
    assert "line 2: `input`" in refused(path)
    path.write_text(good)
    with pytest.raises(ConfigError, match="cannot read tokenizer"):
        load_trace(f"{path}?tokenizer={tmp_path}")


def test_dynamo_lines(tmp_path: Path) -> None:
    replay = {"trace_block_size": 4, "input_length": 9, "input_sequence_hashes": [1, 2]}
    request = {"request_received_ms": 5.0, "output_tokens": 3, "replay": replay}
    line = {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "request": request}
    path = tmp_path / "dynamo.jsonl"
    for changes, says in (
        ({"schema": "dynamo.request.trace.v9"}, "schema"),
        ({"request": {**request, "replay": None}}, "without hashes"),
        ({"request": {**request, "replay": {**replay, "trace_block_size": 8}}}, "and 4 above"),
        ({"request": {**request, "output_tokens": -1}}, "request.output_tokens"),
        ({"request": {**request, "replay": {**replay, "input_length": 90}}}, "input_sequence_hashes"),
    ):
        path.write_text(json.dumps(line) + "\n" + json.dumps({**line, **changes}) + "\n")
        message = refused(path)
        assert f"{path}, line 2" in message
        assert says in message


def test_a_damaged_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"version":1,"seed":0,"policy":"x","parameters":{},"config":{}}\n{"type":"place"\n')
    assert f"{path}: journal line 2" in refused(path)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("0,1,1,Gamma,1", "5 cells"),
        ("0,-1,1,Gamma,1,1", "not negative"),
        ("0,1,1,Pareto,1,1", "Pareto"),
        ("0,nan,1,Gamma,1,1", "finite"),
        ("zero,1,1,Gamma,1,1", "could not convert"),
    ],
)
def test_servegen_rows(tmp_path: Path, row: str, says: str) -> None:
    (tmp_path / "chunk-0-trace.csv").write_text("0,0,0,,0,0\n" + row + "\n")
    (tmp_path / "chunk-0-dataset.json").write_text("{}")
    with pytest.raises(ConfigError, match=says) as caught:
        load_trace(f"{tmp_path}?start_s=0")
    assert "chunk-0-trace.csv, line 2" in str(caught.value)

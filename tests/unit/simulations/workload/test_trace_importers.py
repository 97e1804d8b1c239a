"""Azure, Dynamo, our own logs, text and ServeGen become columns."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zstandard

from policies.cost_model import CostModel
from prfaas.engine.interface import StepProfile
from prfaas.kv.hashing import block_hashes
from prfaas.kv.layout import CacheGroup, CompatRecord, KVLayout
from prfaas.protocol.messages import WorkerInfo
from router.core.events import Finished, PlaceRequest, WorkerJoined, WorkerProfile
from router.core.journal import JournalHeader, JournalWriter
from router.core.scheduler import Scheduler
from router.decision_log import DecisionRecord
from simulations.workload.load import load_trace

GROUPS = (CacheGroup(kind="full", layers=(0,), kv_heads=1, head_dim=8),)


def test_azure_rows_become_columns(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n2023-11-16T18:16:00+00:00,1,1\n"
    )
    trace = load_trace(path)
    assert trace.arrival_s.tolist() == pytest.approx([0.0, 4.314579, 13.31941], abs=1e-6)
    assert trace.prompt_tokens.tolist() == [374, 396, 2]  # at least two: decode computes the last
    assert trace.output_tokens.tolist() == [44, 109, 1]
    assert trace.block_hashes(0) == ()


def test_dynamo_lines_are_sorted_by_arrival(tmp_path: Path) -> None:
    def line(received_ms: float, tokens: int, hashes: list[int]) -> dict[str, object]:
        replay = {"trace_block_size": 4, "input_length": tokens, "input_sequence_hashes": hashes}
        request = {
            "request_id": "r",
            "request_received_ms": received_ms,
            "output_tokens": 3,
            "replay": replay,
        }
        return {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "request": request}

    path = tmp_path / "dynamo.jsonl"
    rows = [
        line(1500.0, 9, [2**64 - 1, 7]),
        {"schema": "dynamo.request.trace.v1", "event_type": "something_else"},
        line(1000.0, 13, [2**64 - 1, 7, 8]),
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    trace = load_trace(path)
    assert trace.arrival_s.tolist() == [0.0, 0.5]
    assert trace.prompt_tokens.tolist() == [13, 9]
    assert trace.block_tokens == 4
    assert trace.block_hashes(1) == trace.block_hashes(0)[:2]


def _journal(path: Path) -> list[PlaceRequest]:
    """A small live run: two turns of a session, one retried, one that never ends, one warm-up."""
    layout = KVLayout(groups=GROUPS, page_size=16, dtype="float32", num_pages=1000)
    compat = CompatRecord(
        protocol=1, weights="w", tokenizer="t", attention="gqa", page_layout="HND", page_size=16,
        kv_dtype="float32", groups=GROUPS,
    )  # fmt: skip
    info = WorkerInfo(
        worker="decode-0", cluster="pd", role="decode", incarnation="1", model="m", context_length=8192,
        layout=layout, compat=compat, chunk_tokens=64, max_running=8, max_queue=8,
    )  # fmt: skip
    file = io.BytesIO()
    header = JournalHeader(seed=1, policy="cost_model")
    scheduler = Scheduler(CostModel(), seed=1, record=JournalWriter(file, header))
    scheduler.apply(WorkerJoined(now_s=0.0, info=info, ready=True))
    profile = StepProfile(64, 0.01, 1e-3, 0.0, 0.02, 0.0, 0.0)
    scheduler.apply(WorkerProfile(now_s=0.0, worker="decode-0", profile=profile))
    tokens = list(range(100))

    def place(name: str, count: int, now_s: float, **fields: object) -> PlaceRequest:
        request = PlaceRequest(
            now_s=now_s + 0.01, arrival_s=now_s, request_id=name, prompt_tokens=count, max_tokens=64,
            block_hashes=tuple(block_hashes(tokens[:count], 16)), **fields,
        )  # fmt: skip
        scheduler.place(request)
        return request

    placed = [place("warm", 40, 0.5, pair=("decode-0", "decode-0")), place("a", 50, 1.0, session="s")]
    placed.append(place("a", 50, 1.0, session="s", attempt=2))
    scheduler.apply(Finished(now_s=3.0, request_id="a", completion_tokens=9))
    placed.append(place("never", 30, 3.5))
    placed.append(place("b", 96, 5.0, session="s"))
    scheduler.apply(Finished(now_s=6.0, request_id="b", completion_tokens=4))
    path.write_bytes(file.getvalue())
    return placed


def test_a_journal_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    _journal(path)
    trace = load_trace(path)
    assert trace.prompt_tokens.tolist() == [50, 96]
    assert trace.output_tokens.tolist() == [9, 4]
    assert trace.arrival_s.tolist() == pytest.approx([0.0, 4.0])
    assert trace.think_s.tolist() == pytest.approx([0.0, 2.0])  # from the end at 3 to the arrival at 5
    assert trace.session.tolist() == [0, 0]
    assert trace.block_tokens == 16
    assert len(trace.block_hashes(0)) == 3
    assert trace.block_hashes(1)[:3] == trace.block_hashes(0)
    assert trace.notes == ("1 requests without a complete answer left out",)


def test_a_decision_log_is_a_trace_without_prefixes(tmp_path: Path) -> None:
    def record(name: str, at_s: float, **fields: object) -> DecisionRecord:
        values = {
            "request_id": name, "attempt": 1, "time_unix_s": at_s, "calibration": False, "prompt_tokens": 50,
            "max_tokens": 9, "kind": "local", "decode": "d", "site": "d", "link": None, "decision": {},
            "predicted_ttft_s": 1.0, "overhead_s": {"tokenize": 0.25, "hash": 0.25}, **fields,
        }  # fmt: skip
        return DecisionRecord(**values)

    rows = [
        record("b", 12.0, outcome="ok", completion_tokens=5),
        record("warm", 1.0, outcome="ok", completion_tokens=5, calibration=True),
        record("a", 10.0, outcome="transfer_failed"),
        record("a", 11.0, attempt=2, outcome="ok", completion_tokens=7),
        record("gone", 13.0, outcome="client_gone"),
    ]
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    trace = load_trace(path)
    assert trace.arrival_s.tolist() == [0.0, 2.0]
    assert trace.output_tokens.tolist() == [7, 5]
    assert trace.notes == ("1 requests without a complete answer left out",)
    assert trace.block_hashes(0) == ()


TEXT = [
    {"timestamp": 2_000_000, "input": "x" * 1030, "output": "y" * 40, "session_id": "s"},
    {"timestamp": 1_000_000, "input": "x" * 520, "output": "", "session_id": "s"},
    {"timestamp": 9_000_000, "input": "", "output": "y", "session_id": "t"},
    {"timestamp": 9_500_000, "input": "z" * 3, "output": "y", "session_id": "t"},
]


def test_text_counts_four_bytes_a_token_and_finds_shared_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in TEXT))
    trace = load_trace(path)
    assert trace.arrival_s.tolist() == [0.0, 1.0, 8.5]
    assert trace.prompt_tokens.tolist() == [130, 258, 2]
    assert trace.output_tokens.tolist() == [1, 10, 1]
    assert trace.block_hashes(1)[:2] == trace.block_hashes(0)
    assert len(trace.block_hashes(1)) == 4
    assert any("four bytes" in note for note in trace.notes)
    assert any("1 requests without input" in note for note in trace.notes)
    assert load_trace(f"{path}?max_gap_s=2").arrival_s.tolist() == pytest.approx([0.0, 1.0, 3.5])


def test_text_through_a_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "text.jsonl"
    path.write_text(json.dumps({"timestamp": 1, "input": "a b " * 5, "output": "b a ?"}))
    trace = load_trace(f"{path}?tokenizer={tmp_path}&block_tokens=4")
    assert trace.prompt_tokens.tolist() == [10]
    assert trace.output_tokens.tolist() == [3]
    assert len(trace.block_hashes(0)) == 2
    assert trace.notes == ()


@pytest.mark.parametrize("packed", [False, True])
def test_text_in_a_folder_or_an_archive(tmp_path: Path, packed: bool) -> None:
    folder = tmp_path / "runs"
    (folder / "one").mkdir(parents=True)
    (folder / "two").mkdir()
    (folder / "one" / "a.jsonl").write_text(json.dumps(TEXT[0]))
    (folder / "two" / "b.jsonl").write_text(json.dumps(TEXT[1]) + "\n" + json.dumps(TEXT[3]) + "\n")
    source = folder
    if packed:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            archive.add(folder, arcname=".")
        source = tmp_path / "runs.tar.zst"
        source.write_bytes(zstandard.compress(buffer.getvalue()))
    assert load_trace(source).prompt_tokens.tolist() == [130, 258, 2]
    assert load_trace(f"{source}?select=two").prompt_tokens.tolist() == [130, 2]


def _statistics(folder: Path, family: str, shape: float, rate: float) -> Path:
    """One client with this rate in the second and third window, one that is silent."""
    folder.mkdir()
    rows = [f"0,0,0,,0,0\n600,{rate},1.0,{family},{shape},1\n1200,{rate},1.0,{family},{shape},1\n"]
    (folder / "chunk-0-trace.csv").write_text(rows[0])
    (folder / "chunk-1-trace.csv").write_text("0,0,0,,0,0\n")
    histograms = {"input_tokens": "{100: 0.25, 300: 0.75}", "output_tokens": "{7: 1.0}", "reason_ratio": "{}"}
    (folder / "chunk-0-dataset.json").write_text(json.dumps({"0": histograms, "1200": {**histograms}}))
    return folder


@pytest.mark.parametrize(
    ("family", "shape", "cv"), [("Gamma", 0.25, 2.0), ("Gamma", 1.0, 1.0), ("Weibull", 2.0, 0.5227)]
)
def test_servegen_statistics_are_met(tmp_path: Path, family: str, shape: float, cv: float) -> None:
    folder = _statistics(tmp_path / "s", family, shape, rate=20.0)
    trace = load_trace(f"{folder}?start_s=0&duration_s=1800&seed=4")
    # Counts of a renewal process vary by cv² per count.
    assert len(trace) == pytest.approx(24_000, abs=4 * cv * 24_000**0.5 + 100)
    gaps = np.diff(trace.arrival_s)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)
    assert set(trace.prompt_tokens.tolist()) == {100, 300}
    assert (trace.prompt_tokens == 300).mean() == pytest.approx(0.75, abs=0.015)
    assert (trace.output_tokens == 7).all()
    again = load_trace(f"{folder}?start_s=0&duration_s=1800&seed=4")
    assert again.arrival_s.tobytes() == trace.arrival_s.tobytes()
    assert len(load_trace(f"{folder}?start_s=900&duration_s=300&scale=0.5")) == pytest.approx(3000, abs=600)

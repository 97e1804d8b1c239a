from __future__ import annotations

import io
import json
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from launcher.demo.agent_text import agent_workload, read_sessions
from launcher.demo.documents import cut, load_documents
from launcher.demo.topology import demo_config, share_cores
from launcher.demo.workload import document_workload
from prfaas.config_check import check
from prfaas.errors import ConfigError
from prfaas.units import Rate, Seconds


@given(st.lists(st.integers(0, 255), min_size=1, max_size=64, unique=True))
def test_the_remote_site_has_at_least_twice_the_share_and_no_core_is_invented(cores: list[int]) -> None:
    shares = share_cores(cores)
    engines = (shares.decode, shares.prefill, shares.remote)
    assert {core for engine in engines for core in engine.cpus} <= set(cores)
    for core in cores:
        assert sum(engine.cpu_share for engine in engines if core in engine.cpus) <= 1.0
    twice = 2 * len(shares.prefill.cpus) * shares.prefill.cpu_share
    assert len(shares.remote.cpus) * shares.remote.cpu_share == pytest.approx(twice)
    if len(cores) >= 2:
        assert not set(shares.remote.cpus) & {*shares.decode.cpus, *shares.prefill.cpus}


@pytest.mark.parametrize("cores", [1, 2, 4, 8, 64])
def test_the_demos_configuration_is_valid(cores: int) -> None:
    config = demo_config(Path("m"), Rate.parse("200Mbit"), Seconds(0.04), range(cores), Path("runs"))
    check(config)
    assert config.links["wan"].emulate
    assert all(
        worker.dtype == "float32"
        for cluster in config.clusters.values()
        for worker in cluster.workers.values()
    )


@pytest.fixture
def tokenizer_path(tiny_model_path: Path) -> Path:
    return tiny_model_path / "tokenizer.json"


@pytest.mark.parametrize("requests", [1, 7, 40])
def test_the_workload_has_as_many_requests_as_asked_for(tokenizer_path: Path, requests: int) -> None:
    assert document_workload(tokenizer_path, requests, 0).requests == requests


def test_the_workload_depends_on_the_seed_only(tokenizer_path: Path) -> None:
    once, again, other = (document_workload(tokenizer_path, 12, seed) for seed in (3, 3, 4))
    assert once == again
    assert once != other


def test_the_workload_mixes_documents_follow_ups_and_questions(tokenizer_path: Path) -> None:
    workload = document_workload(tokenizer_path, 40, 0)
    works = Counter(turn.work for conversation in workload.conversations for turn in conversation.turns)
    assert works == {"document": 10, "follow-up": 20, "question": 10}
    starts = [conversation.start_s for conversation in workload.conversations]
    assert starts == sorted(starts)


def test_every_machine_has_documents_enough_and_long_enough() -> None:
    documents = load_documents(0)
    assert len(documents) >= 20
    assert any("licence" in document.title for document in documents)


@given(st.integers(1, 400))
def test_a_cut_text_is_a_start_of_whole_lines_within_its_tokens(tokens: int) -> None:
    tokenizer = _byte_tokenizer()
    text = "def f(x):\n    return x + 1\n" * 20
    part = cut(text, tokens, tokenizer)
    assert text.startswith(part)
    assert len(tokenizer.encode(part).ids) <= tokens
    assert tokens < 10 or text[len(part)] == "\n"


def _byte_tokenizer() -> Tokenizer:
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


# ---------------------------------------------------------------- recorded agent text


def pack(path: Path, sessions: dict[str, list[dict[str, Any]]]) -> Path:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as files:
        for name, records in sessions.items():
            content = "".join(json.dumps(record) + "\n" for record in records).encode()
            entry = tarfile.TarInfo(f"./{name}")
            entry.size = len(content)
            files.addfile(entry, io.BytesIO(content))
    path.write_bytes(zstandard.ZstdCompressor().compress(buffer.getvalue()))
    return path


def call(timestamp: int, text: str) -> dict[str, Any]:
    return {"timestamp": timestamp, "input": text, "output": "x", "session_id": "s"}


def test_sessions_are_read_in_the_order_of_their_timestamps(tmp_path: Path) -> None:
    sessions = {"b.jsonl": [call(2, "later"), call(1, "first")], "README": [], "a.jsonl": [call(5, "other")]}
    assert read_sessions(pack(tmp_path / "t.tar.zst", sessions)) == [["other"], ["first", "later"]]


def test_prompts_over_the_context_and_empty_ones_are_skipped_and_counted(
    tmp_path: Path, tokenizer_path: Path
) -> None:
    archive = pack(
        tmp_path / "t.tar.zst", {"a.jsonl": [call(1, ""), call(2, "ab " * 4000), call(3, "short")]}
    )
    workload = agent_workload(archive, tokenizer_path, 2048, 10, 0)
    assert [turn.text for conversation in workload.conversations for turn in conversation.turns] == ["short"]
    assert workload.skipped == {"empty": 1, "over_context": 1}


def test_the_sample_is_bounded_and_sessions_stay_in_order(tmp_path: Path, tokenizer_path: Path) -> None:
    sessions = {f"{i}.jsonl": [call(k, f"session {i} " + "more " * k) for k in range(3)] for i in range(9)}
    workload = agent_workload(pack(tmp_path / "t.tar.zst", sessions), tokenizer_path, 2048, 7, 0)
    assert workload.requests == 7
    for conversation in workload.conversations:
        lengths = [len(turn.text) for turn in conversation.turns]
        assert lengths == sorted(lengths)
        assert len({turn.text.split()[1] for turn in conversation.turns}) == 1


def test_an_unreadable_archive_is_the_users_mistake(tmp_path: Path, tokenizer_path: Path) -> None:
    path = tmp_path / "not-an-archive.tar.zst"
    path.write_text("hello")
    with pytest.raises(ConfigError, match=r"not-an-archive\.tar\.zst"):
        agent_workload(path, tokenizer_path, 2048, 7, 0)
    with pytest.raises(ConfigError, match="absent"):
        agent_workload(tmp_path / "absent", tokenizer_path, 2048, 7, 0)

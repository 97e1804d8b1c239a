"""A bounded sample of recorded agent runs: `make demo DATA=<archive.tar.zst>`.

The archive holds JSONL files, one agent session each, with records `{timestamp, input, output, session_id}`
whose `input` is the whole prompt. Requests of a session share prefixes and follow each other.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer

from launcher.demo.workload import Conversation, Turn, Workload
from prfaas.errors import ConfigError

DEFAULT_REQUESTS = 15
_PER_SESSION = 3
_ANSWER_TOKENS = 16
_NEW_TOKENS = 5_000
"""Most prompt tokens beyond the common prefix with the prompt before, over the sample: a minute's work."""
_MEAN_GAP_S = 6.0
_WINDOW_BYTES = 2**31
"""Archives packed with `--long=27` and beyond need a larger window than zstandard allows by default."""


def agent_workload(
    archive: Path, tokenizer_path: Path, context_length: int, requests: int, seed: int
) -> Workload:
    """A sample of `requests` requests; prompts that do not fit the context are skipped and counted.

    Raises:
        ConfigError: the archive cannot be read, or holds no request that fits.
    """
    sessions = read_sessions(archive)
    rng = Random(seed)
    rng.shuffle(sessions)
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    skipped = {"over_context": 0, "empty": 0}
    conversations: list[Conversation] = []
    start_s, left, budget = 0.0, requests, _NEW_TOKENS
    for session in sessions:
        turns: list[Turn] = []
        first = rng.randrange(max(1, len(session) - _PER_SESSION))
        for text, new in _fitting(session[first:], tokenizer, context_length - _ANSWER_TOKENS, skipped):
            if len(turns) == min(_PER_SESSION, left) or new > budget:
                break
            budget -= new
            turns.append(Turn("agent", text, _ANSWER_TOKENS, raw=True))
        if turns:
            conversations.append(Conversation(start_s, tuple(turns)))
            start_s += rng.expovariate(1 / _MEAN_GAP_S)
            left -= len(turns)
        if not left:
            break
    if not conversations:
        raise ConfigError(f"{archive} holds no prompt that fits a context of {context_length} tokens")
    return Workload(tuple(conversations), {reason: count for reason, count in skipped.items() if count})


def _fitting(
    session: list[str], tokenizer: Tokenizer, most_tokens: int, skipped: dict[str, int]
) -> Iterator[tuple[str, int]]:
    """(prompt, tokens beyond the common prefix with the prompt before) of the prompts that fit."""
    before: list[int] = []
    for text in session:
        if not text:
            skipped["empty"] += 1
            continue
        token_ids = tokenizer.encode(text).ids
        if len(token_ids) > most_tokens:
            skipped["over_context"] += 1
            continue
        yield text, len(token_ids) - _common_prefix(before, token_ids)
        before = token_ids


def _common_prefix(a: list[int], b: list[int]) -> int:
    for i, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return i
    return min(len(a), len(b))


def read_sessions(archive: Path) -> list[list[str]]:
    """Prompts of every session in the archive, in the order of their timestamps.

    Raises:
        ConfigError: not a .tar.zst archive of JSONL files with `timestamp` and `input`.
    """
    import zstandard  # demo extra

    try:
        with archive.open("rb") as packed:
            reader = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).stream_reader(packed)
            with tarfile.open(fileobj=reader, mode="r|") as files:
                named = [
                    (entry.name, _records(files, entry)) for entry in files if entry.name.endswith(".jsonl")
                ]
    except (OSError, tarfile.TarError, zstandard.ZstdError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read agent text {archive}: {error}") from error
    return [[record["input"] for record in records] for _, records in sorted(named, key=lambda item: item[0])]


def _records(files: tarfile.TarFile, entry: tarfile.TarInfo) -> list[dict[str, Any]]:
    content = files.extractfile(entry)
    if content is None:
        raise ValueError(f"{entry.name} is not a plain file")
    records = [json.loads(line) for line in content.read().splitlines() if line.strip()]
    return sorted(records, key=lambda record: int(record["timestamp"]))

"""Prompts as text: JSON lines `{"timestamp": µs, "input", "output", "session_id"}`, in one file or many.

With `tokenizer` (a folder with `tokenizer.json`, or that file) texts are tokenized as a gateway would;
without, four bytes of UTF-8 count as a token, which English text and code come near to. Either way the
blocks' ids are the chained hashes that the live router uses, so shared prefixes are found to the block.
Requests without any input are left out, and an empty answer counts as one token; the trace says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from prfaas.config import Section
from prfaas.errors import ConfigError
from prfaas.kv.hashing import TOKEN_BYTES, chain_hashes, chain_seed, pack_tokens
from simulations.workload.archive import members
from simulations.workload.builder import TraceBuilder
from simulations.workload.files import numbered_lines, trace_name
from simulations.workload.json_lines import plain
from simulations.workload.trace import Trace

Pack = Callable[[str], bytes]
"""Text → tokens of four bytes each."""


class Options(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tokenizer: str = ""
    """Folder with `tokenizer.json`, or the file; empty = four bytes per token."""
    block_tokens: int = 64
    select: str = ""
    """Of a folder or an archive: only files whose path begins so."""
    max_gap_s: float = 0.0
    """Longer pauses in which nothing arrives are cut to this; 0 = as recorded."""


class Line(msgspec.Struct, kw_only=True):
    timestamp: int
    input: str
    output: str = ""
    session_id: str | None = None


def read(path: Path, options: Options) -> Trace:
    """The trace in `path`: a file, a folder of them, or an archive.

    Raises:
        ConfigError: the first thing wrong with it, by file, line and field.
    """
    if options.block_tokens < 1 or options.max_gap_s < 0:
        raise ConfigError(f"{path}: `block_tokens` must be at least 1 and `max_gap_s` 0 or more")
    pack = _tokenizer(options.tokenizer) if options.tokenizer else _by_bytes
    rows = sorted(_rows(path, options.select), key=lambda row: row[2].timestamp)
    names = {"arrival_s": "timestamp", "prompt_tokens": "input", "output_tokens": "output"}
    builder = TraceBuilder(str(path), names)
    seed, empty, silent, arrival_s, last_us = chain_seed(), 0, 0, 0.0, rows[0][2].timestamp if rows else 0
    for _, number, line in rows:
        gap_s, last_us = (line.timestamp - last_us) / 1e6, line.timestamp
        arrival_s += min(gap_s, options.max_gap_s) if options.max_gap_s else gap_s
        if not line.input:
            empty += 1
            continue
        packed, answer = pack(line.input), pack(line.output)
        silent += not answer
        blocks = list(chain_hashes(packed, options.block_tokens, seed))
        builder.add(
            number,
            arrival_s,
            len(packed) // TOKEN_BYTES,
            max(1, len(answer) // TOKEN_BYTES),
            blocks,
            line.session_id,
        )
    trace = builder.build(options.select.strip("/") or trace_name(path), options.block_tokens, sort=True)
    return replace(trace, notes=_notes(options, empty, silent))


def _notes(options: Options, empty: int, silent: int) -> tuple[str, ...]:
    notes = []
    if not options.tokenizer:
        notes.append("no tokenizer given: four bytes of text count as a token")
    if empty:
        notes.append(f"{empty} requests without input left out")
    if silent:
        notes.append(f"{silent} empty answers count as one token")
    return tuple(notes)


def _rows(path: Path, select: str) -> Iterator[tuple[str, int, Line]]:
    """(file, line number, row) of every file."""
    if path.is_dir() or ".tar" in path.name:
        for name, content in members(path, ".jsonl", select):
            yield from _decoded(f"{path}/{name}", enumerate(content.split(b"\n"), start=1))
    else:
        yield from _decoded(str(path), numbered_lines(path))


def _decoded(source: str, lines: Iterator[tuple[int, bytes]]) -> Iterator[tuple[str, int, Line]]:
    decoder = msgspec.json.Decoder(Line)
    for number, line in lines:
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source}, line {number}: {plain(error)}") from error
        if row.timestamp < 0:
            raise ConfigError(f"{source}, line {number}: `timestamp` is negative, got {row.timestamp}")
        yield source, number, row


def _by_bytes(text: str) -> bytes:
    """UTF-8, filled up to whole tokens."""
    data = text.encode("utf-8", "surrogatepass")
    return data + b"\0" * (-len(data) % TOKEN_BYTES)


def _tokenizer(name: str) -> Pack:
    from tokenizers import Tokenizer

    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"cannot read tokenizer {file}: {error}") from error
    return lambda text: pack_tokens(tokenizer.encode(text, add_special_tokens=False).ids)

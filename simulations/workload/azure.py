"""Azure's LLM inference traces: CSV with `TIMESTAMP,ContextTokens,GeneratedTokens`; no prefix identity."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from prfaas.config import Section
from prfaas.errors import ConfigError
from simulations.workload.builder import TraceBuilder
from simulations.workload.files import numbered_lines, trace_name
from simulations.workload.trace import Trace

_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class Options(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """There is nothing to choose."""


def read(path: Path, options: Options) -> Trace:
    """The trace in `path`.

    Raises:
        ConfigError: the first thing wrong with it, by line and field.
    """
    names = dict(zip(("arrival_s", "prompt_tokens", "output_tokens"), _COLUMNS, strict=True))
    builder = TraceBuilder(str(path), names)
    lines = numbered_lines(path)
    places = _places(path, lines)
    for number, line in lines:
        cells = _cells(path, number, line)
        if len(cells) <= max(places):
            raise ConfigError(f"{path}, line {number}: has {len(cells)} cells; the header has more")
        stamp, prompt, answer = (cells[place] for place in places)
        builder.add(
            number,
            _seconds(builder, number, stamp),
            _tokens(builder, number, "prompt_tokens", prompt),
            _tokens(builder, number, "output_tokens", answer),
        )
    return builder.build(trace_name(path), block_tokens=512)


def _places(path: Path, lines: Iterator[tuple[int, bytes]]) -> list[int]:
    """Where the three columns stand, from the header."""
    number, line = next(lines, (1, b""))
    header = [name.lower() for name in _cells(path, number, line)]
    for name in _COLUMNS:
        if name.lower() not in header:
            raise ConfigError(f"{path}, line {number}: the header lacks `{name}`")
    return [header.index(name.lower()) for name in _COLUMNS]


def _cells(path: Path, number: int, line: bytes) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line.decode("utf-8-sig")]), [])]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}, line {number}: {error}") from error


def _seconds(builder: TraceBuilder, number: int, text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise builder.error(number, "arrival_s", f"is no date and time: {text!r}") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _tokens(builder: TraceBuilder, number: int, column: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise builder.error(number, column, f"is no whole number: {text!r}") from None

"""Mooncake's JSON lines: `{"timestamp": ms, "input_length", "output_length", "hash_ids": [...]}`.

Also the dialects that grew from it: Dynamo's names (`created_time`, `input_tokens`, `output_tokens`), its
sessions (`session_id`, then `delay` or `delay_ms` between an answer and the next turn), and `turn` with
`think_ms`. A later turn without a timestamp arrives its delay after the former turn in an open-loop replay.

The published traces stamp requests on ticks of about three seconds, up to 28 of them on one. Left so, every
tick would be a burst that never was. Where a trace has two or more requests per distinct timestamp, each is
moved to a random moment between its tick and the next (uniform, seeded; the order in the file stays).
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from prfaas.config import Section
from simulations.workload.builder import TraceBuilder
from simulations.workload.files import trace_name
from simulations.workload.json_lines import decoded_lines
from simulations.workload.trace import Floats, Trace


class Options(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    seed: int = 0
    """Of the moments inside ticks."""
    block_tokens: int = 512
    """Tokens per hash id."""
    jitter: bool = True
    """Spread requests inside ticks."""


class Line(msgspec.Struct, kw_only=True):
    timestamp: float | None = None
    created_time: float | None = None
    input_length: int | None = None
    input_tokens: int | None = None
    output_length: int | None = None
    output_tokens: int | None = None
    hash_ids: list[int] | None = None
    session_id: str | int | None = None
    turn: int | None = None
    think_ms: float | None = None
    delay: float | None = None
    delay_ms: float | None = None


def read(path: Path, options: Options) -> Trace:
    """The trace in `path`.

    Raises:
        ConfigError: the first thing wrong with it, by line and field.
    """
    builder = TraceBuilder(
        str(path),
        {
            "arrival_s": "timestamp",
            "prompt_tokens": "input_length",
            "output_tokens": "output_length",
            "blocks": "hash_ids",
            "think_s": "delay",
        },
    )
    turns: dict[str, tuple[int, float]] = {}  # session → (turn, arrival) of its latest line
    has_derived_times = False
    for number, line in decoded_lines(path, Line):
        session = None if line.session_id is None else str(line.session_id)
        before = turns.get(session) if session is not None else None
        think_s = _think_s(line, before is not None)
        stamp = _first(line.timestamp, line.created_time)
        if stamp is not None:
            arrival_s = stamp / 1000.0
        elif before is not None:
            arrival_s, has_derived_times = before[1] + think_s, True
        else:
            raise builder.error(number, "arrival_s", "is missing")
        if session is not None:
            turn = line.turn if line.turn is not None else (before[0] + 1 if before else 0)
            if before is not None and turn <= before[0]:
                raise builder.error(number, "turn", f"is {turn} after {before[0]} in session {session}")
            turns[session] = turn, arrival_s
        builder.add(
            number,
            arrival_s,
            _required(builder, number, "prompt_tokens", _first(line.input_length, line.input_tokens)),
            _required(builder, number, "output_tokens", _first(line.output_length, line.output_tokens)),
            line.hash_ids,
            session,
            think_s,
        )
    if options.jitter and not has_derived_times:
        spread_ticks(builder, options.seed)
    return builder.build(trace_name(path), options.block_tokens, sort=has_derived_times)


def _first(value: float | None, other: float | None) -> float | None:
    return value if value is not None else other


def _required(builder: TraceBuilder, number: int, column: str, value: float | None) -> int:
    if value is None:
        raise builder.error(number, column, "is missing")
    return int(value)


def _think_s(line: Line, is_later_turn: bool) -> float:
    """From the former answer to this turn; a first turn waits for nothing (written as -1 or 0)."""
    given = [value for value in (line.think_ms, line.delay, line.delay_ms) if value is not None]
    return given[0] / 1000.0 if given and is_later_turn else 0.0


def spread_ticks(builder: TraceBuilder, seed: int) -> None:
    """Move requests that share a timestamp to random moments before the next one."""
    stamps = np.array(builder.arrival_s)
    ticks, first = np.unique(stamps, return_index=True)
    if len(stamps) < 2 * len(ticks) or len(ticks) < 2 or (np.diff(stamps) < 0).any():
        return
    counts = np.diff(np.append(first, len(stamps)))
    widths = np.diff(ticks)
    widths = np.append(widths, np.median(widths))
    moments = _sorted_within(np.random.default_rng(seed).random(len(stamps)), counts)
    moved = stamps + moments * np.repeat(widths, counts)
    builder.arrival_s[:] = type(builder.arrival_s)("d", moved.tobytes())


def _sorted_within(values: Floats, counts: np.ndarray) -> Floats:
    """`values` sorted within consecutive groups of `counts` sizes."""
    group = np.repeat(np.arange(len(counts)), counts)
    return values[np.lexsort((values, group))]

"""`dynamo.request.trace.v1`: one JSON line per finished request, in the order of their ends.

    {"schema": "dynamo.request.trace.v1", "event_type": "request_end", "request": {"request_received_ms",
     "output_tokens", "session_id"?, "replay": {"trace_block_size", "input_length", "input_sequence_hashes"}}}

Other event types are skipped. The hashes are chained, u64, one per full block.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from prfaas.config import Section
from prfaas.errors import ConfigError
from simulations.workload.builder import TraceBuilder
from simulations.workload.files import trace_name
from simulations.workload.json_lines import decoded_lines
from simulations.workload.trace import Trace

SCHEMA = "dynamo.request.trace.v1"


class Options(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """There is nothing to choose."""


class Replay(msgspec.Struct, kw_only=True):
    trace_block_size: int
    input_length: int
    input_sequence_hashes: list[int]


class Request(msgspec.Struct, kw_only=True):
    request_received_ms: float
    output_tokens: int
    replay: Replay | None = None
    session_id: str | None = None


class Line(msgspec.Struct, kw_only=True):
    schema: str
    event_type: str
    request: Request | None = None


def read(path: Path, options: Options) -> Trace:
    """The trace in `path`.

    Raises:
        ConfigError: the first thing wrong with it, by line and field.
    """
    replay = "request.replay"
    builder = TraceBuilder(
        str(path),
        {
            "arrival_s": "request.request_received_ms",
            "prompt_tokens": f"{replay}.input_length",
            "output_tokens": "request.output_tokens",
            "blocks": f"{replay}.input_sequence_hashes",
        },
    )
    block_tokens = 0
    for number, line in decoded_lines(path, Line):
        if line.schema != SCHEMA:
            raise ConfigError(
                f"{path}, line {number}: `schema` is {line.schema!r}, this program reads {SCHEMA}"
            )
        if line.event_type != "request_end":
            continue
        if line.request is None:
            raise ConfigError(f"{path}, line {number}: `request` is missing")
        if line.request.replay is None:
            raise ConfigError(f"{path}, line {number}: `{replay}` is missing: it was recorded without hashes")
        prompt = line.request.replay
        if prompt.trace_block_size < 1 or block_tokens not in (0, prompt.trace_block_size):
            raise ConfigError(
                f"{path}, line {number}: `{replay}.trace_block_size` is {prompt.trace_block_size}"
                + (f", and {block_tokens} above" if block_tokens else "")
            )
        block_tokens = prompt.trace_block_size
        builder.add(
            number,
            line.request.request_received_ms / 1000.0,
            prompt.input_length,
            line.request.output_tokens,
            prompt.input_sequence_hashes,
            line.request.session_id,
        )
    return builder.build(trace_name(path), block_tokens or 1, sort=True)

"""Which format a trace file has, by its first line (or by what a folder or archive holds)."""

from __future__ import annotations

import csv
from pathlib import Path

import msgspec

from prfaas.errors import ConfigError
from simulations.workload.files import numbered_lines

FORMATS = {
    "mooncake": "simulations.workload.mooncake",
    "dynamo": "simulations.workload.dynamo",
    "azure": "simulations.workload.azure",
    "prfaas": "simulations.workload.prfaas_log",
    "text": "simulations.workload.text",
    "servegen": "simulations.workload.servegen",
}
"""Module of each importer: `Options` and `read(path, options)`."""

_MARKS = (
    ("dynamo", {"schema", "event_type"}),
    ("prfaas", {"version", "policy", "config"}),
    ("prfaas", {"request_id", "attempt"}),
    ("text", {"input", "session_id"}),
    ("text", {"input", "output"}),
    ("mooncake", {"input_length"}),
    ("mooncake", {"input_tokens"}),
)
"""A line with all of these fields is of that format; the first that fits."""


def detect_format(path: Path) -> str:
    """Name of the format of `path`, one of `FORMATS`.

    Raises:
        ConfigError: it is none of them, or empty.
    """
    if path.is_dir() or ".tar" in path.name:
        from simulations.workload.archive import member_names

        return "servegen" if any(name.endswith("-trace.csv") for name in member_names(path)) else "text"
    first = next(numbered_lines(path), None)
    if first is None:
        raise ConfigError(f"{path} holds no request: it is empty")
    number, line = first
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        row = None
    if isinstance(row, dict):
        for name, marks in _MARKS:
            if marks <= row.keys():
                return name
    elif b"," in line and _is_azure(line):
        return "azure"
    raise ConfigError(
        f"{path}, line {number}: of no known trace format ({', '.join(FORMATS)}); name it with --format"
    )


def _is_azure(line: bytes) -> bool:
    header = {name.strip().lower() for name in next(csv.reader([line.decode("utf-8", "replace")]))}
    return {"contexttokens", "generatedtokens"} <= header

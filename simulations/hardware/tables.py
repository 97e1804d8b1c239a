"""The data folder's cost tables: estimated step times by model, system and tensor parallelism.

Two CSV files: `cost/aic_prefill.csv.gz` (model, system, backend, tp, new_tokens, prefix_tokens, prefill_ms; a
batch of one) and `cost/aic_decode.csv.gz` (…, batch, context, step_ms; `context` is per sequence).
"""

from __future__ import annotations

import csv
import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prfaas.config_load import suggest
from prfaas.errors import ConfigError
from simulations.data_folder import data_file

Floats = NDArray[np.float64]

PREFILL_FILE = "cost/aic_prefill.csv.gz"
DECODE_FILE = "cost/aic_decode.csv.gz"
CAPACITY_FILE = "cost/aic_kv_capacity.json"


@dataclass(frozen=True, slots=True)
class CostTable:
    """Step times of one model on one system; a full grid, with cells that the file lacks extrapolated."""

    name: str
    new_tokens: Floats
    prefix_tokens: Floats
    prefill_s: Floats
    """[new_tokens, prefix_tokens]."""
    batch: Floats
    context: Floats
    """Per sequence."""
    decode_s: Floats
    """[batch, context]."""


def load_table(name: str, folder: str | os.PathLike[str] | None = None) -> CostTable:
    """The table `model/system/tp` or `model/system/tp/backend`; without a backend, vllm's.

    A system may be written without its form factor (`h100` for `h100_sxm`).

    Raises:
        ConfigError: no data folder, or no such table; names the nearest one.
    """
    tables = _read_all(data_file(PREFILL_FILE, folder), data_file(DECODE_FILE, folder))
    key = _full_name(name)
    if key not in tables:
        raise ConfigError(f"there is no cost table `{name}`{suggest(key, tables)}")
    return tables[key]


def table_names(folder: str | os.PathLike[str] | None = None) -> list[str]:
    """Every `model/system/tp/backend` for which there is a table."""
    return sorted(_read_all(data_file(PREFILL_FILE, folder), data_file(DECODE_FILE, folder)))


def kv_capacity_tokens(
    name: str, folder: str | os.PathLike[str] | None = None, *, weights_share: float = 1.0
) -> int:
    """Tokens that the KV pool of the instance of table `name` holds, at 0.9 of its memory.

    The file states it per GPU, as tokens whose share of heads one GPU keeps: the whole instance holds no
    more than that, because each of its GPUs keeps a share of every token.

    Args:
        weights_share: of the table's weights that really lie in memory: ½ where 16-bit weights are served
            in 8 bits. What they leave is KV's.

    Raises:
        ConfigError: no data folder, or nothing known of it.
    """
    key = _full_name(name)
    rows = json.loads(data_file(CAPACITY_FILE, folder).read_text(encoding="utf-8"))
    for row in rows:
        if f"{row['model']}/{row['system']}/{row['tp']}/{row['backend']}" == key:
            freed_bytes = (1.0 - weights_share) * row["weights_bytes_per_gpu"]
            return int(row["kv_token_capacity"] + freed_bytes / row["kv_bytes_per_token_per_gpu"])
    raise ConfigError(f"{CAPACITY_FILE} has no KV capacity of `{name}`")


def _full_name(name: str) -> str:
    parts = name.split("/")
    if parts[-1].isdigit():
        parts.append("vllm")
    if len(parts) >= 4 and parts[-3] in ("h100", "h200", "a100"):
        parts[-3] += "_sxm"
    return "/".join(parts)


@lru_cache(maxsize=2)
def _read_all(prefill: Path, decode: Path) -> dict[str, CostTable]:
    chunks = _grids(prefill, "new_tokens", "prefix_tokens", "prefill_ms")
    steps = _grids(decode, "batch", "context", "step_ms")
    return {name: CostTable(name, *chunks[name], *steps[name]) for name in chunks if name in steps}


def _grids(path: Path, row: str, column: str, value: str) -> dict[str, tuple[Floats, Floats, Floats]]:
    """By table name: (row knots, column knots, seconds [rows, columns])."""
    cells: dict[str, dict[tuple[float, float], float]] = {}
    for number, line in _csv_rows(path):
        try:
            name = f"{line['model']}/{line['system']}/{int(line['tp'])}/{line['backend']}"
            at = float(line[row]), float(line[column])
            cells.setdefault(name, {})[at] = float(line[value]) / 1000.0
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}, line {number}: {error!r}; is this a cost table?") from error
    return {name: _grid(found) for name, found in cells.items()}


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            yield from enumerate(csv.DictReader(file), start=2)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _grid(cells: dict[tuple[float, float], float]) -> tuple[Floats, Floats, Floats]:
    rows = sorted({at[0] for at in cells})
    columns = sorted({at[1] for at in cells})
    grid = np.full((len(rows), len(columns)), np.nan)
    for (row, column), seconds in cells.items():
        grid[rows.index(row), columns.index(column)] = seconds
    knots = np.array(columns)
    for line in grid:  # the longest prompt after the longest prefix exceeds the model's context: extrapolate
        known = np.flatnonzero(~np.isnan(line))
        for missing in np.flatnonzero(np.isnan(line)):
            line[missing] = _extrapolate(knots, line, known, int(missing))
    return np.array(rows), knots, grid


def _extrapolate(knots: Floats, line: Floats, known: NDArray[np.intp], at: int) -> float:
    """The value at `knots[at]` on the line through the two known cells nearest to it."""
    near = known[np.argsort(np.abs(knots[known] - knots[at]))[:2]]
    if len(near) < 2:
        return float(line[near[0]])
    first, second = sorted(near)
    slope = (line[second] - line[first]) / (knots[second] - knots[first])
    return float(line[first] + slope * (knots[at] - knots[first]))

"""Measured GPU points of `cost/aic_silicon_sample.csv.gz` for which there is a cost table to predict from."""

from __future__ import annotations

import csv
import gzip
import os
import re
from collections import Counter
from dataclasses import dataclass

from prfaas.errors import ConfigError
from simulations.data_folder import data_file
from simulations.hardware.tables import table_names

SILICON_FILE = "cost/aic_silicon_sample.csv.gz"
SYSTEMS = ("h100_sxm", "h200_sxm")
_CONCURRENCY = re.compile(r"silicon_concurrency=(\d+)")

_TABLE_MODELS = {
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
    "deepseek-ai/DeepSeek-R1": "deepseek-ai/DeepSeek-V3",
    "zhipuai/GLM-5": "zai-org/GLM-5-FP8",
}
"""Same architecture, another name."""
_TABLE_PRECISIONS = {
    "deepseek-ai/DeepSeek-V3": "fp8",
    "MiniMaxAI/MiniMax-M2.5": "fp8",
    "moonshotai/Kimi-K2.5": "int4",
    "openai/gpt-oss-120b": "fp4",
}
"""Where the table's name does not say it (the weights' size does); others are bfloat16 or say FP8."""


Group = tuple[str, str, str, str, str]
"""Model, system, backend, precision, mode: what shares overheads."""


@dataclass(frozen=True, slots=True)
class Point:
    """One measured configuration under a fixed number of clients that each send again at once."""

    model: str
    system: str
    backend: str
    precision: str
    mode: str
    """`agg`: prefill and decode on the same workers; `disagg`: on their own."""
    input_tokens: int
    output_tokens: int
    clients: int
    prefill_table: str
    decode_table: str
    prefill_workers: int
    decode_workers: int
    """In `agg` both are 1 and the same."""
    decode_attention_dp: int
    """GPUs of a decode worker that keep sequences of their own (attention data parallel), else 1."""
    ttft_s: float
    tpot_s: float

    @property
    def group(self) -> Group:
        return self.model, self.system, self.backend, self.precision, self.mode

    @property
    def configuration(self) -> tuple[object, ...]:
        """Everything but what was measured: repeated measurements agree in it."""
        return tuple(getattr(self, name) for name in self.__slots__ if name not in ("ttft_s", "tpot_s"))


@dataclass(frozen=True, slots=True)
class Sample:
    points: list[Point]
    skipped: dict[str, int]
    """Points of these systems that cannot be predicted, by reason."""


def read_points(folder: str | os.PathLike[str] | None = None) -> Sample:
    """The measured points of H100 and H200 systems, each configuration's repeated lines once.

    Raises:
        ConfigError: no data, or it is damaged.
    """
    path = data_file(SILICON_FILE, folder)
    tables = set(table_names(folder))
    points: dict[Point, None] = {}
    skipped: Counter[str] = Counter()
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            for number, row in enumerate(csv.DictReader(file), start=2):
                if row.get("system") not in SYSTEMS:
                    continue
                try:
                    found = _point(row, tables)
                except (KeyError, ValueError) as error:
                    raise ConfigError(f"{path}, line {number}: {error!r}") from error
                if isinstance(found, str):
                    skipped[found] += 1
                elif found in points:
                    skipped["the same measurement again"] += 1
                else:
                    points[found] = None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    return Sample(list(points), dict(skipped))


def _point(row: dict[str, str], tables: set[str]) -> Point | str:
    """A point, or why it cannot be predicted."""
    clients = _CONCURRENCY.search(row["silicon_data_source"])
    if clients is None:
        return "concurrency not recorded"
    is_split = row["mode"] != "agg"
    sides = ("prefill_", "decode_") if is_split else ("", "")
    if any(int(row[f"{side}pp_size"] or 1) != 1 for side in sides):
        return "pipeline parallel"
    counts = [int(row[f"{side}num_workers"] or 0) if is_split else 1 for side in sides]
    if 0 in counts:
        return "number of prefill and decode workers not recorded"
    names = [_table(row, side, tables) for side in sides]
    if None in names:
        return "no cost table for this model on so many GPUs"
    return Point(
        model=row["model_path"],
        system=row["system"],
        backend=row["backend"],
        precision=_precision(row, str(names[0])),
        mode="disagg" if is_split else "agg",
        input_tokens=int(row["isl"]),
        output_tokens=int(row["osl"]),
        clients=int(clients[1]),
        prefill_table=str(names[0]),
        decode_table=str(names[1]),
        prefill_workers=counts[0],
        decode_workers=counts[1],
        decode_attention_dp=int(row[f"{sides[1]}attention_dp_size"] or 1),
        ttft_s=float(row["silicon_ttft_ms"]) / 1000.0,
        tpot_s=float(row["silicon_tpot_ms"]) / 1000.0,
    )


def _table(row: dict[str, str], side: str, tables: set[str]) -> str | None:
    """The table for one side's workers: same model, system and number of GPUs; own backend before vllm's."""
    model = _TABLE_MODELS.get(row["model_path"], row["model_path"])
    gpus = int(row[f"{side}tp_size"]) * int(row[f"{side}attention_dp_size"] or 1)
    models = [f"{model}-FP8", model] if row["precision"] == "fp8" else [model]
    for name in models:
        for backend in (row["backend"], "vllm"):
            key = f"{name}/{row['system']}/{gpus}/{backend}"
            if key in tables:
                return key
    return None


def _precision(row: dict[str, str], table: str) -> str:
    """`fp8`, or `fp8, table bf16` where the table is of another one."""
    model = table.rsplit("/", 3)[0]
    of_table = _TABLE_PRECISIONS.get(model, "fp8" if "FP8" in model else "bf16")
    measured = row["precision"] or "bf16"
    return measured if measured == of_table else f"{measured}, table {of_table}"

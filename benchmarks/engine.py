"""Prefill and decode rates of the native engine beside plain torch (`transformers`), in the same run.

    python benchmarks/engine.py [--model FOLDER] [--threads 2] [--rounds 9] [--json]

Both compute in float32 with the same threads and take turns, so that a busy machine disturbs both alike.
Each figure is the median over the rounds; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from launcher.model import ensure_model
from prfaas.engine.model_config import LlamaConfig
from prfaas.engine.runner import ModelRunner
from prfaas.engine.step import SequenceStep, StepPlan
from prfaas.kv.layout import KVLayout
from prfaas.protocol.messages import Sampling

CHUNK_TOKENS = 256
PAGE_SIZE = 32
GREEDY = Sampling(max_tokens=1)


@dataclass(frozen=True)
class Case:
    """One figure: `tokens` new tokens per sequence after `context` cached ones."""

    name: str
    sequences: int
    tokens: int
    context: int

    @property
    def end(self) -> int:
        return self.context + self.tokens


CASES = (
    Case("prefill, 512 tokens", 1, 512, 0),
    Case("prefill, 256 tokens after 3,584", 1, 256, 3584),
    Case("decode, 1 stream, 128 context", 1, 1, 128),
    Case("decode, 8 streams, 128 context", 8, 1, 128),
    Case("decode, 1 stream, 4,000 context", 1, 1, 4000),
    Case("decode, 8 streams, 1,000 context", 8, 1, 1000),
)


def token_ids(count: int) -> list[int]:
    return [(i * 7919) % 49152 for i in range(count)]


class Native:
    """The engine's runner over a pool with every case's pages scattered over it."""

    def __init__(self, model_path: Path, threads: int) -> None:
        groups = LlamaConfig.load(model_path).cache_groups
        pages = max(case.sequences * -(-case.end // PAGE_SIZE) for case in CASES)
        layout = KVLayout(groups=groups, page_size=PAGE_SIZE, dtype="float32", num_pages=pages)
        pool = mmap.mmap(-1, layout.pool_bytes)
        self._pages = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).tolist()
        self._runner = ModelRunner(
            model_path, layout, pool, device="cpu", dtype="float32", threads=threads, on_layer=lambda: None
        )

    def prepare(self, case: Case) -> Callable[[], object]:
        """Fill the context of `case`; returns what is to be timed."""
        per_sequence = -(-case.end // PAGE_SIZE)
        tables = [self._pages[i * per_sequence :][:per_sequence] for i in range(case.sequences)]
        for table in tables:
            self._compute([table], case.context, 0)
        return lambda: self._compute(tables, case.tokens, case.context)

    def _compute(self, tables: list[list[int]], count: int, start: int) -> None:
        """`count` tokens of every sequence in chunks, sampling after the last one."""
        for first in range(start, start + count, CHUNK_TOKENS):
            chunk = token_ids(min(CHUNK_TOKENS, start + count - first))
            sampling = GREEDY if first + len(chunk) == start + count else None
            steps = [
                SequenceStep(token_ids=chunk, start=first, page_ids=table, sampling=sampling)
                for table in tables
            ]
            self._runner.execute(StepPlan(step=0, sequences=steps))


class PlainTorch:
    """`transformers`: eager torch, SDPA, one dense cache per batch."""

    def __init__(self, model_path: Path) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()

    def prepare(self, case: Case) -> Callable[[], object]:
        from transformers import DynamicCache

        cache = DynamicCache()
        if case.context:
            self._forward(case.sequences, case.context, cache)

        def compute() -> None:
            self._forward(case.sequences, case.tokens, cache)
            cache.crop(case.context - case.end)  # negative: so many tokens off the end

        return compute

    @torch.inference_mode()
    def _forward(self, sequences: int, count: int, cache: object) -> None:
        inputs = torch.tensor([token_ids(count)] * sequences)
        output = self._model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        output.logits[:, -1].argmax(-1)


def measure(case: Case, native: Native, plain: PlainTorch, rounds: int) -> dict[str, float | str]:
    """Median seconds of both over `rounds` turns, one warm-up turn before them."""
    runs = {"native": native.prepare(case), "torch": plain.prepare(case)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            began_s = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began_s)
    native_s, torch_s = (statistics.median(times[name][1:]) for name in ("native", "torch"))
    tokens = case.sequences * case.tokens
    return {
        "case": case.name,
        "native_tokens_per_s": round(tokens / native_s, 1),
        "torch_tokens_per_s": round(tokens / torch_s, 1),
        "native_step_ms": round(native_s * 1e3, 2),
        "torch_step_ms": round(torch_s * 1e3, 2),
        "speedup": round(torch_s / native_s, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="HF folder (default: SmolLM2-135M-Instruct, fetched once)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    options = parser.parse_args()
    model_path = options.model or ensure_model()
    native, plain = Native(model_path, options.threads), PlainTorch(model_path)
    rows = []
    for case in CASES:
        rows.append(measure(case, native, plain, options.rounds))
        print(f"{case.name}: {rows[-1]['speedup']} times plain torch", file=sys.stderr)
    if not options.json:
        print_table(rows, options.threads)
    machine = (
        f"{platform.processor() or platform.machine()}, {options.threads} threads, torch {torch.__version__}"
    )
    print(json.dumps({"benchmark": "engine", "machine": machine, "rounds": options.rounds, "cases": rows}))


def print_table(rows: list[dict[str, float | str]], threads: int) -> None:
    table = Table(title=f"Engine against plain torch, float32, {threads} threads (medians)")
    for column in rows[0]:
        table.add_column(column.replace("_", " "), justify="left" if column == "case" else "right")
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main()

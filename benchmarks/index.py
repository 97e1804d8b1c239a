"""The prefix index with a million blocks: match, insert, memory, dropping a worker.

    python -m benchmarks.index [--blocks 1000000] [--workers 64] [--prompt-blocks 2048]

Prints one JSON line. Prompts are matched in turn, so that each finds the caches cold (`match_*`), and one
again and again (`match_hot_*`); its blocks are linked already, `match_first_us` is the match that links
them. Insertion is of events of 16 blocks each, from lists of integers as events carry them. Memory is of
the index with all its bookkeeping, by `tracemalloc`. CPU microseconds, hashing apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from prfaas.protocol.messages import KVStored
from router.core.block_table import Hashes, warm_up
from router.core.prefix_index import PrefixIndex

EVENT_BLOCKS = 16
PROMPTS = 200


class Filler:
    """Feeds an index with numbered events."""

    def __init__(self, index: PrefixIndex, workers: int) -> None:
        self.index = index
        self._sequence = [0] * workers
        for slot in range(workers):
            index.add_worker(slot)

    def store(self, slot: int, blocks: list[int]) -> None:
        self._sequence[slot] += 1
        event = KVStored(generation="1", sequence=self._sequence[slot], block_hashes=blocks)
        self.index.apply(slot, event)


def cpu_us(call: Callable[[], object]) -> float:
    started = time.thread_time()
    call()
    return (time.thread_time() - started) * 1e6


def insert(filler: Filler, blocks: Hashes, workers: int) -> float:
    """CPU seconds to store all blocks, an equal part on each worker."""
    parts = [part.tolist() for part in np.array_split(blocks, workers)]
    spent_us = 0.0
    for slot, part in enumerate(parts):
        events = [part[i : i + EVENT_BLOCKS] for i in range(0, len(part), EVENT_BLOCKS)]
        spent_us += cpu_us(lambda slot=slot, events=events: [filler.store(slot, event) for event in events])
    return spent_us / 1e6


def time_match(filler: Filler, prompts: list[Hashes], workers: int, depths: int) -> dict[str, float]:
    """Matches of prompts that the workers cache to `depths` different depths."""
    index, length = filler.index, len(prompts[0])
    for prompt in prompts:
        for slot in range(workers):
            filler.store(slot, prompt[: length * (slot % depths + 1) // depths].tolist())
    first = [cpu_us(lambda prompt=prompt: index.match(prompt, workers, 0.0)) for prompt in prompts]
    again = [cpu_us(lambda prompt=prompt: index.match(prompt, workers, 0.0)) for prompt in prompts * 3]
    found = index.match(prompts[0], workers, 0.0)
    if len(set(found.tolist())) != depths:
        raise AssertionError(f"{depths} depths were stored, {sorted(set(found.tolist()))} found")
    hot = [cpu_us(lambda: index.match(prompts[0], workers, 0.0)) for _ in range(1000)]
    return {
        f"match_{depths}_depths_p50_us": round(statistics.median(again), 1),
        f"match_hot_{depths}_depths_p50_us": round(statistics.median(hot), 1),
        f"match_first_{depths}_depths_p50_us": round(statistics.median(first), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--prompt-blocks", type=int, default=2048)
    arguments = parser.parse_args()
    warm_up()
    rng = np.random.default_rng(0)
    blocks = rng.integers(2, 2**64 - 1, size=arguments.blocks, dtype=np.uint64)
    filler = Filler(PrefixIndex(), arguments.workers)
    length = arguments.prompt_blocks
    prompts = [
        blocks[i * length : (i + 1) * length].copy() for i in range(min(PROMPTS, len(blocks) // 4 // length))
    ]
    rest = blocks[len(prompts) * length :]
    seconds = insert(filler, rest, arguments.workers)
    figures: dict[str, float] = {
        "workers": arguments.workers,
        "prompt_blocks": length,
        "insert_blocks_per_cpu_s": round(len(rest) / seconds),
    }
    half = len(prompts) // 2
    figures |= time_match(filler, prompts[:half], arguments.workers, 10)
    figures |= time_match(filler, prompts[half:], arguments.workers, arguments.workers)
    figures["blocks"] = len(filler.index)
    last = arguments.workers - 1
    figures["dropped_blocks"] = filler.index.blocks(last)
    figures["drop_ms"] = round(cpu_us(lambda: filler.index.remove_worker(last)) / 1e3, 2)
    tracemalloc.start()
    again = Filler(PrefixIndex(), arguments.workers)
    insert(again, blocks, arguments.workers)
    figures["bytes_per_block"] = round(tracemalloc.get_traced_memory()[0] / len(again.index), 1)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

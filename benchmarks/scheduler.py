"""How long a placement takes: `Scheduler.place` with 1, 16 and 64 workers, caches and bookings filled.

    python -m benchmarks.scheduler [--placements 2000] [--blocks 256]

Prints one JSON line per fleet: candidates, p50 and p99 microseconds of CPU time of place(), and of the
prefix match alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from policies.cost_model import CostModel
from prfaas.kv.layout import CacheGroup, CompatRecord, KVLayout
from prfaas.protocol.messages import KVSnapshot, KVStored, WorkerInfo
from router.core.config import UNMEASURED
from router.core.events import (
    Finished,
    FirstToken,
    KVReceived,
    LinkConfigured,
    PlaceRequest,
    WorkerJoined,
    WorkerProfile,
)
from router.core.prefix_index import PrefixIndex
from router.core.scheduler import Scheduler

GROUPS = (CacheGroup(kind="full", layers=tuple(range(30)), kv_heads=3, head_dim=64),)
PAGE = 32
# (decode workers, prefill workers): 1 worker, 16 workers, 64 workers with 64 candidates and with 496.
FLEETS = ((1, 0), (4, 12), (1, 63), (8, 56))


def worker(name: str, role: str, cluster: str) -> WorkerInfo:
    return WorkerInfo(
        worker=name,
        cluster=cluster,
        role=role,
        incarnation="1",
        model="m",
        context_length=2**17,
        layout=KVLayout(groups=GROUPS, page_size=PAGE, dtype="bfloat16", num_pages=100_000),
        compat=CompatRecord(1, "w", "t", "gqa", "HND", PAGE, "bfloat16", GROUPS),
        chunk_tokens=256,
        max_running=64,
        max_queue=10_000,
    )


def make_scheduler(decodes: int, prefills: int, hashes: tuple[int, ...]) -> Scheduler:
    """A fleet in which worker i caches the first i-th part of the prompt."""
    scheduler = Scheduler(CostModel())
    scheduler.apply(
        LinkConfigured(now_s=0, name="wan", clusters=("pd", "far"), capacity_bytes_per_s=1e9, rtt_s=0.03)
    )
    workers = [worker(f"decode-{i}", "decode", "pd") for i in range(decodes)]
    workers += [worker(f"prefill-{i}", "prefill", ("pd", "far")[i % 2]) for i in range(prefills)]
    for index, info in enumerate(workers):
        scheduler.apply(WorkerJoined(now_s=0, info=info, ready=True))
        scheduler.apply(WorkerProfile(now_s=0, worker=info.worker, profile=UNMEASURED))
        cached = list(hashes[: len(hashes) * index // len(workers)])
        snapshot = KVSnapshot(generation="1", sequence=0, page_size=PAGE, block_hashes=cached)
        scheduler.apply(KVReceived(now_s=0, worker=info.worker, event=snapshot))
    return scheduler


def time_places(scheduler: Scheduler, placements: int, hashes: tuple[int, ...]) -> tuple[list[float], int]:
    """Microseconds of each place(), about 32 requests in flight, and the number of candidates."""
    times_us, candidates = [], 0
    sites: list[str] = []
    sequence: dict[str, int] = {}
    for i in range(placements):
        now_s = 1 + i * 0.02
        request = PlaceRequest(
            now_s=now_s, arrival_s=now_s, request_id=f"r{i}", prompt_tokens=len(hashes) * PAGE + 7,
            max_tokens=200, block_hashes=hashes,
        )  # fmt: skip
        started = time.thread_time()
        decision = scheduler.place(request)
        times_us.append((time.thread_time() - started) * 1e6)
        candidates = len(decision.candidates)
        sites.append(decision.site)
        # Prompts finish prefill 16 placements later, and their answers another 16 later.
        if i >= 16:
            site = sites.pop(0)
            sequence[site] = sequence.get(site, 0) + 1
            stored = KVStored(generation="1", sequence=sequence[site], block_hashes=[hashes[-1]])
            scheduler.apply(KVReceived(now_s=now_s, worker=site, event=stored))
            scheduler.apply(FirstToken(now_s=now_s, request_id=f"r{i - 16}", ttft_s=0.3))
        if i >= 32:
            scheduler.apply(Finished(now_s=now_s, request_id=f"r{i - 32}", completion_tokens=100))
    return times_us, candidates


def time_match(workers: int, hashes: tuple[int, ...]) -> float:
    """Median microseconds of one prefix match over `workers`, each caching another length."""
    index = PrefixIndex()
    for slot in range(workers):
        index.add_worker(slot)
        cached = list(hashes[: len(hashes) * (slot + 1) // workers])
        index.apply(slot, KVSnapshot(generation="1", sequence=0, page_size=PAGE, block_hashes=cached))
    times_us = []
    for _ in range(200):
        started = time.thread_time()
        index.match(hashes, workers, 0.0)
        times_us.append((time.thread_time() - started) * 1e6)
    return statistics.median(times_us)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--placements", type=int, default=2000)
    parser.add_argument("--blocks", type=int, default=256)
    arguments = parser.parse_args()
    hashes = tuple((i + 1) * 0x9E3779B97F4A7C15 % 2**64 for i in range(arguments.blocks))
    for decodes, prefills in FLEETS:
        scheduler = make_scheduler(decodes, prefills, hashes)
        times_us, candidates = time_places(scheduler, arguments.placements, hashes)
        cut = statistics.quantiles(times_us, n=100)
        figures = {
            "workers": decodes + prefills,
            "candidates": candidates,
            "blocks": arguments.blocks,
            "place_p50_us": round(cut[49], 1),
            "place_p99_us": round(cut[98], 1),
            "match_p50_us": round(time_match(decodes + prefills, hashes), 1),
        }
        print(json.dumps(figures))


if __name__ == "__main__":
    main()

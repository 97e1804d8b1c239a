"""What the brain costs: `Scheduler.place` and each kind of event, with caches and bookings filled.

    python -m benchmarks.scheduler [--placements 400] [--blocks 1000000] [--workers 16,64,256]

Half of the workers decode, half prefill (a quarter of all across a link), so candidates are D + D·P. Before
each case the prefix index holds a million blocks, and every prompt finds an eighth of itself cached at some
workers. Prints one JSON line for each fleet, page size and prompt length: candidates, median and p99 CPU
microseconds of a placement; then one line for each fleet with the median of each event. Hashing is not in
it: hashes come as an array, as the gateway's hashing may make them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict

import numpy as np

from policies.cost_model import CostModel
from prfaas.kv.layout import CacheGroup, CompatRecord, KVLayout
from prfaas.protocol.messages import (
    KVRemoved,
    KVSnapshot,
    KVStored,
    LinkCounters,
    PrefillReport,
    WorkerInfo,
    WorkerStatus,
)
from router.core.block_table import Hashes
from router.core.config import UNMEASURED
from router.core.decision import Decision
from router.core.events import (
    Finished,
    FirstToken,
    KVReceived,
    LinkConfigured,
    PlaceRequest,
    PrefillReported,
    SchedulerEvent,
    StatusReceived,
    Tick,
    WorkerJoined,
    WorkerProfile,
)
from router.core.scheduler import Scheduler

GROUPS = (CacheGroup(kind="full", layers=tuple(range(32)), kv_heads=8, head_dim=128),)
PROMPTS = {"2K": 2048, "32K": 32 * 1024, "128K": 128 * 1024}
PAGES = (512, 32)
GAP_S = 0.02
IN_FLIGHT = 2
"""Per decode worker; half of them still in prefill."""


def worker(name: str, role: str, cluster: str, page: int) -> WorkerInfo:
    return WorkerInfo(
        worker=name,
        cluster=cluster,
        role=role,
        incarnation="1",
        model="m",
        context_length=2**18,
        layout=KVLayout(GROUPS, page, "bfloat16", 2**24 // page),
        compat=CompatRecord(1, "w", "t", "gqa", "HND", page, "bfloat16", GROUPS),
        chunk_tokens=8192,
        max_running=64,
        max_queue=10_000,
    )


class Load:
    """A fleet whose caches hold `blocks` blocks together, and requests on their way through it."""

    def __init__(self, workers: int, blocks: int, page: int) -> None:
        self.page, self.rng = page, np.random.default_rng(0)
        self.scheduler = Scheduler(CostModel())
        self.scheduler.apply(
            LinkConfigured(now_s=0, name="wan", clusters=("pd", "far"), capacity_bytes_per_s=12e9, rtt_s=0.03)
        )
        half = workers // 2
        self.infos = [worker(f"decode-{i}", "decode", "pd", page) for i in range(half)]
        self.infos += [worker(f"prefill-{i}", "prefill", ("pd", "far")[i % 2], page) for i in range(half)]
        self.cached = self.rng.integers(2, 2**64 - 1, size=blocks, dtype=np.uint64)
        self.sequence = dict.fromkeys((info.worker for info in self.infos), 0)
        parts = np.array_split(self.cached, len(self.infos))
        for info, part in zip(self.infos, parts, strict=True):
            self.scheduler.apply(WorkerJoined(now_s=0, info=info, ready=True))
            self.scheduler.apply(WorkerProfile(now_s=0, worker=info.worker, profile=UNMEASURED))
            snapshot = KVSnapshot(generation="1", sequence=0, page_size=page, block_hashes=part.tolist())
            self.scheduler.apply(KVReceived(now_s=0, worker=info.worker, event=snapshot))
        self.now_s, self.placed = 1.0, 0
        self.flying: list[tuple[Decision, Hashes]] = []
        self.decoding: list[tuple[Decision, Hashes]] = []
        self.event_us: dict[str, list[float]] = defaultdict(list)

    def hashes(self, tokens: int) -> Hashes:
        """A prompt of which an eighth is cached at the worker whose part it is from."""
        length = (tokens - 1) // self.page
        begin = int(self.rng.integers(0, len(self.cached) - length))
        fresh = self.rng.integers(2, 2**64 - 1, size=length - length // 8, dtype=np.uint64)
        return np.concatenate([self.cached[begin : begin + length // 8], fresh])

    def place(self, tokens: int) -> tuple[float, int]:
        """(CPU microseconds, candidates) of one placement; what it sets going goes on in later calls."""
        self.now_s += GAP_S
        self.placed += 1
        hashes = self.hashes(tokens)
        request = PlaceRequest(
            now_s=self.now_s, arrival_s=self.now_s, request_id=f"r{self.placed}", prompt_tokens=tokens,
            max_tokens=200, block_hashes=hashes,
        )  # fmt: skip
        started = time.thread_time()
        decision = self.scheduler.place(request)
        spent_us = (time.thread_time() - started) * 1e6
        self.flying.append((decision, hashes))
        limit = IN_FLIGHT * len(self.infos) // 4
        if len(self.flying) > limit:
            self.end_prefill(*self.flying.pop(0))
        if len(self.decoding) > limit:
            self.end(*self.decoding.pop(0))
        if self.placed % 4 == 0:
            self.apply("status", self.status())
        if self.placed % 50 == 0:
            self.apply("tick", Tick(now_s=self.now_s))
        return spent_us, len(decision.candidates)

    def end_prefill(self, decision: Decision, hashes: Hashes) -> None:
        self.kv(KVStored, decision.site, hashes[-32:])
        report = PrefillReport(
            site=decision.site, cached_tokens=0, decode_cached_tokens=0, computed_tokens=1000, queue_s=0.1,
            prefill_s=0.5, ready_s=0.7,
        )  # fmt: skip
        name = decision.request_id
        self.apply(
            "prefill_reported", PrefillReported(now_s=self.now_s, request_id=name, attempt=1, report=report)
        )
        self.apply("first_token", FirstToken(now_s=self.now_s, request_id=name, ttft_s=0.8))
        self.decoding.append((decision, hashes))

    def end(self, decision: Decision, hashes: Hashes) -> None:
        event = Finished(now_s=self.now_s, request_id=decision.request_id, completion_tokens=100)
        self.apply("finished", event)
        self.kv(KVRemoved, decision.site, hashes[-32:][::-1])

    def kv(self, kind: type[KVStored] | type[KVRemoved], name: str, blocks: Hashes) -> None:
        """A delta of at most 32 blocks."""
        self.sequence[name] += 1
        event = kind(generation="1", sequence=self.sequence[name], block_hashes=blocks.tolist())
        label = "kv_stored_32" if kind is KVStored else "kv_removed_32"
        self.apply(label, KVReceived(now_s=self.now_s, worker=name, event=event))

    def status(self) -> StatusReceived:
        info = self.infos[self.placed // 4 % len(self.infos)]
        sent = self.placed * 10**6
        link = LinkCounters(
            cluster="pd", bytes_total=sent, sampled_bytes_total=sent, sampled_s_total=self.now_s, rtt_s=0.03
        )
        status = WorkerStatus(
            worker=info.worker, incarnation="1", role=info.role, state="ready", waiting=1, running=3,
            running_context_tokens=9000, total_pages=info.layout.num_pages,
            free_pages=info.layout.num_pages // 2, decode_step_s=0.02,
            links=[link] if info.role == "prefill" else [],
        )  # fmt: skip
        return StatusReceived(now_s=self.now_s, status=status)

    def apply(self, label: str, event: SchedulerEvent) -> None:
        started = time.thread_time()
        self.scheduler.apply(event)
        self.event_us[label].append((time.thread_time() - started) * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--placements", type=int, default=400)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--workers", default="16,64,256")
    arguments = parser.parse_args()
    for workers in (int(number) for number in arguments.workers.split(",")):
        events: dict[str, list[float]] = defaultdict(list)
        for page in PAGES:
            load = Load(workers, arguments.blocks, page)
            for label, tokens in PROMPTS.items():
                found = [load.place(tokens) for _ in range(arguments.placements)]
                times_us = sorted(spent_us for spent_us, _ in found)
                figures = {
                    "workers": workers,
                    "candidates": found[-1][1],
                    "page_tokens": page,
                    "prompt": label,
                    "place_p50_us": round(statistics.median(times_us), 1),
                    "place_p99_us": round(times_us[len(times_us) * 99 // 100], 1),
                }
                print(json.dumps(figures), flush=True)
            for label, spent_us in load.event_us.items():
                events[label] += spent_us
        medians = {label: round(statistics.median(spent), 1) for label, spent in sorted(events.items())}
        print(json.dumps({"workers": workers, "event_p50_us": medians}), flush=True)


if __name__ == "__main__":
    main()

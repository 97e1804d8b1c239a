"""A small fleet for scheduler tests: two clusters, numbers that are easy to reckon with."""

from __future__ import annotations

from policies.cost_model import CostModel
from prfaas.engine.interface import StepProfile
from prfaas.kv.layout import CacheGroup, CompatRecord, KVLayout
from prfaas.protocol.messages import LinkCounters, PrefillReport, WorkerInfo, WorkerStatus
from router.core.events import (
    LinkConfigured,
    PlaceRequest,
    PrefillReported,
    StatusReceived,
    WorkerJoined,
    WorkerProfile,
)
from router.core.scheduler import Scheduler

GROUPS = (CacheGroup(kind="full", layers=(0, 1, 2, 3), kv_heads=1, head_dim=8),)
PAGE = 16
PAGE_BYTES = 4 * 2 * PAGE * 8 * 4
PROFILE = StepProfile(
    chunk_tokens=64,
    prefill_base_s=0.01,
    prefill_token_s=0.001,
    prefill_context_s=1e-7,
    decode_base_s=0.02,
    decode_sequence_s=0.001,
    decode_context_s=1e-6,
)
FAST = StepProfile(
    chunk_tokens=64,
    prefill_base_s=0.002,
    prefill_token_s=0.0002,
    prefill_context_s=2e-8,
    decode_base_s=0.02,
    decode_sequence_s=0.001,
    decode_context_s=1e-6,
)


def info(
    name: str,
    role: str,
    cluster: str,
    *,
    pages: int = 1000,
    max_queue: int = 100,
    state_bytes: int = 0,
    **compat: object,
) -> WorkerInfo:
    record = {
        "protocol": 1, "weights": "w", "tokenizer": "t", "attention": "gqa", "page_layout": "HND",
        "page_size": PAGE, "kv_dtype": "float32", "groups": GROUPS,
    }  # fmt: skip
    return WorkerInfo(
        worker=name,
        cluster=cluster,
        role=role,
        incarnation=f"{name}-1",
        model="m",
        context_length=8192,
        layout=KVLayout(GROUPS, PAGE, "float32", pages, state_bytes),
        compat=CompatRecord(**{**record, **compat}),
        chunk_tokens=64,
        max_running=8,
        max_queue=max_queue,
    )


def join(
    scheduler: Scheduler, worker: WorkerInfo, profile: StepProfile = PROFILE, now_s: float = 0.0
) -> None:
    scheduler.apply(WorkerJoined(now_s=now_s, info=worker, ready=True))
    scheduler.apply(WorkerProfile(now_s=now_s, worker=worker.worker, profile=profile))


def fleet(
    decodes: int = 1, pools: int = 1, remotes: int = 1, *, rate: float = 25e6, rtt_s: float = 0.04, **kwargs
) -> Scheduler:
    scheduler = kwargs.pop("scheduler", None) or Scheduler(kwargs.pop("policy", CostModel()), **kwargs)
    scheduler.apply(
        LinkConfigured(now_s=0.0, name="wan", clusters=("pd", "far"), capacity_bytes_per_s=rate, rtt_s=rtt_s)
    )
    for index in range(decodes):
        join(scheduler, info(f"decode-{index}", "decode", "pd"))
    for index in range(pools):
        join(scheduler, info(f"pool-{index}", "prefill", "pd"))
    for index in range(remotes):
        join(scheduler, info(f"remote-{index}", "prefill", "far"), FAST)
    return scheduler


def request(request_id: str = "r", tokens: int = 1000, now_s: float = 1.0, **fields: object) -> PlaceRequest:
    return PlaceRequest(
        **{
            "now_s": now_s, "arrival_s": now_s, "request_id": request_id, "prompt_tokens": tokens,
            "max_tokens": 64, **fields,
        }
    )  # fmt: skip


def status(name: str, role: str, now_s: float, **fields: object) -> StatusReceived:
    defaults = {"state": "ready", "total_pages": 1000, "free_pages": 1000}
    return StatusReceived(
        now_s=now_s,
        status=WorkerStatus(worker=name, incarnation=f"{name}-1", role=role, **{**defaults, **fields}),
    )


def counters(
    bytes_total: int, sampled_bytes: int = 0, sampled_s: float = 0.0, rtt_s: float = 0.0
) -> LinkCounters:
    return LinkCounters(
        cluster="pd", bytes_total=bytes_total, sampled_bytes_total=sampled_bytes, sampled_s_total=sampled_s,
        rtt_s=rtt_s,
    )  # fmt: skip


def reported(request_id: str, site: str, now_s: float, attempt: int = 1, **fields: object) -> PrefillReported:
    defaults = {
        "cached_tokens": 0, "decode_cached_tokens": 0, "computed_tokens": 999, "queue_s": 0.0,
        "prefill_s": 1.0, "ready_s": 1.0,
    }  # fmt: skip
    return PrefillReported(
        now_s=now_s,
        request_id=request_id,
        attempt=attempt,
        report=PrefillReport(site=site, **{**defaults, **fields}),
    )

"""Small random traces and fleets for the engine's tests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from policies.base import BasePolicy
from prfaas.config import LinkConfig
from prfaas.units import Rate, Seconds
from simulations.fleet import Fleet, HardwareSpec, ModelSpec, SimCluster, SimWorkers
from simulations.workload.trace import Trace

LINEAR = {
    "prefill_base_s": 2e-3,
    "prefill_token_s": 8e-5,
    "prefill_context_s": 2e-8,
    "decode_base_s": 2e-3,
    "decode_sequence_s": 1e-4,
    "decode_context_s": 1e-7,
}


@dataclass
class Spread(BasePolicy):
    """Any feasible pair, by a fixed dice per request: placements that depend on no timing."""

    seed: int = 0
    only: str = ""
    """`local` or `elsewhere` where such a pair is feasible."""

    def choose(self, request: Any, candidates: Any, view: Any, rng: Any) -> int:
        rows = list(range(len(candidates)))
        if self.only:
            local = [row for row in rows if candidates.decode[row] == candidates.site[row]]
            wanted = local if self.only == "local" else [row for row in rows if row not in local]
            rows = wanted or rows
        dice = np.random.default_rng((self.seed, int(request.request_id)))
        return int(rows[int(dice.integers(1 << 30)) % len(rows)])


def small_trace(
    seed: int,
    requests: int = 30,
    *,
    page: int = 16,
    rate_per_s: float = 20.0,
    prompt_pages: int = 12,
    output: int = 40,
    shared: bool = True,
) -> Trace:
    """Poisson arrivals, prompts with common beginnings, none that ends at a page's end."""
    dice = np.random.default_rng(seed)
    arrival_s = np.cumsum(dice.exponential(1 / rate_per_s, requests))
    ids: dict[tuple[int, int], int] = {}
    prompts, blocks, offsets = [], [], [0]
    for index in range(requests):
        pages = int(dice.integers(0, prompt_pages + 1))
        prompts.append(pages * page + int(dice.integers(2, page + 1)))
        parent = 0
        for depth in range(pages):
            branch = int(dice.integers(0, 2)) if shared and depth < prompt_pages // 2 else 1000 + index
            parent = ids.setdefault((parent, branch), len(ids) + 1)
            blocks.append(parent)
        offsets.append(len(blocks))
    return Trace(
        name=f"small-{seed}",
        arrival_s=arrival_s,
        prompt_tokens=np.array(prompts, dtype=np.int64),
        output_tokens=dice.integers(1, output + 1, requests).astype(np.int64),
        block_tokens=page,
        blocks=np.array(blocks, dtype=np.int64),
        block_offsets=np.array(offsets, dtype=np.int64),
    )


def small_fleet(
    *,
    decode: int = 2,
    prefill: int = 0,
    remote: int = 0,
    kv_pages: int = 400,
    page: int = 16,
    max_running: int = 6,
    chunk_tokens: int = 64,
    local_rate: str = "1GB/s",
    link: str = "20MB/s",
    rtt_s: float = 0.02,
    state_bytes: int = 0,
    linear: dict[str, float] | None = None,
    **fields: Any,
) -> Fleet:
    hardware = HardwareSpec(linear=linear or LINEAR, chunk_tokens=chunk_tokens, kv_tokens=kv_pages * page)
    workers = {"decode": SimWorkers(role="decode", hardware="h", count=decode, max_running=max_running)}
    if prefill:
        workers["prefill"] = SimWorkers(role="prefill", hardware="h", count=prefill)
    clusters = {"pd": SimCluster(kind="pd", workers=workers, local_rate=local_rate)}
    links = {}
    if remote:
        far = {"remote": SimWorkers(role="prefill", hardware="h", count=remote)}
        clusters["far"] = SimCluster(kind="prefill", workers=far, local_rate=local_rate)
        links["wan"] = LinkConfig(between=("pd", "far"), capacity=Rate.parse(link), rtt=Seconds(rtt_s))
    return Fleet(
        name="small",
        # The longest prompt fills every pool, so prefill workers send nothing before a prompt's turn.
        model=ModelSpec(
            name="m", layers=4, kv_bytes_per_token=4096, state_bytes=state_bytes, context_length=1 << 20
        ),
        clusters=clusters,
        links=links,
        hardware={"h": hardware},
        page_size=page,
        **fields,
    )


def with_outputs(trace: Trace, output_tokens: Any) -> Trace:
    return replace(trace, output_tokens=np.asarray(output_tokens, dtype=np.int64))

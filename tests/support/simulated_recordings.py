"""Recordings whose truth is known: made by the simulator itself, on a small fleet."""

from __future__ import annotations

import io
from collections.abc import Callable

import msgspec
import numpy as np

from router.core.events import SchedulerInput, WorkerProfile
from router.core.journal import JournalHeader, JournalWriter
from router.core.policy_loader import load_policy
from router.decision_log import DecisionRecord
from simulations.engine.run import RunOptions, simulate
from simulations.fidelity.recording import Row
from simulations.fleet import Fleet, MachineSpec
from simulations.fleet_load import loads_fleet
from simulations.workload.trace import Trace

FLEET = """
name: tiny
model: {name: tiny, layers: 4, kv_bytes_per_token: 4096, context_length: 8192}
page_size: 64
clusters:
  pd:
    kind: pd
    workers:
      decode: {role: decode, hardware: slow, count: 2, max_running: 8}
      prefill: {role: prefill, hardware: slow}
  far:
    kind: prefill
    workers:
      remote: {role: prefill, hardware: fast}
links:
  wan: {between: [pd, far], capacity: 100Mbit, rtt: 20ms}
hardware:
  slow:
    linear: {prefill_base_s: 0.01, prefill_token_s: 2.0e-4, prefill_context_s: 1.0e-8,
             decode_base_s: 0.02, decode_sequence_s: 0.002, decode_context_s: 1.0e-6}
    chunk_tokens: 512
    kv_tokens: 65536
  fast:
    linear: {prefill_base_s: 0.005, prefill_token_s: 1.0e-4, prefill_context_s: 1.0e-8,
             decode_base_s: 0.01, decode_sequence_s: 0.001, decode_context_s: 1.0e-6}
    chunk_tokens: 512
    kv_tokens: 65536
"""


def fleet() -> Fleet:
    return loads_fleet(FLEET)


def on_one_machine(described: Fleet, **fields: float) -> Fleet:
    """All workers of a fleet on a machine with these fields of `MachineSpec`."""
    clusters = {
        name: msgspec.structs.replace(
            cluster,
            workers={
                group: msgspec.structs.replace(workers, machine="box")
                for group, workers in cluster.workers.items()
            },
        )
        for name, cluster in described.clusters.items()
    }
    return msgspec.structs.replace(described, clusters=clusters, machines={"box": MachineSpec(**fields)})


def trace(requests: int = 60, rate_per_s: float = 1.5, seed: int = 0) -> Trace:
    """Prompts of 100 to 3,000 tokens; every third one begins with a shared prefix of eight blocks."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(100, 3000, requests)
    blocks, offsets = [], [0]
    for index, length in enumerate(prompts):
        own = 10_000 + 100 * index + np.arange(int(length) // 64)
        if index % 3 == 0:
            own[:8] = np.arange(min(8, len(own)))
        blocks.append(own)
        offsets.append(offsets[-1] + len(own))
    return Trace(
        name="test",
        arrival_s=np.cumsum(rng.exponential(1 / rate_per_s, requests)),
        prompt_tokens=prompts.astype(np.int64),
        output_tokens=rng.integers(5, 60, requests).astype(np.int64),
        block_tokens=64,
        blocks=np.concatenate(blocks).astype(np.int64),
        block_offsets=np.array(offsets, dtype=np.int64),
    )


def journal(
    change: Callable[[SchedulerInput], SchedulerInput] = lambda item: item,
    truth: Fleet | None = None,
    requests: int = 60,
    policy: str = "cost_model",
) -> bytes:
    """The journal of a simulated run, each input changed on its way to the file."""
    described = truth or fleet()
    file = io.BytesIO()
    writer = JournalWriter(file, JournalHeader(seed=0, policy=policy))
    items: list[SchedulerInput] = []
    simulate(trace(requests), described, load_policy(policy, {}), RunOptions(journal=items.append))
    for item in items:
        writer(change(item))
    return file.getvalue()


def misjudged(factor: float) -> Callable[[SchedulerInput], SchedulerInput]:
    """Makes the router's calibrated step times `factor` times what they are."""

    def change(item: SchedulerInput) -> SchedulerInput:
        if not isinstance(item, WorkerProfile):
            return item
        fields = msgspec.structs.asdict(item.profile)
        wrong = {name: value * factor for name, value in fields.items() if name.endswith("_s")}
        return msgspec.structs.replace(item, profile=msgspec.structs.replace(item.profile, **wrong))

    return change


def decision_log(rows: list[Row]) -> bytes:
    """Rows as a gateway would have logged them."""
    return b"".join(msgspec.json.encode(_record(row)) + b"\n" for row in rows)


def _record(row: Row) -> DecisionRecord:
    return DecisionRecord(
        request_id=row.request_id,
        attempt=1,
        time_unix_s=1e9 + row.arrival_s,
        calibration=False,
        prompt_tokens=row.prompt_tokens,
        max_tokens=row.max_tokens,
        kind=row.kind,
        decode=row.decode,
        site=row.site,
        link="wan" if row.kind == "remote" else None,
        predicted_ttft_s=row.predicted_ttft_s,
        decision={},
        overhead_s={},
        outcome="ok",
        report=row.report,
        ttft_s=row.ttft_s,
        completion_tokens=row.completion_tokens,
        total_s=row.end_s,
    )

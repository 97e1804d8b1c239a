"""How fast the simulator is, with the live scheduler inside: requests per CPU-second and peak memory.

    python -m benchmarks.simulate [--part headline,requests,workers] [--most-requests 1000000] [--policy SPEC]

Prints one JSON line per point; every point runs in a process of its own, so that its peak memory is its own.
CPU seconds are those of the run (the trace and the compiled code are loaded before); peak memory is the whole
process's. `headline` needs the data folder (PRFAAS_DATA or ../shared).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import replace

from policies.cost_model import CostModel
from router.core.scheduler import Scheduler
from simulations.bound import fluid_bound
from simulations.commands.policy_spec import parse_policy
from simulations.data_folder import data_file
from simulations.engine.run import RunOptions, simulate
from simulations.fleet import Fleet, ModelSpec, SimCluster, SimWorkers
from simulations.workload.load import load_trace
from simulations.workload.trace import Trace

MOONCAKE = "traces/mooncake_conversation.jsonl.gz"
GENERATED = "generate:prefix?requests={requests}&tail_tokens=2000&output_tokens=300&seed=1"
LOAD = 0.7
"""Offered rate of generated workloads, over the bound."""
DYNAMO = {"requests_per_cpu_s": 1188, "peak_mb": 667}
"""NVIDIA Dynamo's replay in Rust on the same trace and 8 + 8 workers; it simulates every token's step."""
REQUESTS = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
WORKERS = (16, 32, 64, 128, 256)


def fleet(workers: int) -> Fleet:
    """Half prefill, half decode, in one cluster: Llama-3.1-8B on H100."""
    half = workers // 2
    groups = {
        role: SimWorkers(role=role, hardware="llama-3.1-8b-h100", count=half)
        for role in ("prefill", "decode")
    }
    return Fleet(
        name=f"{half}+{half}",
        model=ModelSpec(name="llama-3.1-8b", layers=32, kv_bytes_per_token=131_072),
        clusters={"pd": SimCluster(kind="pd", workers=groups)},
    )


def points(parts: list[str], most_requests: int, policy: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    if "headline" in parts:
        found.append({"part": "headline", "trace": str(data_file(MOONCAKE)), "workers": 16})
    if "requests" in parts:
        sizes = [size for size in REQUESTS if size <= most_requests]
        found += [{"part": "requests", "trace": GENERATED.format(requests=n), "workers": 16} for n in sizes]
    if "workers" in parts:
        trace = GENERATED.format(requests=min(20_000, most_requests))
        found += [{"part": "workers", "trace": trace, "workers": n} for n in WORKERS]
    return [{**point, "policy": policy} for point in found]


def measure(point: dict[str, object]) -> dict[str, object]:
    """One run, in this process."""
    trace, workers = load_trace(str(point["trace"])), int(str(point["workers"]))
    if str(point["trace"]).startswith("generate:"):
        trace = at_load(trace, fleet(workers), LOAD)
    Scheduler(CostModel())  # loads the compiled code
    began_s = time.perf_counter()
    result = simulate(trace, fleet(workers), parse_policy(str(point["policy"])).make(), RunOptions(seed=0))
    figures = result.summary()
    return {
        "part": point["part"],
        "trace": trace.name,
        "policy": point["policy"],
        "requests": len(trace),
        "served": int(figures["served"]),
        "workers": workers,
        "simulated_s": round(figures["duration_s"], 1),
        "ttft_p90_s": round(figures["ttft_p90_s"], 4),
        "cpu_s": round(result.cpu_s, 2),
        "wall_s": round(time.perf_counter() - began_s, 2),
        "requests_per_cpu_s": round(len(trace) / result.cpu_s),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def at_load(trace: Trace, where: Fleet, load: float) -> Trace:
    """`trace` offered at `load` times the fleet's bound (of its first requests)."""
    bound = fluid_bound(replace(trace.part(0, min(len(trace), 3000))), where).rate_per_s
    return trace.at_rate(load * bound / trace.rate_per_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--part", default="headline,requests,workers")
    parser.add_argument("--most-requests", type=int, default=100_000)
    parser.add_argument("--policy", default="cost_model")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.point:
        print(json.dumps(measure(json.loads(arguments.point))), flush=True)
        return
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    for point in points(arguments.part.split(","), arguments.most_requests, arguments.policy):
        command = [sys.executable, "-m", "benchmarks.simulate", "--point", json.dumps(point)]
        run = subprocess.run(
            command, env={**os.environ, **threads}, capture_output=True, text=True, check=False
        )
        if run.returncode:
            sys.exit(f"{point}: {run.stderr.strip().splitlines()[-1]}")
        found = json.loads(run.stdout)
        if found["part"] == "headline":
            found["dynamo_rust_replay"] = DYNAMO
            found["times_dynamo"] = round(found["requests_per_cpu_s"] / DYNAMO["requests_per_cpu_s"], 2)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

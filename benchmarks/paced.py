"""A live fleet of paced workers beside the simulator: the same fleet, trace and policy.

    make paced                                  sixteen virtual instances of H200, generated requests
    make paced DATA=mooncake_conversation.jsonl.gz
    .venv/bin/python -m benchmarks.paced --time-scale 12 --requests 200 --json out.json

Requests arrive at their true times on a clock that runs `--time-scale` times slower, and go through the real
gateway to workers that keep the true protocol but sleep for their compute. The table and the JSON are in
seconds of the described fleet. A run in which a process used more than 70 % of a core, or the machine was
busier than that, measures this machine and not the fleet: it is called invalid, and the exit status is 3.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.paced_fleet import VOCABULARY, CpuUse, PacedFleet, write_model
from benchmarks.paced_load import Answer, LoadClient
from prfaas.config import PolicyConfig
from prfaas.errors import PrfaasError
from router.core.policy_loader import load_policy
from simulations.engine.run import RunOptions, simulate
from simulations.fidelity.compare import Outcomes, errors_by_request, median_and_p90, relative_errors
from simulations.fidelity.scaled import Scale, live_config, scaled_fleet
from simulations.fleet import Fleet
from simulations.fleet_load import check_fits, load_fleet
from simulations.result import SERVED, RunResult
from simulations.workload.load import load_trace
from simulations.workload.trace import Trace

FLEET = Path(__file__).resolve().parent.parent / "simulations/fidelity/paced.yaml"
MOST_CPU = 0.7
"""Of a core, by one process; and of all cores, by whatever runs on the machine."""
WITHIN = 0.1
"""Relative error allowed."""
JUDGED = ("ttft_p50_s", "ttft_p90_s", "requests_per_s", "output_tokens_per_s")
PLACES = ("reuse", "local", "pool", "remote")


def main() -> int:
    arguments = _arguments()
    console = Console(stderr=True, highlight=False)
    fleet = load_fleet(arguments.fleet)
    if arguments.policy:
        fleet = msgspec.structs.replace(fleet, policy=PolicyConfig(name=arguments.policy))
    trace = _trace(arguments, fleet)
    check_fits(fleet, trace)
    scale = Scale(arguments.time_scale)
    folder = Path(arguments.state_dir or tempfile.mkdtemp(prefix="prfaas-paced-"))
    console.print(
        f"{len(trace)} requests over {trace.duration_s:.0f} s, {scale.time:g} times slower: "
        f"{trace.duration_s * scale.time:.0f} s and the last answer; logs in {folder}"
    )
    answers, cpu = asyncio.run(_serve(fleet, scale, trace, folder, arguments.processes, console))
    simulated = simulate(
        trace.at_rate(1.0 / scale.time),
        scaled_fleet(fleet, scale),
        load_policy(fleet.policy.name, fleet.policy.parameters),
        RunOptions(seed=arguments.seed),
    )
    report = _report(fleet, scale, trace, answers, cpu, simulated)
    _print(Console(highlight=False), report)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({key: report[key] for key in ("valid", "within", "errors", "cpu")}))
    return 3 if not report["valid"] else 0 if report["within"] else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paced", description=__doc__.split("\n")[0])
    parser.add_argument("--fleet", default=str(FLEET), help="a fleet file, or hybrid, dense, small")
    parser.add_argument("--trace", default="", help="trace file or generate:FAMILY; default: generated")
    parser.add_argument("--requests", type=int, default=200, help="the first ones of the trace")
    parser.add_argument(
        "--rate", type=float, default=0.0, help="mean arrivals per second; 0 = the trace's own"
    )
    parser.add_argument("--time-scale", type=float, default=12.0)
    parser.add_argument("--policy", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2, help="that the workers are spread over")
    parser.add_argument("--state-dir", default="", help="logs and configuration; default: a new folder")
    parser.add_argument("--json", default="", help="write all figures here")
    return parser.parse_args()


# ---------------------------------------------------------------- requests


def _trace(arguments: argparse.Namespace, fleet: Fleet) -> Trace:
    if arguments.trace:
        trace = load_trace(arguments.trace, seed=arguments.seed)
        trace = trace.part(0, min(arguments.requests, len(trace))).repaged(fleet.page_size)
    else:
        trace = generated(arguments.requests, arguments.rate or 10.0, fleet.page_size, arguments.seed)
    return trace.at_rate(arguments.rate / trace.rate_per_s) if arguments.rate else trace


def generated(requests: int, rate_per_s: float, block_tokens: int, seed: int) -> Trace:
    """Poisson arrivals, log-normal lengths; half of the prompts begin with one of a dozen shared prefixes."""
    rng = np.random.default_rng(seed)
    prompts = np.clip(rng.lognormal(np.log(5000), 0.9, requests), 64, 32_000).astype(np.int64)
    answers = np.clip(rng.lognormal(np.log(120), 0.6, requests), 4, 600).astype(np.int64)
    blocks, offsets = [], [0]
    for index, length in enumerate(prompts):
        full = int(length) // block_tokens
        own = 1_000_000 + 1_000 * index + np.arange(full)
        if rng.random() < 0.5:
            prefix = int(rng.integers(12))
            shared = min(full, 4 + prefix)
            own[:shared] = 1_000 * prefix + np.arange(shared)
        blocks.append(own)
        offsets.append(offsets[-1] + full)
    return Trace(
        name="generated",
        arrival_s=np.cumsum(rng.exponential(1 / rate_per_s, requests)),
        prompt_tokens=prompts,
        output_tokens=answers,
        block_tokens=block_tokens,
        blocks=np.concatenate(blocks).astype(np.int64),
        block_offsets=np.array(offsets, dtype=np.int64),
    )


async def _serve(
    fleet: Fleet, scale: Scale, trace: Trace, folder: Path, processes: int, console: Console
) -> tuple[list[Answer], CpuUse]:
    model = write_model(folder / "model", fleet.model.context_length)
    config = live_config(fleet, scale, str(model))
    with console.status("starting the fleet") as status:
        async with PacedFleet(config, folder / "run", processes) as live:
            live.measure_cpu()
            client = LoadClient(live.url, fleet.model.name, VOCABULARY, fleet.model.context_length)
            answers = await client.run(
                trace.at_rate(1.0 / scale.time),
                lambda ended, total: status.update(f"{ended} of {total} requests answered"),
            )
            return answers, live.cpu_use()


# ---------------------------------------------------------------- figures


def _live_outcomes(trace: Trace, answers: list[Answer], scale: Scale) -> Outcomes:
    """In seconds of the described fleet."""
    ttft = np.array([a.ttft_s if not a.error else np.nan for a in answers])
    total = np.array([a.total_s if not a.error else np.nan for a in answers])
    tokens = np.array([a.tokens for a in answers], dtype=np.int64)
    sent = np.array([a.sent_s for a in answers])
    with np.errstate(invalid="ignore", divide="ignore"):
        tpot = np.where(tokens > 1, (total - ttft) / (tokens - 1), np.nan)
    return Outcomes(
        arrival_s=trace.arrival_s,
        ttft_s=ttft / scale.time,
        tpot_s=tpot / scale.time,
        end_s=(sent + total) / scale.time,
        output_tokens=tokens,
    )


def _simulated_outcomes(trace: Trace, result: RunResult, scale: Scale) -> Outcomes:
    served = result.state == SERVED
    return Outcomes(
        arrival_s=trace.arrival_s,
        ttft_s=np.where(served, result.ttft_s, np.nan) / scale.time,
        tpot_s=result.tpot_s / scale.time,
        end_s=result.end_s / scale.time,
        output_tokens=result.output_tokens,
    )


def _report(
    fleet: Fleet, scale: Scale, trace: Trace, answers: list[Answer], cpu: CpuUse, result: RunResult
) -> dict[str, Any]:
    live, simulated = _live_outcomes(trace, answers, scale), _simulated_outcomes(trace, result, scale)
    ours, theirs = live.measures(), simulated.measures()
    errors = relative_errors(ours, theirs)
    median, p90 = median_and_p90(errors_by_request(live.ttft_s, simulated.ttft_s))
    failures = Counter(answer.error[:120] for answer in answers if answer.error)
    busiest = max(cpu.shares.values())
    kinds = [sum(answer.placement == place for answer in answers) for place in PLACES]
    return {
        "fleet": fleet.name,
        "policy": fleet.policy.name,
        "trace": trace.name,
        "requests": len(trace),
        "workers": sum(w.count for c in fleet.clusters.values() for w in c.workers.values()),
        "time_scale": scale.time,
        "live": ours,
        "simulated": theirs,
        "errors": errors,
        "ttft_error_by_request": {"median": median, "p90": p90},
        "placements": {
            "live": dict(zip(PLACES, kinds, strict=True)),
            "simulated": {place: int((result.kind == i).sum()) for i, place in enumerate(PLACES)},
        },
        "failures": dict(failures),
        "latest_sent_s": max(answer.late_s for answer in answers),
        "cpu": {
            **{name: round(share, 3) for name, share in cpu.shares.items()},
            "machine": round(cpu.machine_share, 3),
        },
        "valid": busiest <= MOST_CPU and cpu.machine_share <= MOST_CPU and not failures,
        "within": all(abs(errors.get(name, np.inf)) <= WITHIN for name in JUDGED),
    }


def _print(console: Console, report: dict[str, Any]) -> None:
    table = Table(
        "", "live", "simulated", "error", title=f"{report['requests']} requests, {report['workers']} workers"
    )
    for name, value in report["live"].items():
        error = report["errors"].get(name)
        judged = "  ← within 10 %" if name in JUDGED and error is not None and abs(error) <= WITHIN else ""
        judged = judged or ("  ← NOT within 10 %" if name in JUDGED else "")
        table.add_row(
            name,
            f"{value:.4g}",
            f"{report['simulated'].get(name, float('nan')):.4g}",
            ("" if error is None else f"{100 * error:+.1f} %") + judged,
        )
    console.print(table)
    for side, placed in report["placements"].items():
        console.print(f"placements {side}: " + ", ".join(f"{place} {n}" for place, n in placed.items()))
    by_request = report["ttft_error_by_request"]
    console.print(
        f"TTFT error request by request: median {100 * by_request['median']:.1f} %, "
        f"P90 {100 * by_request['p90']:.1f} %"
    )
    console.print(
        "CPU, of a core: " + ", ".join(f"{name} {share:.2f}" for name, share in report["cpu"].items())
    )
    for failure, count in report["failures"].items():
        console.print(f"failed {count} times: {failure}", style="red")
    if not report["valid"]:
        console.print(
            f"INVALID: a process (or the machine) used more than {MOST_CPU:.0%} of its cores, or requests "
            "failed; these figures say how fast this machine is. Raise --time-scale.",
            style="red",
        )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PrfaasError as error:
        sys.exit(f"paced: {error}")

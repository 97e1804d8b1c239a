"""`prfaas demo`, from nothing to the last line."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.status import Status

from launcher.demo import agent_text
from launcher.demo.agent_text import agent_workload
from launcher.demo.client import DemoClient
from launcher.demo.live import LiveTable
from launcher.demo.parity import Greedy, Parity, check_parity
from launcher.demo.records import Record
from launcher.demo.reference import reference_engine
from launcher.demo.summary import print_summary, summarize
from launcher.demo.topology import LINK_NAME, demo_config
from launcher.demo.workload import DEFAULT_REQUESTS, Workload, document_workload
from launcher.model import ensure_model
from launcher.resolve import make_run_dir, resolve, write_config
from launcher.service import ServiceFailed, service_specs
from launcher.supervisor import FleetEvent, Supervisor
from launcher.up import show_event, show_failure, stop_on_signals
from prfaas.config import Config
from prfaas.engine.model_config import LlamaConfig
from prfaas.units import Rate, Seconds

_MOST_NEAR_TIES = 0.02
"""Share of requests; more would hide a mistake behind rounding."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What `prfaas demo` was asked for."""

    link: Rate
    rtt: Seconds
    data: Path | None
    requests: int | None
    seed: int
    json_path: Path | None
    model_dir: Path | None
    state_dir: Path


def run_demo(options: DemoOptions) -> int:
    """Run the demo; 0 if every request was answered as one engine would have."""
    # Stdout, where the last line is the JSON object.
    console = Console(highlight=False)
    model = options.model_dir or _fetch_model(console)
    workload = _workload(options, model)
    cores = sorted(os.sched_getaffinity(0))
    config = resolve(demo_config(model, options.link, options.rtt, cores, options.state_dir))
    return asyncio.run(_demo(config, workload, options, console))


def _fetch_model(console: Console) -> Path:
    with console.status("looking for the model") as status:
        return ensure_model(progress=status.update)


def _workload(options: DemoOptions, model: Path) -> Workload:
    tokenizer = model / "tokenizer.json"
    if options.data is None:
        return document_workload(tokenizer, options.requests or DEFAULT_REQUESTS, options.seed)
    context_length = LlamaConfig.load(model).context_length
    requests = options.requests or agent_text.DEFAULT_REQUESTS
    return agent_workload(options.data, tokenizer, context_length, requests, options.seed)


async def _demo(config: Config, workload: Workload, options: DemoOptions, console: Console) -> int:
    began_s = time.monotonic()
    run_dir = make_run_dir(config.state_dir)
    workers, gateway = service_specs(config, write_config(config, run_dir), run_dir)
    console.print(_introduction(config, workload, run_dir))

    def report(event: FleetEvent) -> None:
        if event.state != "stopping":
            show_event(console, event)

    supervisor = Supervisor(workers, gateway, config.timeouts, restart=False, report=report)
    task = asyncio.create_task(_run(supervisor, config, workload, run_dir, console))
    stop_on_signals(task, supervisor)
    try:
        records, answers, parity = await task
    except asyncio.CancelledError:
        console.print("stopped")
        return 130
    except ServiceFailed as failure:
        show_failure(console, failure)
        return 1
    figures = summarize(records, parity, workload.skipped, time.monotonic() - began_s)
    print_summary(console, records, figures)
    for note in parity.notes:
        console.print(note, style="yellow")
    if options.json_path is not None:
        options.json_path.write_text(json.dumps(_details(figures, records, answers), indent=1) + "\n")
    print(json.dumps(figures), flush=True)
    faithful = parity.different == 0 and parity.near_tie <= _MOST_NEAR_TIES * len(records)
    return 0 if figures["errors"] == 0 and faithful else 1


async def _run(
    supervisor: Supervisor, config: Config, workload: Workload, run_dir: Path, console: Console
) -> tuple[list[Record], list[Greedy], Parity]:
    """Serve the workload, stop the fleet to free its cores, replay on one engine."""
    async with supervisor:
        with console.status("loading the model, then measuring engines and link (about half a minute)"):
            await supervisor.start()
        records, answers = await _serve(supervisor, config, workload, console)
    with console.status("starting the reference engine") as status:
        parity = await _parity(config, answers, run_dir / "reference.log", status)
    return records, answers, parity


async def _serve(
    supervisor: Supervisor, config: Config, workload: Workload, console: Console
) -> tuple[list[Record], list[Greedy]]:
    model = config.model.name or Path(config.model.path).name
    with LiveTable(console, workload.requests) as table:
        client = DemoClient(supervisor.gateway.spec.url, model, lambda: table.update(client.records))
        try:
            await _unless_a_service_dies(supervisor, client.run(workload))
            answered = [record for record in client.records if not record.error]
            prompts = [await client.prompt_token_ids(record) for record in answered]
        finally:
            await client.close()
    answers = [
        Greedy(f"request-{record.number}", prompt, record.token_ids, record.max_tokens)
        for record, prompt in zip(answered, prompts, strict=True)
    ]
    return client.records, answers


async def _unless_a_service_dies(supervisor: Supervisor, work: Any) -> None:
    """Await `work`.

    Raises:
        ServiceFailed: a service died meanwhile.
    """
    working = asyncio.ensure_future(work)
    dying = asyncio.ensure_future(supervisor.wait_for_failure())
    try:
        await asyncio.wait([working, dying], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise dying.result()
        await working
    finally:
        for task in (working, dying):
            task.cancel()
        await asyncio.gather(working, dying, return_exceptions=True)


async def _parity(config: Config, answers: Sequence[Greedy], log_path: Path, status: Status) -> Parity:
    model = Path(config.model.path)
    engine = reference_engine(model, sorted(os.sched_getaffinity(0)), log_path)
    try:
        await engine.start()

        def progress(done: int) -> None:
            status.update(f"comparing with one engine: {done} of {len(answers)} answers")

        progress(0)
        return await check_parity(engine, answers, LlamaConfig.load(model).eos_token_ids, progress)
    finally:
        await engine.stop()


def _introduction(config: Config, workload: Workload, run_dir: Path) -> str:
    link = config.links[LINK_NAME]
    lines = [f"[bold]{workload.requests} requests[/] over two clusters; logs in {run_dir}"]
    for name, cluster in config.clusters.items():
        workers = ", ".join(f"{w} (cores {','.join(map(str, c.cpus))})" for w, c in cluster.workers.items())
        lines.append(f"  {name:<7} {workers}")
    lines.append(
        f"  {LINK_NAME:<7} emulated, {link.capacity * 8 / 1e6:g} Mbit/s, {1e3 * link.rtt:g} ms round trip"
    )
    lines.append("Each request goes where it costs least: seconds to first token + delay of others.")
    return "\n".join(lines)


def _details(figures: dict[str, Any], records: Sequence[Record], answers: Sequence[Greedy]) -> dict[str, Any]:
    """The figures and every request with its decision, for `--json`."""
    prompts = {answer.name: answer.prompt_ids for answer in answers}
    return {
        "figures": figures,
        "requests": [
            {
                "number": record.number,
                "work": record.work,
                "error": record.error,
                "text": record.text,
                "token_ids": record.token_ids,
                "prompt_token_ids": prompts.get(f"request-{record.number}", []),
                "client_ttft_s": record.ttft_s,
                "decision": msgspec.to_builtins(record.decision),
            }
            for record in records
        ],
    }

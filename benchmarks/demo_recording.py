"""The demo's requests on real engines, with decision log and journal: what fidelity is measured against."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from launcher.demo.client import DemoClient
from launcher.demo.topology import demo_config
from launcher.demo.workload import Workload, document_workload
from launcher.model import ensure_model
from launcher.resolve import make_run_dir, resolve, write_config
from launcher.service import service_specs
from launcher.supervisor import Supervisor
from prfaas.errors import PrfaasError
from prfaas.units import Rate, Seconds

_LINK, _RTT = Rate.parse("200Mbit"), Seconds.parse("40ms")


@dataclass(frozen=True, slots=True)
class Recording:
    """Files of one run."""

    decisions: Path
    journal: Path
    errors: int


def record_demo(
    requests: int, seed: int, state_dir: Path, progress: Callable[[str], None] = lambda text: None
) -> Recording:
    """Run the demo's fleet and workload; minutes.

    Raises:
        ServiceFailed: a service died.
        ModelFetchError: the model cannot be fetched here.
    """
    model = ensure_model(progress=progress)
    workload = document_workload(model / "tokenizer.json", requests, seed)
    cores = sorted(os.sched_getaffinity(0))
    config = demo_config(model, _LINK, _RTT, cores, state_dir)
    run_dir = make_run_dir(config.state_dir)
    decisions, journal = run_dir / "decisions.jsonl", run_dir / "journal.jsonl"
    gateway = msgspec.structs.replace(config.gateway, decision_log=str(decisions), journal=str(journal))
    config = resolve(msgspec.structs.replace(config, gateway=gateway))
    workers, gateway_spec = service_specs(config, write_config(config, run_dir), run_dir)
    supervisor = Supervisor(workers, gateway_spec, config.timeouts, restart=False)
    errors = asyncio.run(_serve(supervisor, workload, Path(config.model.path).name, progress))
    return Recording(decisions, journal, errors)


async def _serve(
    supervisor: Supervisor, workload: Workload, model: str, progress: Callable[[str], None]
) -> int:
    async with supervisor:
        progress("starting the demo's fleet")
        await supervisor.start()

        def show() -> None:
            ended = sum(record.state in ("done", "error") for record in client.records)
            progress(f"{ended} of {workload.requests} requests answered")

        client = DemoClient(supervisor.gateway.spec.url, model, show)
        serving = asyncio.ensure_future(client.run(workload))
        dying = asyncio.ensure_future(supervisor.wait_for_failure())
        try:
            await asyncio.wait([serving, dying], return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                raise dying.result()
            await serving
        finally:
            for task in (serving, dying):
                task.cancel()
            await asyncio.gather(serving, dying, return_exceptions=True)
            await client.close()
    errors = [record.error for record in client.records if record.error]
    if len(errors) == len(client.records):
        raise PrfaasError(f"no request was answered; the first error: {errors[0] if errors else 'none sent'}")
    return len(errors)

"""`prfaas up`: one fleet on one machine, running until it is told to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from launcher.resolve import make_run_dir, resolve, write_config
from launcher.service import ServiceFailed, service_specs
from launcher.supervisor import FleetEvent, Supervisor
from prfaas.config import Config

STATE_STYLES = {"ready": "green", "died": "red", "killed": "red", "restarting": "yellow"}


def run_up(config: Config, flags: Sequence[str]) -> int:
    """Run the fleet until SIGINT or SIGTERM; returns the exit code. A second signal kills at once."""
    return asyncio.run(_up(resolve(config), flags))


async def _up(config: Config, flags: Sequence[str]) -> int:
    console = Console(stderr=True, highlight=False)
    run_dir = make_run_dir(config.state_dir)
    workers, gateway = service_specs(config, write_config(config, run_dir), run_dir, flags)
    supervisor = Supervisor(
        workers, gateway, config.timeouts, restart=True, report=lambda event: show_event(console, event)
    )
    console.print(f"logs and resolved configuration: {run_dir}", soft_wrap=True)
    async with supervisor:
        model = config.model.name or Path(config.model.path).name
        serving = asyncio.create_task(_serve(supervisor, model, console))
        stop_on_signals(serving, supervisor)
        try:
            await serving
        except asyncio.CancelledError:
            console.print("stopping: running requests may finish; a second Ctrl-C kills")
        except ServiceFailed as failure:
            show_failure(console, failure)
            return 1
    return 0


async def _serve(supervisor: Supervisor, model: str, console: Console) -> None:
    with console.status("loading the model, then measuring engines and links (about half a minute)"):
        await supervisor.start()
    url = supervisor.gateway.spec.url
    console.print(f"[bold green]   serving[/]  {model:<12} {url}/v1", soft_wrap=True)
    console.print(f"every placement and why: {url}/debug/decisions", soft_wrap=True)
    console.print("Ctrl-C lets running requests finish, then stops everything")
    await supervisor.wait_for_failure()


def stop_on_signals(task: asyncio.Task[Any], supervisor: Supervisor) -> None:
    """The first SIGINT or SIGTERM cancels `task`, the next kills every service."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if task.cancelling() or task.done():
            supervisor.kill()
        else:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)


def show_event(console: Console, event: FleetEvent) -> None:
    """One line for one change of state of one service."""
    style = STATE_STYLES.get(event.state, "dim")
    console.print(f"[{style}]{event.state:>10}[/]  {event.service:<12} [dim]{event.detail}[/]")


def show_failure(console: Console, failure: ServiceFailed) -> None:
    """Why the fleet gives up, with the service's last words."""
    for line in failure.tail:
        console.print(f"  {line}", markup=False, style="dim", soft_wrap=True)
    console.print(f"prfaas: {failure}", style="red", markup=False, soft_wrap=True)

"""The supervisor over real processes: small HTTP services that stand where workers and the gateway would."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.resolve import resolve
from launcher.service import ServiceFailed, ServiceSpec
from launcher.supervisor import Backoff, FleetEvent, Supervisor
from prfaas.config import ClusterConfig, Config, GatewayConfig, ModelConfig, TimeoutsConfig, WorkerConfig
from prfaas.units import Seconds

pytestmark = pytest.mark.process

SERVICE = """
import http.server, os, signal, subprocess, sys, time
port, folder, name, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
def note(what):
    with open(folder + "/journal", "a") as file:
        file.write(f"{time.monotonic()} {name} {what} {os.getpid()} {grandchild.pid}\\n")
def stop(*_):
    note("sigterm")
    if mode == "stubborn":
        return
    grandchild.kill()
    note("ends")
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
note("started")
if mode == "broken":
    print("cannot open the model")
    os._exit(3)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if mode != "unready" else 503)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class Playground:
    """Specs of fake services in a folder, and what they noted there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "service.py").write_text(SERVICE)
        workers = {"w-0": WorkerConfig(role="decode"), "w-1": WorkerConfig(role="prefill")}
        config = resolve(
            Config(
                model=ModelConfig(path="m"),
                clusters={"pd": ClusterConfig(kind="pd", workers=workers)},
                gateway=GatewayConfig(port=0),
            )
        )
        named = config.clusters["pd"].workers
        self.ports = {"gateway": config.gateway.port, **{name: worker.port for name, worker in named.items()}}

    def spec(self, name: str, mode: str = "plain") -> ServiceSpec:
        port = self.ports[name]
        command = (sys.executable, str(self.folder / "service.py"), str(port), str(self.folder), name, mode)
        return ServiceSpec(name, command, f"http://127.0.0.1:{port}", self.folder / f"{name}.log")

    def journal(self) -> list[tuple[str, str]]:
        """(service, what) in order of time."""
        return [(line[1], line[2]) for line in self._lines()]

    def pids(self) -> set[int]:
        """Every process that a service has noted, grandchildren included."""
        return {int(pid) for line in self._lines() for pid in line[3:5]}

    def _lines(self) -> list[list[str]]:
        path = self.folder / "journal"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return sorted(lines, key=lambda line: float(line[0]))


@pytest.fixture
def playground(tmp_path: Path) -> Iterator[Playground]:
    place = Playground(tmp_path)
    yield place
    left = running(place.pids())
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"processes left behind: {left}"


def running(pids: set[int]) -> set[int]:
    """Those of `pids` that run, zombies not counted, after they have had a moment to end."""
    deadline_s = time.monotonic() + 5
    while left := {pid for pid in pids if _state(pid) not in {"", "Z", "X"}}:
        if time.monotonic() > deadline_s:
            return left
        time.sleep(0.02)
    return set()


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def timeouts(**seconds: float) -> TimeoutsConfig:
    return TimeoutsConfig(**{name: Seconds(value) for name, value in seconds.items()})


def supervisor(
    place: Playground,
    *,
    restart: bool = False,
    report: Callable[[FleetEvent], None] = lambda event: None,
    **modes: str,
) -> Supervisor:
    modes = {name.replace("_", "-"): mode for name, mode in modes.items()}
    return Supervisor(
        [place.spec(name, modes.get(name, "plain")) for name in ("w-0", "w-1")],
        place.spec("gateway", modes.get("gateway", "plain")),
        timeouts(start=10, drain=3),
        restart=restart,
        report=report,
        backoff=Backoff(first_s=0.05),
    )


async def test_workers_start_before_the_gateway_and_stop_after_it(playground: Playground) -> None:
    async with supervisor(playground) as fleet:
        await fleet.start()
    journal = playground.journal()
    assert [what for name, what in journal if name == "gateway"] == ["started", "sigterm", "ends"]
    assert max(journal.index((name, "started")) for name in ("w-0", "w-1")) < journal.index(
        ("gateway", "started")
    )
    assert journal.index(("gateway", "ends")) < min(
        journal.index((name, "sigterm")) for name in ("w-0", "w-1")
    )


async def test_a_service_that_dies_at_start_is_named_with_its_last_words(playground: Playground) -> None:
    async with supervisor(playground, w_1="broken") as fleet:
        with pytest.raises(ServiceFailed) as caught:
            await fleet.start()
    assert caught.value.name == "w-1"
    assert "exit status 3" in str(caught.value)
    assert caught.value.tail[-1] == "cannot open the model"


async def test_a_service_that_never_becomes_ready_fails_at_its_deadline(playground: Playground) -> None:
    fleet = Supervisor(
        [playground.spec("w-0", "unready")], playground.spec("gateway"), timeouts(start=0.5), restart=False
    )
    async with fleet:
        with pytest.raises(ServiceFailed, match="was not ready after"):
            await fleet.start()


async def test_a_death_without_restarts_is_reported_once(playground: Playground) -> None:
    async with supervisor(playground) as fleet:
        await fleet.start()
        victim = fleet.workers[0].pid
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        failure = await asyncio.wait_for(fleet.wait_for_failure(), 10)
    assert failure.name == "w-0"
    assert "SIGKILL" in str(failure)


async def test_a_dead_worker_comes_back_counted_and_its_children_are_gone(playground: Playground) -> None:
    events: list[FleetEvent] = []
    back = asyncio.Event()

    def report(event: FleetEvent) -> None:
        events.append(event)
        if [e.state for e in events if e.service == "w-0"].count("ready") == 2:
            back.set()

    async with supervisor(playground, restart=True, report=report) as fleet:
        await fleet.start()
        victim = fleet.workers[0].pid
        assert victim is not None
        before = playground.pids()
        os.kill(victim, signal.SIGKILL)
        await asyncio.wait_for(back.wait(), 10)
        assert fleet.restarts == {"w-0": 1}
        assert fleet.workers[0].pid != victim
        assert len(before - running(before)) == 2
    states = [event.state for event in events if event.service == "w-0"]
    assert states[:5] == ["starting", "ready", "died", "restarting", "starting"]


async def test_a_service_deaf_to_sigterm_is_killed_after_the_drain_time(playground: Playground) -> None:
    states: list[str] = []
    fleet = Supervisor(
        [playground.spec("w-0", "stubborn")],
        playground.spec("gateway"),
        timeouts(start=10, drain=0.1),
        restart=False,
        report=lambda event: states.append(f"{event.service} {event.state}"),
    )
    async with fleet:
        await fleet.start()
        fleet_stop = asyncio.create_task(fleet.stop())
        for _ in range(250):
            if ("w-0", "sigterm") in playground.journal():
                break
            await asyncio.sleep(0.02)
        assert fleet.workers[0].returncode is None
        await fleet_stop
    assert "w-0 killed" in states
    assert "gateway stopped" in states


PARENT = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_launcher_supervisor import Playground, supervisor
async def main():
    fleet = supervisor(Playground(Path(sys.argv[1])))
    await fleet.start()
    print("up", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def test_kill_9_of_the_parent_leaves_no_child(playground: Playground) -> None:
    command = [sys.executable, "-c", PARENT, str(playground.folder), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "up\n"
        services = {int(line[3]) for line in playground._lines()}
        assert len(services) == 3
        parent.kill()
    assert not running(services)
    # The fake grandchildren have no death signal of their own; real runner processes do.
    for pid in playground.pids() - services:
        os.kill(pid, signal.SIGKILL)

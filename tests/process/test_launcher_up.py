"""`prfaas up` with real workers and a small random model: it serves, and it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launcher.resolve import resolve
from prfaas.config import Config
from prfaas.config_load import dump, loads

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

FLEET = """
model: {{path: {model}, name: tiny}}
clusters:
  pd:
    kind: pd
    workers:
      decode-0: {{role: decode, memory: 8MiB}}
  prfaas:
    kind: prefill
    workers:
      remote-0: {{role: prefill, memory: 8MiB}}
links:
  wan: {{between: [pd, prfaas], capacity: 200Mbit, rtt: 10ms, emulate: true}}
gateway: {{port: 0, calibrate: false}}
timeouts: {{drain: 5s}}
state_dir: {state}
"""
_READY_TIMEOUT_S = 120.0
_GONE_TIMEOUT_S = 15.0


@pytest.fixture
def fleet(tiny_model_path: Path, tmp_path: Path) -> Config:
    return resolve(loads(FLEET.format(model=tiny_model_path, state=tmp_path / "runs"), {}))


@contextmanager
def running_fleet(config: Config, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`prfaas up`, ready to serve; killed at the end if it still runs."""
    path = folder / "cluster.yaml"
    path.write_text(dump(config))
    with (folder / "up.log").open("wb") as log:
        command = [sys.executable, "-m", "launcher", "up", "-c", str(path)]
        process = subprocess.Popen(command, stdout=log, stderr=log, process_group=0)
    try:
        _wait_ready(config, process, folder / "up.log")
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _wait_ready(config: Config, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        assert process.poll() is None, log.read_text()
        if "serving" in log.read_text():
            return
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def children_of(pid: int) -> set[int]:
    """Every descendant of `pid`."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in {pid, *found}} - found:
        found |= more
    return found


def left_of(pids: set[int]) -> set[int]:
    """Those that still run after they have had time to end."""
    deadline_s = time.monotonic() + _GONE_TIMEOUT_S
    while time.monotonic() < deadline_s:
        left = {pid for pid in pids if _is_running(pid)}
        if not left:
            return set()
        time.sleep(0.05)
    return left


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def complete(config: Config, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{config.gateway.port}/v1/completions",
        json.dumps({"model": "tiny", "max_tokens": 4, "temperature": 0, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        result: dict[str, Any] = json.load(answer)
    return result


def test_the_fleet_serves_and_sigterm_stops_everything(fleet: Config, tmp_path: Path) -> None:
    with running_fleet(fleet, tmp_path) as process:
        answer = complete(fleet, prompt=[5, 6, 7, 8] * 20)
        assert answer["usage"]["prompt_tokens"] == 80
        family = children_of(process.pid)
        assert len(family) >= 5  # gateway, two control processes, two runners
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert not left_of(family)
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert {path.name for path in run_dir.iterdir()} >= {
        "config.yaml", "decode-0.log", "remote-0.log", "gateway.log",
    }  # fmt: skip


def test_a_worker_killed_with_its_runner_comes_back_and_the_fleet_serves_again(
    fleet: Config, tmp_path: Path
) -> None:
    with running_fleet(fleet, tmp_path) as process:
        complete(fleet, prompt=[5, 6, 7, 8] * 20)
        victim = _pid_of_worker(process.pid, "decode-0")
        victims = {victim, *children_of(victim)}
        os.kill(victim, signal.SIGKILL)
        assert not left_of(victims)
        assert _eventually_completes(fleet)
        family = children_of(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert not left_of(family)


def _pid_of_worker(parent: int, name: str) -> int:
    for pid in children_of(parent):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"worker" in arguments and name.encode() in arguments:
            return pid
    raise AssertionError(f"no process runs {name}")


def _eventually_completes(config: Config) -> bool:
    deadline_s = time.monotonic() + _READY_TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            return bool(complete(config, prompt=[9, 8, 7] * 10)["choices"])
        except OSError:  # 503 while the only decode worker is away
            time.sleep(0.3)
    return False


def test_kill_9_of_the_parent_leaves_no_orphan(fleet: Config, tmp_path: Path) -> None:
    with running_fleet(fleet, tmp_path) as process:
        family = children_of(process.pid)
        assert len(family) >= 5
        process.kill()
        process.wait(10)
    assert not left_of(family)

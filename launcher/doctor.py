"""`prfaas doctor`: check what a fleet needs from this machine and say how to mend what fails."""

from __future__ import annotations

import errno
import json
import os
import platform
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher.policy_check import check_policy
from prfaas.config import Config, PolicyConfig, WorkerConfig
from prfaas.config_load import load
from prfaas.engine.chat_template import ChatTemplate
from prfaas.engine.model_config import LlamaConfig
from prfaas.errors import ConfigError

MIN_PYTHON = (3, 11)
MIN_OPEN_FILES = 1024
_PROBE_TIMEOUT_S = 60.0
_CGROUP = Path("/sys/fs/cgroup")
_NO_CONFIG_MEMORY_BYTES = 3 * 2**30
"""Three pools of 1 GiB: what the demo maps."""
_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at."""

    name: str
    status: str
    """`ok`, `warn` (works, perhaps badly) or `fail`."""
    found: str
    mend: str = ""


def run_doctor(config_path: Path | None, *, as_json: bool) -> int:
    """Print every check; 0 unless one failed, then 1."""
    checks = list(all_checks(config_path))
    if as_json:
        print(json.dumps({"ok": _all_passed(checks), "checks": [asdict(check) for check in checks]}))
    else:
        _print_table(checks)
    return 0 if _all_passed(checks) else 1


def all_checks(config_path: Path | None) -> Iterator[Check]:
    """Every check of the machine and, where a configuration is given, of what it asks for."""
    yield check_python()
    yield check_cpus()
    config, config_check = _load_config(config_path)
    if config_check:
        yield config_check
    local = local_workers(config) if config else None
    yield check_memory(local)
    yield check_memfd(local)
    yield check_open_files()
    yield from check_nixl()
    yield check_devices()
    if config is not None:
        yield check_policy_name(config.policy)
        yield check_model(Path(config.model.path))
        yield from check_ports(config)


def _load_config(path: Path | None) -> tuple[Config | None, Check | None]:
    if path is None:
        return None, None
    try:
        config = load(path)
    except ConfigError as error:
        return None, Check("configuration", "fail", str(error), "docs/configuration.md lists every field")
    workers = sum(len(cluster.workers) for cluster in config.clusters.values())
    return config, Check("configuration", "ok", f"{len(config.clusters)} clusters, {workers} workers")


# ---------------------------------------------------------------- machine


def check_python() -> Check:
    found = f"{platform.python_implementation()} {platform.python_version()} on {sys.platform}"
    if sys.version_info < MIN_PYTHON:
        return Check("python", "fail", found, "install Python 3.11 or newer")
    if sys.platform != "linux":
        return Check("python", "fail", found, "workers need Linux (memfd, NIXL)")
    return Check("python", "ok", found)


def check_cpus() -> Check:
    cores = len(os.sched_getaffinity(0))
    found = f"{cores} cores"
    quota = _cpu_quota()
    if quota is not None and quota < cores:
        mend = "raise the container's CPU quota or pin fewer cores: throttled engines miss deadlines"
        return Check("cpus", "warn", f"{found}, quota {quota:.1f}", mend)
    if cores < 2:
        return Check("cpus", "warn", found, "the demo wants two cores; on one all workers share it")
    return Check("cpus", "ok", found)


def _cpu_quota() -> float | None:
    """Cores' worth of CPU time this control group may use; None = no limit."""
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def local_workers(config: Config) -> list[WorkerConfig]:
    """Workers whose address is one of this machine's."""
    workers = [worker for cluster in config.clusters.values() for worker in cluster.workers.values()]
    return [worker for worker in workers if _is_here(worker.host)]


def _is_here(host: str) -> bool:
    """Whether an address can be bound here; a name that cannot be resolved is left to `check_port`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.bind(address)
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL
    return True


def check_memory(workers: Sequence[WorkerConfig] | None) -> Check:
    """KV pools (mapped in full, filled as they are used) against memory that is free now.

    Args:
        workers: those on this machine; None = without a configuration.
    """
    if workers == []:
        return Check("memory", "ok", "none of the workers has an address of this machine")
    wanted = _NO_CONFIG_MEMORY_BYTES if workers is None else sum(worker.memory for worker in workers)
    whose = "the demo's pools" if workers is None else "pools of the workers here"
    available = _available_bytes()
    found = f"{available / 2**30:.1f} GiB free, {whose} may fill {wanted / 2**30:.1f} GiB"
    if available < wanted:
        return Check("memory", "fail", found, "lower `memory` of the workers, or free memory")
    return Check("memory", "ok", found)


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        return min(available, limit - int((_CGROUP / "memory.current").read_text()))
    except (OSError, ValueError):  # no control group, or its limit is `max`
        return available


def check_memfd(workers: Sequence[WorkerConfig] | None) -> Check:
    """The KV pool is a memfd: it must be possible to make one of the largest size asked for."""
    size = max((int(worker.memory) for worker in workers or ()), default=2**30)
    try:
        descriptor = os.memfd_create("prfaas-doctor")
        try:
            os.ftruncate(descriptor, size)
        finally:
            os.close(descriptor)
    except OSError as error:
        mend = "raise `ulimit -f`; a sandbox must allow memfd_create"
        return Check("shared memory", "fail", f"a memfd of {size / 2**30:.1f} GiB: {error}", mend)
    return Check("shared memory", "ok", f"memfd of {size / 2**30:.1f} GiB")


def check_open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_OPEN_FILES:
        return Check("open files", "warn", f"limit {soft}", f"ulimit -n {min(4 * MIN_OPEN_FILES, hard)}")
    return Check("open files", "ok", f"limit {soft}")


# ---------------------------------------------------------------- NIXL


def check_nixl() -> list[Check]:
    """Import NIXL, list its back ends and move 64 KiB between two agents, in a process of its own."""
    try:
        done = _run_probe()
        found = json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else None
    except subprocess.TimeoutExpired:
        return [Check("nixl", "fail", f"no answer within {_PROBE_TIMEOUT_S:.0f} s", _NIXL_MEND)]
    except (ValueError, IndexError):
        found = None
    if found is None:
        last_words = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return [Check("nixl", "fail", last_words[0], _NIXL_MEND)]
    backends = ", ".join(found["plugins"])
    checks = [Check("nixl", "ok", f"{found['module']} {found['version']}, back ends: {backends}")]
    if "UCX" not in found["plugins"]:
        return [*checks, Check("ucx", "fail", "back end missing", _NIXL_MEND)]
    moved = f"64 KiB between two agents in {1e3 * found['transfer_s']:.1f} ms over {found['transports']}"
    if not found["intact"]:
        return [*checks, Check("ucx", "fail", "bytes arrived changed", _NIXL_MEND)]
    return [*checks, Check("ucx", "ok", moved)]


def _run_probe() -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "launcher.nixl_probe"]
    return subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False)


_NIXL_MEND = (
    "pip install -c constraints.txt 'prfaas[worker]'; docs/dependencies.md names versions that work together"
)


def check_devices() -> Check:
    """Network interfaces UCX can use, RDMA devices first."""
    rdma = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    interfaces = sorted(name for _, name in socket.if_nameindex())
    found = f"RDMA: {', '.join(rdma) or 'none'}; network: {', '.join(interfaces)}"
    chosen = os.environ.get("UCX_NET_DEVICES", "")
    unknown = [
        name for name in chosen.split(",") if name.partition(":")[0] not in {*interfaces, *rdma, "", "all"}
    ]
    if unknown:
        return Check(
            "devices", "fail", f"{found}; UCX_NET_DEVICES={chosen}", f"no such device: {', '.join(unknown)}"
        )
    return Check("devices", "ok", f"{found}; UCX_NET_DEVICES={chosen or 'unset: each worker chooses'}")


# ---------------------------------------------------------------- configuration


def check_policy_name(policy: PolicyConfig) -> Check:
    try:
        check_policy(policy)
    except ConfigError as error:
        return Check("policy", "fail", str(error), "README.md, Write a policy")
    return Check("policy", "ok", policy.name)


def check_model(folder: Path) -> Check:
    """The files that a gateway and a worker read, and whether the engine can compute this model."""
    needed: dict[str, Callable[[], bool]] = {
        "config.json": (folder / "config.json").is_file,
        "tokenizer.json": (folder / "tokenizer.json").is_file,
        "*.safetensors": lambda: any(folder.glob("*.safetensors")),
    }
    missing = [name for name, present in needed.items() if not present()]
    if missing:
        mend = "give an HF folder as model.path, or run `prfaas model` for the small one"
        return Check("model", "fail", f"{folder} lacks {', '.join(missing)}", mend)
    try:
        LlamaConfig.load(folder)
        template = ChatTemplate.load(folder)
    except ConfigError as error:
        return Check(
            "model", "fail", str(error), "choose a model that the engine supports: README.md, Limits"
        )
    if template is None:
        mend = "add chat_template.jinja; without it only /v1/completions can be served"
        return Check("model", "warn", f"{folder} has no chat template", mend)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return Check("model", "ok", f"{folder}, weights {size / 2**20:.0f} MiB")


def check_ports(config: Config) -> Iterator[Check]:
    """Whether the fixed ports on this machine's addresses are free."""
    endpoints = [("gateway", config.gateway.host, config.gateway.port)]
    for cluster in config.clusters.values():
        endpoints += [(name, worker.host, worker.port) for name, worker in cluster.workers.items()]
    for name, host, port in endpoints:
        if port:
            yield check_port(name, host, port)


def check_port(name: str, host: str, port: int) -> Check:
    label, found = f"port of {name}", f"{host}:{port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return Check(label, "ok", f"{found} is another machine's: not checked")
        mend = "stop what listens there (`ss -ltnp`), or choose another port; `prfaas up` takes port 0"
        return Check(label, "fail", f"{found}: {error.strerror or error}", mend)
    return Check(label, "ok", f"{found} is free")


def _all_passed(checks: list[Check]) -> bool:
    return all(check.status != "fail" for check in checks)


def _print_table(checks: list[Check]) -> None:
    """One line per check; what to do stands below those that need it."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for check in checks:
        style = _STYLES[check.status]
        found = Text(check.found)
        if check.mend:
            found.append(f"\n→ {check.mend}", style=style)
        table.add_row(Text(check.status, style=f"bold {style}"), check.name, found)
    console = Console(highlight=False)
    console.print(table)
    failed = sum(check.status == "fail" for check in checks)
    console.print(f"{failed} of {len(checks)} checks failed" if failed else "ready", style="bold")

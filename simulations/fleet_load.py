"""Read and check a fleet file. Every error names the file, the field by its path, and what to do."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from prfaas.config_check import check_links, check_roles
from prfaas.config_load import convert, dump, parse_mapping, read_text, suggest
from prfaas.errors import ConfigError
from prfaas.units import Rate
from router.core.config import SchedulerConfig
from simulations.fleet import SLO, Fleet, HardwareSpec, ScheduledChange, SimCluster, SimWorkers
from simulations.hardware.profiles import hardware_of, step_times
from simulations.workload.trace import Trace

_FLEETS = Path(__file__).resolve().parent / "fleets"
_TOP = "`name`, `model` and `clusters`"


def shipped_fleets() -> list[str]:
    """Names of the fleets that come with the project."""
    return sorted(path.stem for path in _FLEETS.glob("*.yaml"))


def load_fleet(path_or_name: str | os.PathLike[str]) -> Fleet:
    """The checked fleet in a file, or a shipped one by its name (`hybrid`, `dense`, `small`).

    Raises:
        ConfigError: unreadable, misspelt, of a wrong type, or contradictory.
    """
    path = Path(path_or_name)
    name = str(path_or_name)
    if name in shipped_fleets() and not path.is_file():
        path = _FLEETS / f"{name}.yaml"
    elif not path.exists() and os.sep not in name and not path.suffix:
        raise ConfigError(
            f"there is no fleet `{name}`{suggest(name, shipped_fleets())}; or give a file's path"
        )
    return loads_fleet(read_text(path), str(path))


def loads_fleet(text: str, source: str = "fleet") -> Fleet:
    """Like `load_fleet`, from YAML text; `source` names it in errors."""
    tree = parse_mapping(text, source, _TOP)
    try:
        fleet: Fleet = convert(Fleet, tree)
        check_fleet(fleet)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    return fleet


def dump_fleet(fleet: Fleet) -> str:
    """YAML text that `loads_fleet` turns into an equal fleet."""
    return dump(fleet)


def worker_names(group: str, workers: SimWorkers) -> list[str]:
    """Names of the instances of a group, as the live configuration writes a `count` out."""
    return [group] if workers.count == 1 else [f"{group}-{index}" for index in range(workers.count)]


def check_fits(fleet: Fleet, trace: Trace) -> None:
    """Refuse a trace with a request that no decode worker of the fleet can hold.

    Raises:
        ConfigError: naming the first such request, its tokens, and the largest pool.
    """
    prompts, answers = trace.prompt_tokens, trace.output_tokens
    limit = fleet.model.context_length
    too_long = np.flatnonzero(prompts >= limit)
    if len(too_long):
        first = int(too_long[0])
        raise ConfigError(
            f"fleet {fleet.name}: request {first} of {trace.name} has {prompts[first]} prompt tokens, and "
            f"`model.context_length` is {limit}: no room for an answer"
        )
    path, pool_tokens = max(_decode_pools(fleet), key=lambda pool: pool[1])
    needed = -(-(prompts + answers) // fleet.page_size) * fleet.page_size
    too_large = np.flatnonzero(needed > pool_tokens)
    if len(too_large):
        first = int(too_large[0])
        raise ConfigError(
            f"fleet {fleet.name}: request {first} of {trace.name} needs KV pages for {needed[first]} tokens "
            f"({prompts[first]} prompt, {answers[first]} answer), and the largest decode worker, `{path}`, "
            f"holds {pool_tokens}; raise `kv_tokens` of its hardware, or drop such requests"
        )


def _decode_pools(fleet: Fleet) -> Iterator[tuple[str, int]]:
    for path, workers in _groups(fleet):
        if workers.role == "decode":
            tokens = hardware_of(fleet, workers).kv_tokens
            yield path, tokens // fleet.page_size * fleet.page_size


def check_fleet(fleet: Fleet) -> None:
    """Refuse a fleet whose parts contradict each other, or whose hardware is unknown.

    Raises:
        ConfigError: naming the first field at fault and what to do.
    """
    _check_numbers(fleet)
    _check_clusters(fleet)
    for path, workers in _groups(fleet):
        _check_workers(fleet, path, workers)
    for name, spec in fleet.hardware.items():
        _check_hardware(f"hardware.{name}", spec, fleet.page_size)
        if not spec.table:  # a table that no worker uses need not be there
            step_times(spec, name)
    for name, machine in fleet.machines.items():
        _require(f"machines.{name}.beside_prefill", machine.beside_prefill, 0.0, 100.0)
        _require(f"machines.{name}.beside_decode", machine.beside_decode, 0.0, 100.0)
    check_links({name: cluster.kind for name, cluster in fleet.clusters.items()}, fleet.links)
    _check_slo(fleet.slo)
    for index, change in enumerate(fleet.schedule):
        _check_change(fleet, f"schedule[{index}]", change)
    convert_scheduler(fleet)


def convert_scheduler(fleet: Fleet) -> SchedulerConfig:
    """The scheduler's settings of a fleet.

    Raises:
        ConfigError: an unknown field, or one of a wrong type.
    """
    known = SchedulerConfig.__struct_fields__
    for name in fleet.scheduler:
        if name not in known:
            raise ConfigError(f"unknown field `scheduler.{name}`{suggest(str(name), known)}")
    try:
        return msgspec.convert(fleet.scheduler, SchedulerConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"`scheduler`: {error}") from error


def _groups(fleet: Fleet) -> Iterator[tuple[str, SimWorkers]]:
    for cluster_name, cluster in fleet.clusters.items():
        for name, workers in cluster.workers.items():
            yield f"clusters.{cluster_name}.workers.{name}", workers


def _check_numbers(fleet: Fleet) -> None:
    if not fleet.name:
        raise ConfigError("`name` is empty")
    for path, value in (
        ("model.layers", fleet.model.layers),
        ("model.kv_bytes_per_token", fleet.model.kv_bytes_per_token),
        ("model.context_length", fleet.model.context_length),
        ("page_size", fleet.page_size),
    ):
        _require(path, value, 1, 2**40)
    _require("model.state_bytes", fleet.model.state_bytes, 0, 2**50)
    _require("status_period", fleet.status_period, 1e-3, 3600.0)
    _require("event_delay", fleet.event_delay, 0.0, 3600.0)


def _require(path: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"`{path}` must be {low:g} … {high:g}, got {value}")


def _check_clusters(fleet: Fleet) -> None:
    if not any(cluster.kind == "pd" for cluster in fleet.clusters.values()):
        raise ConfigError("`clusters` has no cluster of kind pd: there are no decode workers")
    owner: dict[str, str] = {}
    for name, cluster in fleet.clusters.items():
        check_roles(name, cluster.kind, {group: workers.role for group, workers in cluster.workers.items()})
        _check_local_rate(name, cluster)
        for group, workers in cluster.workers.items():
            _require(f"clusters.{name}.workers.{group}.count", workers.count, 1, 100_000)
            for worker in worker_names(group, workers):
                if worker in owner:
                    raise ConfigError(
                        f"worker {worker} is in clusters {owner[worker]} and {name}; names must be unique"
                    )
                owner[worker] = name


def _check_local_rate(name: str, cluster: SimCluster) -> None:
    try:
        rate = Rate.parse(cluster.local_rate)
    except ValueError as error:
        raise ConfigError(f"`clusters.{name}.local_rate`: {error}") from error
    if not 0 < rate < math.inf:
        raise ConfigError(f"`clusters.{name}.local_rate` must be above 0")


def _check_workers(fleet: Fleet, path: str, workers: SimWorkers) -> None:
    _require(f"{path}.max_running", workers.max_running, 1, 1_000_000)
    _require(f"{path}.max_queue", workers.max_queue, 1, 100_000_000)
    if workers.machine is not None and workers.machine not in fleet.machines:
        raise ConfigError(
            f"`{path}.machine` is {workers.machine}, which is none of `machines`"
            f"{suggest(workers.machine, fleet.machines)}"
        )
    try:
        spec = hardware_of(fleet, workers)
        step_times(spec, workers.hardware)
    except ConfigError as error:
        raise ConfigError(f"`{path}.hardware`: {error}") from error
    _check_hardware(f"{path}.hardware", spec, fleet.page_size)


def _check_hardware(path: str, spec: HardwareSpec, page_size: int) -> None:
    _require(f"{path}.chunk_tokens", spec.chunk_tokens, 1, 2**30)
    if spec.kv_tokens < page_size:
        raise ConfigError(f"`{path}.kv_tokens` is {spec.kv_tokens}: less than one page of {page_size} tokens")
    _require(f"{path}.kv_tokens", spec.kv_tokens, 1, 2**50)
    for field in ("prefill_scale", "decode_scale"):
        _require(f"{path}.{field}", getattr(spec, field), 1e-3, 1e3)
    for field in ("step_overhead_s", "request_overhead_s", "prefill_read_s"):
        _require(f"{path}.{field}", getattr(spec, field), 0.0, 3600.0)
    _require(f"{path}.price_per_hour", spec.price_per_hour, 0.0, 1e9)


def _check_slo(slo: SLO) -> None:
    for field in slo.__struct_fields__:
        level = getattr(slo, field)
        if level is not None and not 0.0 < level < math.inf:
            raise ConfigError(f"`slo.{field}` must be above 0, got {level}")


def _check_change(fleet: Fleet, path: str, change: ScheduledChange) -> None:
    _require(f"{path}.at", change.at, 0.0, 1e9)
    _require(f"{path}.router_lag", change.router_lag, 0.0, 3600.0)
    if change.link and change.worker:
        raise ConfigError(f"`{path}` changes a link and a worker; write two entries")
    if change.link:
        if change.link not in fleet.links:
            raise ConfigError(
                f"`{path}.link` is {change.link}, which is no link{suggest(change.link, fleet.links)}"
            )
        scheduled_capacity(change, path)
    elif change.capacity:
        raise ConfigError(f"`{path}.capacity` is given without `link`")
    names = [
        worker for group in _groups(fleet) for worker in worker_names(group[0].rsplit(".", 1)[1], group[1])
    ]
    if change.worker and change.worker not in names:
        raise ConfigError(
            f"`{path}.worker` is {change.worker}, which is no worker{suggest(change.worker, names)}"
        )


def scheduled_capacity(change: ScheduledChange, path: str = "schedule") -> float:
    """Bytes per second of a scheduled link change; 0 is an outage.

    Raises:
        ConfigError: `capacity` is no rate.
    """
    if change.capacity.strip() == "0":
        return 0.0
    try:
        return float(Rate.parse(change.capacity))
    except ValueError as error:
        raise ConfigError(f"`{path}.capacity`: {error}") from error

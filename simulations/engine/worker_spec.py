"""What a simulated worker is, in its own and in the router's words."""

from __future__ import annotations

from dataclasses import dataclass

from prfaas.errors import ConfigError
from prfaas.kv.layout import DTYPE_BYTES, CacheGroup, CompatRecord, KVLayout
from prfaas.protocol.messages import WorkerInfo
from prfaas.units import Rate
from simulations.fleet import Fleet, ModelSpec
from simulations.hardware.profiles import hardware_of, step_times
from simulations.hardware.step_times import StepTimes

_DTYPE = "bfloat16"


class FleetError(ConfigError):
    """The fleet cannot serve the trace at all, or contradicts itself; the message says how."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One instance; its role may change over a run, the rest not."""

    name: str
    cluster: str
    role: str
    """At the begin."""
    times: StepTimes
    model: ModelSpec
    page_size: int
    num_pages: int
    max_running: int
    max_queue: int
    machine: str | None = None
    """Where it shares with others."""

    def info(self, role: str, incarnation: str) -> WorkerInfo:
        """What such a worker tells the router when it joins."""
        layout = kv_layout(self.model, self.page_size, self.num_pages)
        compat = CompatRecord(
            protocol=1,
            weights=self.model.name,
            tokenizer=self.model.name,
            attention="gqa",
            page_layout="HND",
            page_size=self.page_size,
            kv_dtype=_DTYPE,
            groups=layout.groups,
        )
        return WorkerInfo(
            worker=self.name,
            cluster=self.cluster,
            role=role,
            incarnation=incarnation,
            model=self.model.name,
            context_length=self.model.context_length,
            layout=layout,
            compat=compat,
            chunk_tokens=self.times.chunk_tokens,
            max_running=self.max_running,
            max_queue=self.max_queue,
        )


def kv_layout(model: ModelSpec, page_size: int, num_pages: int) -> KVLayout:
    """A layout with the model's bytes per token. Layers must divide them; where the model's own number does
    not (mixed layer kinds), the nearest one that does stands for it: it only says in how many pieces a
    chunk is sent."""
    unit = 2 * DTYPE_BYTES[_DTYPE]
    values = max(1, round(model.kv_bytes_per_token / unit))
    divisors = [layers for layers in range(1, min(values, 4 * model.layers) + 1) if values % layers == 0]
    layers = min(divisors, key=lambda n: (abs(n - model.layers), n))
    group = CacheGroup("full", tuple(range(layers)), 1, values // layers)
    return KVLayout(
        groups=(group,),
        page_size=page_size,
        dtype=_DTYPE,
        num_pages=num_pages,
        state_bytes=model.state_bytes,
    )


def worker_specs(fleet: Fleet) -> list[WorkerSpec]:
    """Every worker of the fleet, counts written out as live: `name`, or `name-0` … `name-(n-1)`.

    Raises:
        FleetError: two workers have the same name, or one holds less than a page.
        ConfigError: its hardware is unknown or incomplete.
    """
    specs: list[WorkerSpec] = []
    times_of: dict[str, StepTimes] = {}
    for cluster_name, cluster in fleet.clusters.items():
        for group, workers in cluster.workers.items():
            hardware = hardware_of(fleet, workers)
            if workers.hardware not in times_of:
                times_of[workers.hardware] = step_times(hardware, workers.hardware)
            num_pages = hardware.kv_tokens // fleet.page_size
            if num_pages < 1:
                raise FleetError(
                    f"hardware `{workers.hardware}`: kv_tokens={hardware.kv_tokens} hold not one page of "
                    f"{fleet.page_size} tokens; raise kv_tokens or lower page_size"
                )
            specs += [
                WorkerSpec(
                    name=group if workers.count == 1 else f"{group}-{number}",
                    cluster=cluster_name,
                    role=workers.role,
                    times=times_of[workers.hardware],
                    model=fleet.model,
                    page_size=fleet.page_size,
                    num_pages=num_pages,
                    max_running=workers.max_running,
                    max_queue=workers.max_queue,
                    machine=workers.machine,
                )
                for number in range(workers.count)
            ]
    names = [spec.name for spec in specs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise FleetError(f"worker names must be unique in a fleet; `{twice[0]}` is there twice")
    return specs


def rate_bytes_per_s(text: str, where: str) -> float:
    """A rate such as `100Gbit`, or `0`, in bytes per second.

    Raises:
        FleetError: it is not a rate.
    """
    if text.strip() == "0":
        return 0.0
    try:
        return float(Rate.parse(text))
    except ValueError as error:
        raise FleetError(f"{where}: {error}") from error

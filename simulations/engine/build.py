"""Puts a run together: scheduler, workers, links, schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from policies.types import Policy
from router.core.config import SchedulerConfig
from router.core.events import LinkConfigured, SchedulerInput
from router.core.scheduler import Scheduler
from simulations.engine.failures import schedule
from simulations.engine.loop import Loop
from simulations.engine.machine import Machine
from simulations.engine.membership import Membership
from simulations.engine.recorder import Recorder
from simulations.engine.router_side import RouterSide
from simulations.engine.tick import Ticker
from simulations.engine.worker_spec import FleetError, WorkerSpec, kv_layout, rate_bytes_per_s, worker_specs
from simulations.engine.world import Network, World
from simulations.fleet import Fleet
from simulations.workload.trace import Trace

_NEVER_S = 1e12


def build_world(
    trace: Trace,
    fleet: Fleet,
    policy: Policy,
    *,
    seed: int,
    journal: Callable[[SchedulerInput], None] | None,
) -> World:
    """A world at time 0, its workers joined, nothing arrived.

    Raises:
        FleetError: no worker can hold even the trace's shortest prompt, or the fleet contradicts itself.
    """
    specs = worker_specs(fleet)
    _check(trace, specs)
    loop = Loop()
    layout = kv_layout(fleet.model, fleet.page_size, 1)
    world = World(
        loop,
        Recorder(len(trace), trace.prompt_tokens, trace.output_tokens),
        page_bytes=float(layout.page_bytes * layout.num_layers),
        state_bytes=float(fleet.model.state_bytes),
        layers=layout.num_layers,
        max_tokens=asked_tokens(trace),
    )
    config = scheduler_config(fleet)
    scheduler = Scheduler(policy, seed=seed, config=config, record=journal)
    world.router = RouterSide(scheduler, loop, float(fleet.status_period), float(fleet.event_delay))
    local_rate = {
        name: rate_bytes_per_s(cluster.local_rate, f"clusters.{name}.local_rate")
        for name, cluster in fleet.clusters.items()
    }
    world.network = Network(loop, local_rate, config.local_rtt_s, config.link_ramp_s)
    for name, link in fleet.links.items():
        rate, rtt_s = float(link.capacity), float(link.rtt)
        world.network.add_link(link.between, rate, rtt_s)
        world.router.hear(
            LinkConfigured(
                name=name, clusters=link.between, capacity_bytes_per_s=rate, rtt_s=rtt_s, now_s=0.0
            )
        )
    world.machines = {name: Machine(spec, world.workers) for name, spec in fleet.machines.items()}
    for spec in specs:
        if spec.machine is not None:
            world.machines[spec.machine].names.append(spec.name)
    members = Membership(world)
    for number, spec in enumerate(specs):
        members.join(spec, spec.role, number / len(specs))
    schedule(world, members, fleet)
    Ticker(world, members.carry_out).start()
    return world


def scheduler_config(fleet: Fleet) -> SchedulerConfig:
    """The live defaults and the fleet's own values. The rate inside clusters is known from the fleet, and
    no booking is ever held to have leaked: simulated clients wait as long as it takes.

    Raises:
        FleetError: a field of `scheduler` is unknown or has the wrong type.
    """
    rates = [rate_bytes_per_s(c.local_rate, "local_rate") for c in fleet.clusters.values()]
    fields: dict[str, Any] = {"local_rate_bytes_per_s": min(rates), "booking_deadline_s": _NEVER_S}
    try:
        return msgspec.convert({**fields, **fleet.scheduler}, SchedulerConfig)
    except msgspec.ValidationError as error:
        raise FleetError(f"scheduler: {error}") from error


def asked_tokens(trace: Trace) -> int:
    """`max_tokens` of every request: the power of two that holds the longest answer of the trace, so that
    it says nothing about any single one."""
    longest = int(trace.output_tokens.max(initial=1))
    return 1 << max(0, longest - 1).bit_length()


def _check(trace: Trace, specs: list[WorkerSpec]) -> None:
    decodes = [spec for spec in specs if spec.role == "decode"]
    if not decodes:
        raise FleetError("the fleet has no decode worker: nothing can be served")
    if not len(trace):
        return
    shortest = int(trace.prompt_tokens.min())
    largest = max(decodes, key=lambda spec: spec.num_pages)
    if -(-(shortest + 1) // largest.page_size) > largest.num_pages:
        raise FleetError(
            f"no decode worker can hold a single request: the shortest prompt has {shortest} tokens, "
            f"`{largest.name}` holds {largest.num_pages * largest.page_size}; raise kv_tokens"
        )

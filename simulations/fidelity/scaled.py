"""One fleet twice: slowed down so that this machine can carry it live, and the same for the simulator.

Time runs `time_scale` times slower than in the fleet described, and a token's KV has fewer bytes; link rates
shrink by both, so every ratio (KV rate over bandwidth, transfer over prefill) stays. The network inside a
cluster is this machine's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from prfaas.config import (
    ClusterConfig,
    Config,
    GatewayConfig,
    LinkConfig,
    ModelConfig,
    PacedConfig,
    TimeoutsConfig,
    WorkerConfig,
)
from prfaas.engine.interface import StepProfile
from prfaas.units import Bytes, Rate, Seconds
from simulations.fleet import Fleet, HardwareSpec, ModelSpec, SimWorkers
from simulations.fleet_load import worker_names
from simulations.hardware.profiles import hardware_of, step_times

LAYERS = 4
HEAD_DIM = 16
KV_BYTES_PER_TOKEN = LAYERS * 2 * HEAD_DIM * 2
"""K and V of one head in bfloat16."""
_LOCAL_RATE = "8Gbit"
"""Between two workers of this machine."""
_BUSY_TIMEOUTS = TimeoutsConfig(
    request=Seconds(3600),
    first_token=Seconds(3600),
    silence=Seconds(20),
    lease=Seconds(30),
    quarantine=Seconds(20),
)
"""Nothing may fail for being late here: lateness is what is measured."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How the live world is smaller than the one described."""

    time: float
    """Live seconds that a second takes."""
    status_period_s: float = 0.5
    """Heartbeat of the live services."""
    overhead_s: float = 0.0
    """Live seconds per request before its first chunk: HTTP, hashing, placement."""
    event_delay_s: float = 0.003
    """Live seconds from a worker to the gateway's scheduler."""


def scaled_fleet(fleet: Fleet, scale: Scale) -> Fleet:
    """`fleet` as it is live, for the simulator: all seconds are live seconds, all bytes live bytes."""
    hardware = {}
    for cluster in fleet.clusters.values():
        for workers in cluster.workers.values():
            profile = _profile(fleet, workers, scale)
            hardware[workers.hardware] = HardwareSpec(
                linear=linear_fields(profile),
                chunk_tokens=profile.chunk_tokens,
                kv_tokens=hardware_of(fleet, workers).kv_tokens,
                request_overhead_s=scale.overhead_s,
            )
    clusters = {
        name: msgspec.structs.replace(cluster, local_rate=_LOCAL_RATE)
        for name, cluster in fleet.clusters.items()
    }
    model = ModelSpec(
        name=fleet.model.name,
        layers=LAYERS,
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        context_length=fleet.model.context_length,
    )
    return msgspec.structs.replace(
        fleet,
        model=model,
        clusters=clusters,
        links={name: _scaled_link(link, fleet, scale) for name, link in fleet.links.items()},
        hardware=hardware,
        status_period=Seconds(scale.status_period_s),
        event_delay=Seconds(scale.event_delay_s),
    )


def live_config(fleet: Fleet, scale: Scale, model_path: str) -> Config:
    """`fleet` with paced workers, for `prfaas.worker.many` and the gateway; ports are chosen later."""
    clusters = {
        cluster_name: ClusterConfig(
            kind=cluster.kind,
            workers={
                worker: _paced_worker(fleet, workers, scale)
                for name, workers in cluster.workers.items()
                for worker in worker_names(name, workers)
            },
        )
        for cluster_name, cluster in fleet.clusters.items()
    }
    return Config(
        model=ModelConfig(path=model_path, name=fleet.model.name),
        clusters=clusters,
        links={
            name: msgspec.structs.replace(_scaled_link(link, fleet, scale), emulate=True)
            for name, link in fleet.links.items()
        },
        policy=fleet.policy,
        gateway=GatewayConfig(port=0, max_inflight=100_000, warm_up=False, max_body=Bytes(2**24)),
        timeouts=msgspec.structs.replace(_BUSY_TIMEOUTS, heartbeat=Seconds(scale.status_period_s)),
    )


def linear_fields(profile: StepProfile) -> dict[str, float]:
    """A profile as `HardwareSpec.linear`."""
    fields: dict[str, float] = msgspec.structs.asdict(profile)
    del fields["chunk_tokens"]
    return fields


def _profile(fleet: Fleet, workers: SimWorkers, scale: Scale) -> StepProfile:
    """The linear profile of `workers` in live seconds."""
    spec = hardware_of(fleet, workers)
    profile = step_times(spec, workers.hardware).router_profile()
    seconds = {name: scale.time * value for name, value in linear_fields(profile).items()}
    return StepProfile(chunk_tokens=profile.chunk_tokens, **seconds)


def _paced_worker(fleet: Fleet, workers: SimWorkers, scale: Scale) -> WorkerConfig:
    spec = hardware_of(fleet, workers)
    profile = step_times(spec, workers.hardware).router_profile()
    fields = {name.removesuffix("_s"): Seconds(value) for name, value in linear_fields(profile).items()}
    return WorkerConfig(
        role=workers.role,
        engine="paced",
        paced=PacedConfig(**fields, time_scale=scale.time),
        dtype="bfloat16",
        page_size=fleet.page_size,
        memory=Bytes(spec.kv_tokens * KV_BYTES_PER_TOKEN),
        chunk_tokens=profile.chunk_tokens,
        max_running=workers.max_running,
        max_queue=workers.max_queue,
    )


def _scaled_link(link: LinkConfig, fleet: Fleet, scale: Scale) -> LinkConfig:
    smaller = KV_BYTES_PER_TOKEN / fleet.model.kv_bytes_per_token
    return msgspec.structs.replace(
        link, capacity=Rate(link.capacity * smaller / scale.time), rtt=Seconds(link.rtt * scale.time)
    )

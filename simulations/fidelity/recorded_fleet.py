"""The fleet that a recording tells of, as a fleet to simulate: each worker with hardware of its own."""

from __future__ import annotations

import statistics

import msgspec

from prfaas.config import LinkConfig, PolicyConfig
from prfaas.engine.interface import StepProfile
from prfaas.units import Rate, Seconds
from router.core.config import UNMEASURED, SchedulerConfig
from simulations.fidelity.recording import Recording
from simulations.fidelity.scaled import linear_fields
from simulations.fleet import Fleet, HardwareSpec, ModelSpec, SimCluster, SimWorkers

_LEAST_LOCAL_BYTES = 100_000
"""Smaller transfers say more about round trips than about rates."""
_EVENT_DELAY_S = 0.005
_STATUS_PERIOD_S = 0.25


def recorded_fleet(recording: Recording) -> Fleet:
    """Workers, links, policy and step times as the router knew them; nothing is fitted yet."""
    infos = recording.workers
    layout = next(iter(infos.values())).layout
    clusters: dict[str, SimCluster] = {}
    for cluster in dict.fromkeys(info.cluster for info in infos.values()):
        members = [info for info in infos.values() if info.cluster == cluster]
        workers = {
            info.worker: SimWorkers(
                role="decode" if info.role == "decode" else "prefill",
                hardware=info.worker,
                max_running=info.max_running,
                max_queue=info.max_queue,
            )
            for info in members
        }
        decodes = any(info.role == "decode" for info in members)
        clusters[cluster] = SimCluster(
            kind="pd" if decodes else "prefill", workers=workers, local_rate=_rate(_local_rate(recording))
        )
    return Fleet(
        name="recorded",
        model=ModelSpec(
            name=next(iter(infos.values())).model,
            layers=layout.num_layers,
            kv_bytes_per_token=layout.bytes_per_token,
            state_bytes=layout.state_bytes,
            context_length=max(info.context_length for info in infos.values()),
        ),
        clusters=clusters,
        links={
            link.name: LinkConfig(
                between=link.clusters, capacity=Rate(link.capacity_bytes_per_s), rtt=Seconds(link.rtt_s)
            )
            for link in recording.links
        },
        hardware={
            name: HardwareSpec(
                linear=linear_fields(profile_of(recording, name)),
                chunk_tokens=profile_of(recording, name).chunk_tokens,
                kv_tokens=info.layout.num_pages * info.layout.page_size,
            )
            for name, info in infos.items()
        },
        page_size=layout.page_size,
        policy=PolicyConfig(name=recording.policy, parameters=dict(recording.parameters)),
        scheduler=_scheduler_fields(recording.config),
        status_period=Seconds(_STATUS_PERIOD_S),
        event_delay=Seconds(_EVENT_DELAY_S),
    )


def profile_of(recording: Recording, worker: str) -> StepProfile:
    """As calibrated live; the scheduler's default with the worker's own chunk where it never was."""
    found = recording.profiles.get(worker, UNMEASURED)
    return msgspec.structs.replace(found, chunk_tokens=recording.workers[worker].chunk_tokens)


def _local_rate(recording: Recording) -> float:
    """Bytes per second inside a cluster: the median of what whole transfers of cached pages reached, at
    least what the scheduler assumes."""
    infos = recording.workers
    rates = [
        row.report.kv_bytes / row.report.transfer_s
        for row in recording.rows
        if row.report is not None
        and row.report.kv_bytes > _LEAST_LOCAL_BYTES
        and row.report.transfer_s > 0
        and row.report.computed_tokens == 0
        and row.decode in infos
        and row.site in infos
        and infos[row.decode].cluster == infos[row.site].cluster
    ]
    return max(recording.config.local_rate_bytes_per_s, statistics.median(rates) if rates else 0.0)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s:.0f}B/s"


def _scheduler_fields(config: SchedulerConfig) -> dict[str, object]:
    """Fields that are not the defaults. Leaks are no matter of a simulation."""
    defaults = SchedulerConfig()
    return {
        name: value
        for name in config.__struct_fields__
        if name not in ("default_profile", "booking_deadline_s", "local_rate_bytes_per_s")
        and (value := getattr(config, name)) != getattr(defaults, name)
    }

"""The demo's fleet: a PD cluster and a compute-dense prefill cluster on one machine, an emulated link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prfaas.config import (
    ClusterConfig,
    Config,
    GatewayConfig,
    LinkConfig,
    ModelConfig,
    TimeoutsConfig,
    WorkerConfig,
)
from prfaas.units import Rate, Seconds

LINK_NAME = "wan"
_MOST_CORES_PER_UNIT = 2
"""Beyond this a model of 135 M parameters does not get faster."""

_START_TIMEOUT = Seconds(300)
"""Loading and calibrating take half a minute, and several on a machine that is busy otherwise."""


@dataclass(frozen=True, slots=True)
class CoreShares:
    """Cores of each worker's engine."""

    decode: list[int]
    prefill: list[int]
    remote: list[int]


def share_cores(cores: Sequence[int]) -> CoreShares:
    """Split `cores` so that the remote site has twice the share of each worker in the PD cluster.

    Below four cores decode and prefill share the first one, and the remote site has the second (on a
    single core all three share it).
    """
    if len(cores) < 4:
        first, second = cores[:1], cores[1:2] or cores[:1]
        return CoreShares(list(first), list(first), list(second))
    unit = min(len(cores) // 4, _MOST_CORES_PER_UNIT)
    return CoreShares(list(cores[:unit]), list(cores[unit : 2 * unit]), list(cores[2 * unit : 4 * unit]))


def demo_config(model: Path, link: Rate, rtt: Seconds, cores: Sequence[int], state_dir: Path) -> Config:
    """The demo's configuration; ports are chosen later (`launcher.resolve`)."""
    shares = share_cores(cores)

    def worker(role: str, cpus: list[int]) -> WorkerConfig:
        return WorkerConfig(role=role, cpus=cpus, threads=len(cpus))  # type: ignore[arg-type]

    return Config(
        model=ModelConfig(path=str(model)),
        clusters={
            "pd": ClusterConfig(
                kind="pd",
                workers={
                    "decode-0": worker("decode", shares.decode),
                    "prefill-0": worker("prefill", shares.prefill),
                },
            ),
            "prfaas": ClusterConfig(kind="prefill", workers={"remote-0": worker("prefill", shares.remote)}),
        },
        links={LINK_NAME: LinkConfig(between=("pd", "prfaas"), capacity=link, rtt=rtt, emulate=True)},
        gateway=GatewayConfig(port=0),
        timeouts=TimeoutsConfig(start=_START_TIMEOUT),
        state_dir=str(state_dir),
    )

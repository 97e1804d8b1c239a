"""The demo's fleet: a PD cluster and a compute-dense prefill cluster on one machine, an emulated link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

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

_DECODE, _PREFILL, _REMOTE = 0.5, 0.34, 0.68
"""Shares of a core on a machine too small for a core each: the remote site has twice the pool's. What is
left is for HTTP, NIXL and the client."""

_PAGE_TOKENS = 16
"""Small enough that short chats share the page of the system prompt."""

_CHUNK_TOKENS = 128
"""Small chunks: on a CPU a chunk of 256 holds up running decodes for more than a second."""

_START_TIMEOUT = Seconds(300)
"""Loading and calibrating take half a minute, and several on a machine that is busy otherwise."""


@dataclass(frozen=True, slots=True)
class EngineShare:
    """What one worker's engine may use of the machine."""

    cpus: list[int]
    cpu_share: float


@dataclass(frozen=True, slots=True)
class Shares:
    decode: EngineShare
    prefill: EngineShare
    remote: EngineShare


def share_cores(cores: Sequence[int]) -> Shares:
    """Split `cores` so that the remote site has twice the share of the prefill worker in the PD cluster.

    From four cores on every engine has its own. Below, decode and prefill share the first core and the
    remote site uses the second (on a single core all three share it).
    """
    if len(cores) < 4:
        first, second = list(cores[:1]), list(cores[1:2])
        scale = 1.0 if second else 0.5
        return Shares(
            EngineShare(first, scale * _DECODE),
            EngineShare(first, scale * _PREFILL),
            EngineShare(second or first, scale * _REMOTE),
        )
    unit = min(len(cores) // 4, _MOST_CORES_PER_UNIT)
    bounds = (0, unit, 2 * unit, 4 * unit)
    return Shares(*(EngineShare(list(cores[a:b]), 1.0) for a, b in pairwise(bounds)))


def demo_config(model: Path, link: Rate, rtt: Seconds, cores: Sequence[int], state_dir: Path) -> Config:
    """The demo's configuration; ports are chosen later (`launcher.resolve`)."""
    shares = share_cores(cores)

    def worker(role: Literal["prefill", "decode"], share: EngineShare) -> WorkerConfig:
        return WorkerConfig(
            role=role,
            cpus=share.cpus,
            cpu_share=share.cpu_share,
            threads=len(share.cpus),
            page_size=_PAGE_TOKENS,
            chunk_tokens=_CHUNK_TOKENS,
        )

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

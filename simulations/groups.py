"""Dimensionless groups: what a fleet, its load and its link have in common with one of another size.

Two set-ups with equal groups stand in the same regime, whatever their hardware: a small test bed on a
200 Mbit/s link and a large fleet on 100 Gbit/s can be compared by them, and by nothing with a unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from simulations.fleet import ModelSpec
from simulations.workload.trace import Trace


@dataclass(frozen=True, slots=True)
class Groups:
    """NaN where there is no link or no remote prefill."""

    offered_kv_over_link: float
    """KV rate if every request were prefilled remotely with nothing cached, over the bandwidth: a property of
    workload and link, not of the policy. Above 1 the link cannot carry all and somebody must choose."""
    kv_over_link: float
    """KV rate as placed, over the bandwidth: the link's utilisation. Not above 1 for long."""
    rtt_over_prefill: float
    """Round trip over the mean prefill time of what goes remote: small = the delay hides in the compute."""
    instance_kv_over_link: float
    """One remote instance's KV throughput Φ = E[S_kv] / E[T_prefill] over the bandwidth: 1 over this is
    how many instances fill the link."""
    utilisation: Mapping[str, float]
    """By stage: work offered per second over what its instances do in a second. From 1 on its queue
    never ends."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON: NaN as None."""
        found = asdict(self)
        found["utilisation"] = dict(self.utilisation)
        return {name: None if value != value else value for name, value in found.items()}


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a workload puts on one link, per second and per request."""

    rate_per_s: float
    kv_bytes_all: float
    """Mean KV bytes of a request."""
    remote_share: float
    kv_bytes_remote: float
    """Mean bytes that cross for a request that is prefilled remotely."""
    prefill_s_remote: float
    """Mean prefill time of such a request."""


def groups(
    traffic: Traffic, link_bytes_per_s: float, rtt_s: float, utilisation: Mapping[str, float]
) -> Groups:
    """The groups of one operating point; `link_bytes_per_s` is one direction's rate."""
    nan = float("nan")
    remote = traffic.remote_share > 0
    placed = traffic.rate_per_s * traffic.remote_share * traffic.kv_bytes_remote if remote else 0.0
    return Groups(
        offered_kv_over_link=offered_kv_over_link(traffic.rate_per_s, traffic.kv_bytes_all, link_bytes_per_s),
        kv_over_link=_ratio(placed, link_bytes_per_s),
        rtt_over_prefill=_ratio(rtt_s, traffic.prefill_s_remote) if remote else nan,
        instance_kv_over_link=(
            _ratio(traffic.kv_bytes_remote, traffic.prefill_s_remote * link_bytes_per_s) if remote else nan
        ),
        utilisation=dict(utilisation),
    )


def offered_kv_over_link(rate_per_s: float, kv_bytes: float, link_bytes_per_s: float) -> float:
    """`rate_per_s` requests of `kv_bytes` each, all sent over a link of `link_bytes_per_s`."""
    return _ratio(rate_per_s * kv_bytes, link_bytes_per_s)


def link_for_offered(group: float, rate_per_s: float, kv_bytes: float) -> float:
    """The bandwidth in bytes per second that makes `offered_kv_over_link` equal to `group` (> 0)."""
    return rate_per_s * kv_bytes / group


def mean_kv_bytes(trace: Trace, model: ModelSpec) -> float:
    """KV of a whole prompt, averaged over the trace: tokens times bytes per token, and the fixed state."""
    prefilled = np.maximum(trace.prompt_tokens - 1, 0)
    return float(prefilled.mean()) * model.kv_bytes_per_token + model.state_bytes


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else float("nan")

"""A fleet to simulate: the live configuration's clusters, workers, links and policy, plus hardware profiles.

`simulations.fleet_load` reads the YAML; this module only says what there is. Fields that live and simulated
fleets share have the same names and meaning as in `prfaas.config`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from prfaas.config import LinkConfig, PolicyConfig, Section
from prfaas.units import Seconds


class ModelSpec(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model, as far as KV movement knows it."""

    name: str
    layers: int
    kv_bytes_per_token: int
    """Over all layers, on the wire."""
    state_bytes: int = 0
    """Fixed-size state of a sequence (linear attention, windows): crosses whole, with the last chunk."""
    context_length: int = 131_072


class HardwareSpec(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Step times and memory of one engine instance.

    The times are `linear`, or `table`, or `points` for prefill with the three decode fields in `linear`.
    """

    linear: dict[str, float] = msgspec.field(default_factory=dict)
    """The six `…_s` fields of `prfaas.engine.interface.StepProfile` (beside `points` the three of decode)."""
    points: dict[str, list[list[float]]] = msgspec.field(default_factory=dict)
    """`prefill`: [[tokens, seconds], …] of whole uncached prompts, joined by lines."""
    table: str = ""
    """`model/system/tp` of the data's cost tables, e.g. `meta-llama/Meta-Llama-3.1-8B/l40s/1`."""
    prefill_read_s: float = 0.0
    """Beside `linear`: seconds per chunk and token before it, whose KV is read once per chunk, however short
    that is. The linear profile has this per new token only, too little for short chunks of long prompts."""
    chunk_tokens: int = 8192
    kv_tokens: int
    """Tokens that the KV pool holds."""
    prefill_scale: float = 1.0
    """Measured ÷ table."""
    decode_scale: float = 1.0
    step_overhead_s: float = 0.0
    """Added to every step."""
    request_overhead_s: float = 0.0
    """Added once per request."""
    price_per_hour: float = 0.0
    """Of the whole instance, in any one currency."""


class MachineSpec(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine whose workers share cores, caches or memory: each step of one takes
    1 + beside_prefill · (others that compute prompts) + beside_decode · (others that only decode) times as
    long as alone."""

    beside_prefill: float = 0.0
    beside_decode: float = 0.0

    def slowdown(self, computing: float, decoding: float) -> float:
        """Factor on a step beside so many others that compute prompts, and that only decode."""
        return 1.0 + self.beside_prefill * computing + self.beside_decode * decoding


class SimWorkers(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`count` equal instances."""

    role: Literal["prefill", "decode"]
    hardware: str
    """A name from the fleet's `hardware`, or of a file of `simulations/hardware/`."""
    machine: str | None = None
    """A name from the fleet's `machines`: all instances run there and slow each other. None = each has what
    it needs for itself."""
    count: int = 1
    max_running: int = 256
    max_queue: int = 100_000


class SimCluster(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: Literal["pd", "prefill"]
    workers: dict[str, SimWorkers]
    local_rate: str = "400Gbit"
    """Of the network inside the cluster, per pair of workers."""


class ScheduledChange(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that happens at a time: a failure, an outage, a daily swing."""

    at: Seconds
    link: str = ""
    """Link whose capacity changes."""
    capacity: str = ""
    """Its new capacity; `0` = an outage."""
    worker: str = ""
    """Worker that dies, or comes back (`up`)."""
    up: bool = False
    router_lag: Seconds = Seconds(0.0)
    """From here on the router hears everything this much later (a lagging replica); 0 ends it."""


class SLO(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Service levels; None = not asked for. A run meets them when every one holds over its requests."""

    ttft_p50: Seconds | None = None
    ttft_p90: Seconds | None = None
    ttft_p99: Seconds | None = None
    tpot_p50: Seconds | None = None
    tpot_p90: Seconds | None = None
    tpot_p99: Seconds | None = None


class Fleet(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    model: ModelSpec
    clusters: dict[str, SimCluster]
    links: dict[str, LinkConfig] = msgspec.field(default_factory=dict)
    hardware: dict[str, HardwareSpec] = msgspec.field(default_factory=dict)
    machines: dict[str, MachineSpec] = msgspec.field(default_factory=dict)
    """Only those whose workers slow each other."""
    page_size: int = 512
    """Tokens per KV page and per block of the prefix caches."""
    slo: SLO = SLO()
    policy: PolicyConfig = PolicyConfig()
    scheduler: dict[str, Any] = msgspec.field(default_factory=dict)
    """Fields of `router.core.config.SchedulerConfig`."""
    status_period: Seconds = Seconds(0.25)
    """How often each worker tells the router its status."""
    event_delay: Seconds = Seconds(0.005)
    """From a worker to the router: statuses, KV events, reports."""
    schedule: list[ScheduledChange] = msgspec.field(default_factory=list)

"""The one configuration file: clusters, workers, links, policy, timeouts.

Typed and strict: an unknown field is refused with its path and the nearest valid name. Every field has
an environment twin: `PRFAAS_` plus the path in capitals, joined by two underscores, with `-` written as
`_` (`PRFAAS_POLICY__NAME`, `PRFAAS_CLUSTERS__PD__WORKERS__DECODE_0__THREADS`). `prfaas.config_load`
reads files and the environment; this module only says what there is.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from prfaas.units import Bytes, Rate, Seconds


class Section(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Base of every configuration section."""


class ModelConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one model that all workers serve."""

    path: str
    """HF folder: config.json, *.safetensors, tokenizer.json, chat template."""
    name: str = ""
    """Name that clients use; empty = the folder's name."""


class PacedConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Step times of a paced engine: the coefficients of `prfaas.engine.interface.StepProfile`."""

    prefill_base: Seconds = Seconds(0)
    prefill_token: Seconds = Seconds(0)
    prefill_context: Seconds = Seconds(0)
    decode_base: Seconds = Seconds(0)
    decode_sequence: Seconds = Seconds(0)
    decode_context: Seconds = Seconds(0)
    time_scale: float = 1.0
    """Seconds that a second of the profile takes; above 1 a slow machine can carry a fast fleet."""


class WorkerConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine instance."""

    role: Literal["prefill", "decode"]
    engine: Literal["native", "paced"] = "native"
    """`native` computes; `paced` keeps the protocol and moves true bytes, but sleeps for its compute."""
    paced: PacedConfig = PacedConfig()
    """How long a paced engine's steps take."""
    count: int = 1
    """How many workers like this one; the loader writes them out as `name-0`, `name-1`, …"""
    host: str = "127.0.0.1"
    port: int = 0
    """Control port; 0 lets `prfaas up` choose one. Services started one by one need a fixed port."""
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    page_size: int = 32
    """Tokens per KV page."""
    memory: Bytes = Bytes(2**30)
    """Size of the KV pool; the page count follows from it."""
    threads: int = 1
    """Threads of the engine process."""
    cpus: list[int] = []
    """CPU affinity of the engine process; empty = any."""
    cpu_share: float = 1.0
    """Most of its threads' time that the engine uses; below 1 it rests after each layer. For several
    engines on one machine: shares of a core that add up to at most 1 do not slow each other."""
    chunk_tokens: int = 256
    """Most tokens of prefill computed in one step."""
    max_running: int = 16
    """Most sequences decoded together."""
    max_queue: int = 256
    """Most requests waiting; beyond it the worker refuses (429 at the gateway)."""
    checksum_pages: bool = False
    """Test mode: the sender adds an XXH3-64 of each page, the receiver compares after completion."""


class ClusterConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A network domain with fast transport inside."""

    kind: Literal["pd", "prefill"]
    workers: dict[str, WorkerConfig]


class LinkConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The path between two clusters, in both directions."""

    between: tuple[str, str]
    capacity: Rate
    """Prior for the estimator, and the rate when emulated."""
    rtt: Seconds
    emulate: bool = False
    """Pace and delay transfers in the sender (no root needed); for demos on one machine."""


class PolicyConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = "cost_model"
    """An entry point of group `prfaas.policies`, or `module:Class`."""
    parameters: dict[str, Any] = {}
    time_budget: Seconds = Seconds(0.005)
    """A policy that takes longer again and again is replaced by the default."""


class GatewayConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: int = 8000
    cluster: str = ""
    """The cluster the gateway stands in; empty = the first one of kind `pd`."""
    max_body: Bytes = Bytes(8 * 2**20)
    max_inflight: int = 256
    """Requests accepted and not answered yet; beyond it 429."""
    default_max_tokens: int = 1024
    """Bound on a chat answer whose request names none; the context's end bounds it too."""
    on_prefill_failure: Literal["replan", "fail"] = "replan"
    max_attempts: int = 3
    decision_log: str = ""
    """JSONL file of every decision and its outcome; empty = in memory only."""
    journal: str = ""
    """JSONL file of every scheduler input; replaying it reproduces every decision."""
    seed: int = 0
    calibrate: bool = True
    """Measure every worker's step times at start, all of them at once, and warm up every pair."""
    warm_up: bool = True
    """… with a few real requests, too. Without them nothing is learned before the first client: for fleets
    whose step times are known exactly (paced engines), where prompts as short as these would mislead."""


class TimeoutsConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """docs/deadlines.md explains each of these and what happens when it passes."""

    request: Seconds = Seconds(600)
    """A whole request, from the last body byte to the last token."""
    first_token: Seconds = Seconds(300)
    connect: Seconds = Seconds(2)
    heartbeat: Seconds = Seconds(0.25)
    """Interval of heartbeats on every peer session and worker event stream."""
    silence: Seconds = Seconds(1.5)
    """A peer or worker silent for this long is lost: its sessions end and are fenced."""
    lease: Seconds = Seconds(3)
    """Source pages of a grant stay pinned this long after the last renewal."""
    quarantine: Seconds = Seconds(1.5)
    """Pages quarantined longer than this get their peer fenced."""
    drain: Seconds = Seconds(30)
    """After SIGTERM: how long running requests may finish."""
    start: Seconds = Seconds(120)
    """A worker has this long to become ready."""


class AuthConfig(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    client_tokens: list[str] = []
    """Bearer tokens that clients may use; empty = open."""
    service_token: str = ""
    """Bearer token between services; `prfaas up` makes one where empty."""


class Config(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: ModelConfig
    clusters: dict[str, ClusterConfig]
    links: dict[str, LinkConfig] = {}
    policy: PolicyConfig = PolicyConfig()
    gateway: GatewayConfig = GatewayConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    auth: AuthConfig = AuthConfig()
    state_dir: str = "runs"
    """Logs, emulated-link state, calibration results."""

    def worker(self, name: str) -> tuple[str, WorkerConfig]:
        """(cluster name, worker) of the worker called `name`; worker names are unique in a fleet.

        Raises:
            KeyError: there is no such worker.
        """
        for cluster_name, cluster in self.clusters.items():
            if name in cluster.workers:
                return cluster_name, cluster.workers[name]
        raise KeyError(name)

    @property
    def gateway_cluster(self) -> str:
        """Name of the cluster that the gateway stands in.

        Raises:
            KeyError: there is no cluster of kind `pd` (`prfaas.config_check` refuses that).
        """
        if self.gateway.cluster:
            return self.gateway.cluster
        for name, cluster in self.clusters.items():
            if cluster.kind == "pd":
                return name
        raise KeyError("pd")

    def link_between(self, a: str, b: str) -> tuple[str, LinkConfig] | None:
        """The named link joining clusters `a` and `b`; None inside one cluster or where none is described."""
        for name, link in self.links.items():
            if a != b and set(link.between) == {a, b}:
                return name, link
        return None

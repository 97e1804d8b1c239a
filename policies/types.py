"""Plain data that policies see, and the protocol that they implement.

A policy is deterministic (randomness only from the generator it is handed) and does no I/O. It may keep
state. Candidates and their cost terms come as arrays, one row per feasible (decode worker, prefill site).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


REFUSE = -1
"""Answer of `Policy.choose` that no candidate is acceptable: the request fails with `policy_refused`."""


class PlacementKind(IntEnum):
    """Where the uncached tokens are computed, and whether a cached prefix decided it."""

    REUSE = 0
    """On the decode worker, whose cache covers at least half of the prompt."""
    LOCAL = 1
    """On the decode worker otherwise."""
    POOL = 2
    """On a prefill worker of the same cluster."""
    REMOTE = 3
    """On a prefill worker of another cluster."""

    @property
    def label(self) -> str:
        return self.name.lower()


class RequestView(msgspec.Struct, frozen=True):
    """What a policy may know of a request; the output length is not among it."""

    request_id: str
    arrival_s: float
    prompt_tokens: int
    max_tokens: int
    attempt: int = 1
    session: str = ""
    """Conversation that the request belongs to, where the client names one."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Every feasible placement of one request; all arrays have one row per candidate.

    All terms are seconds. `ttft_s = max(start_s + prefill_s + transfer_s, slot_s) + step_s + overhead_s`;
    the overlap of transfer and prefill is inside `transfer_s` (the part that prefill does not hide).
    """

    decode: tuple[str, ...]
    """Name of the decode worker."""
    site: tuple[str, ...]
    """Name of the worker that prefills (the decode worker itself for `reuse` and `local`)."""
    kind: Ints
    uncached_tokens: Ints
    """Prompt tokens to compute at the site: the paper's incremental length."""
    decode_cached_tokens: Ints
    site_cached_tokens: Ints
    kv_bytes: Ints
    """Bytes that must cross to the decode worker."""
    start_s: Floats
    """Until the site starts on this prompt: work queued ahead, and pages pinned on the decode worker."""
    prefill_s: Floats
    transfer_s: Floats
    """From the end of prefill until the last byte is counted in (0 for local prefill)."""
    slot_s: Floats
    """Until the decode worker can admit the request; overlaps start, prefill and transfer."""
    step_s: Floats
    """The first decode step, which computes the last prompt token."""
    overhead_s: Floats
    """Seconds already spent since arrival, plus what requests on this path took lately beyond the terms."""
    ttft_s: Floats
    interference_s: Floats
    """Delay to the decodes running on the worker that prefills locally, summed over them."""
    externality_s: Floats
    """Delay that this placement imposes on requests still to come."""
    cost_s: Floats
    """ttft_s + interference_s + externality_s."""

    def __len__(self) -> int:
        return len(self.decode)

    def pair(self, index: int) -> tuple[str, str]:
        """(decode worker, prefill site) of one candidate."""
        return self.decode[index], self.site[index]


TERM_NAMES = (
    "start_s", "prefill_s", "transfer_s", "slot_s", "step_s", "overhead_s",
    "ttft_s", "interference_s", "externality_s", "cost_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class FleetView:
    """Slow-moving facts a policy may use beside the candidates: by worker name, or by direction of a link,
    `source->target` (clusters).

    Everything here is live: a view, and its mappings, answer what holds when they are asked, so keep none for
    later. `policies.base.gather` reads a whole column at once. Times are absolute, on the scale of `now_s`.
    """

    now_s: float
    workers: tuple[str, ...]
    queued_tokens: Mapping[str, int]
    """Prefill tokens booked and not computed."""
    running: Mapping[str, int]
    """Sequences decoding."""
    link_bytes_per_s: Mapping[str, float]
    """Estimated rate."""
    link_utilisation: Mapping[str, float]
    """Booked seconds per second lately."""
    number: Mapping[str, int] = field(default_factory=dict)
    """Another one for each worker: arrays of numbers are compared quicker than tuples of names."""
    cluster: Mapping[str, str] = field(default_factory=dict)
    role: Mapping[str, str] = field(default_factory=dict)
    """`prefill` or `decode`."""
    ready: Mapping[str, bool] = field(default_factory=dict)
    """Whether it takes new requests; one that drains does not."""
    waiting: Mapping[str, int] = field(default_factory=dict)
    """Requests that are not decoding yet: prefills queued here, and prompts whose KV is still to come."""
    free_pages: Mapping[str, int] = field(default_factory=dict)
    """Free and evictable ones, less what is booked."""
    total_pages: Mapping[str, int] = field(default_factory=dict)
    page_tokens: Mapping[str, int] = field(default_factory=dict)
    running_context_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens of the sequences decoding."""
    max_running: Mapping[str, int] = field(default_factory=dict)
    decode_base_s: Mapping[str, float] = field(default_factory=dict)
    """A decode step takes base + sequences · sequence + their tokens · context, as measured lately."""
    decode_sequence_s: Mapping[str, float] = field(default_factory=dict)
    decode_context_s: Mapping[str, float] = field(default_factory=dict)
    prefill_ends_s: Mapping[str, float] = field(default_factory=dict)
    """When the prefill work queued here ends; in the past where there is none."""
    link_drains_s: Mapping[str, float] = field(default_factory=dict)
    """When the bytes booked on the link are over, at its estimated rate; in the past where there are none."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a placed request, for policies that learn."""

    request_id: str
    kind: PlacementKind
    site: str
    decode: str
    predicted_ttft_s: float
    actual_ttft_s: float
    """NaN where no first token came."""
    ok: bool
    terms: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """(predicted, actual) by cost term, where the term was measured."""


@dataclass(frozen=True, slots=True)
class Command:
    """A slow-timescale order from `Policy.control`.

    `("set_role", {"worker": name, "role": "prefill" or "decode"})` drains a worker and gives it that role.

    The simulator carries it out; the gateway carries none out yet.
    """

    name: str
    arguments: Mapping[str, Any]


class Policy(Protocol):
    """The plugin API; `policies.base.BasePolicy` gives defaults for all but `choose`."""

    def choose(
        self,
        request: RequestView,
        candidates: Candidates,
        view: FleetView,
        rng: np.random.Generator,
    ) -> int:
        """Index of the chosen candidate, or `REFUSE`. There is always at least one candidate."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """Learn from a finished or failed request."""
        ...

    def control(self, view: FleetView, now_s: float) -> list[Command]:
        """Called about once a second."""
        ...

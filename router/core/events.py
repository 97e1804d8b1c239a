"""Everything the scheduler hears, as plain tagged structs: these, in order, determine every decision.

Each input carries `now_s`, monotonic seconds of the gateway's clock; the scheduler has no clock of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from prfaas.engine.interface import StepProfile
from prfaas.protocol.messages import KVEvent, PrefillReport, WorkerInfo, WorkerStatus

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    BlockHashes = tuple[int, ...] | NDArray[np.uint64]
else:
    BlockHashes = tuple[int, ...]  # what a journal is read back as


class Input(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of every scheduler input."""

    now_s: float


class PlaceRequest(Input, frozen=True, kw_only=True, tag="place"):
    """Place this request; a second one with the same id (the next attempt) gives up the first's booking."""

    request_id: str
    prompt_tokens: int
    max_tokens: int
    arrival_s: float
    """When the gateway had read the request's last body byte, on the same clock as `now_s`."""
    block_hashes: BlockHashes = ()
    """Chained hashes of the prompt's full blocks (`prfaas.kv.hashing`), at the fleet's page size. An array of
    64-bit integers, never changed afterwards, saves turning a tuple into one."""
    attempt: int = 1
    session: str = ""
    """Conversation, where the client names one; policies may pin it."""
    avoid: tuple[str, ...] = ()
    """Workers that failed this request before; used only where nothing else is feasible."""
    pair: tuple[str, str] | None = None
    """(decode worker, prefill site) to use without asking the policy: warm-up requests measure each pair."""


class WorkerJoined(Input, frozen=True, kw_only=True, tag="worker_joined"):
    """A worker appeared, or came back as another incarnation (which forgets the former one)."""

    info: WorkerInfo
    ready: bool = False
    """Whether it may get traffic before its first status."""


class WorkerProfile(Input, frozen=True, kw_only=True, tag="worker_profile"):
    """Step times measured on this worker."""

    worker: str
    profile: StepProfile


class WorkerLost(Input, frozen=True, kw_only=True, tag="worker_lost"):
    worker: str


class StatusReceived(Input, frozen=True, kw_only=True, tag="status_received"):
    status: WorkerStatus


class KVReceived(Input, frozen=True, kw_only=True, tag="kv_received"):
    worker: str
    event: KVEvent


class LinkConfigured(Input, frozen=True, kw_only=True, tag="link_configured"):
    """A path between two clusters, in both directions; without one, clusters cannot exchange KV."""

    name: str
    clusters: tuple[str, str]
    capacity_bytes_per_s: float
    """Prior of the estimate."""
    rtt_s: float


class PrefillReported(Input, frozen=True, kw_only=True, tag="prefill_reported"):
    """The prompt's KV is complete on the decode worker."""

    request_id: str
    attempt: int
    report: PrefillReport


class FirstToken(Input, frozen=True, kw_only=True, tag="first_token"):
    """The first content byte was written to the client."""

    request_id: str
    ttft_s: float
    """Since `PlaceRequest.arrival_s`."""


class Finished(Input, frozen=True, kw_only=True, tag="finished"):
    """The answer has ended (`ok`), or ended in an error after tokens were streamed."""

    request_id: str
    completion_tokens: int
    ok: bool = True


class Failed(Input, frozen=True, kw_only=True, tag="failed"):
    """An attempt failed; its booking is given back."""

    request_id: str
    attempt: int
    site: str = ""
    """Worker at fault."""
    reason: str = ""


class Released(Input, frozen=True, kw_only=True, tag="released"):
    """The request is over for another reason (client gone, deadline, refused): give its booking back."""

    request_id: str


class PolicyOverran(Input, frozen=True, kw_only=True, tag="policy_overran"):
    """The policy took longer than its budget. An input, because a replay must not depend on a clock."""

    elapsed_s: float


class Tick(Input, frozen=True, kw_only=True, tag="tick"):
    """About once a second: sweeps leaked bookings, ages estimates, calls `Policy.control`."""


SchedulerEvent = (
    WorkerJoined | WorkerProfile | WorkerLost | StatusReceived | KVReceived | LinkConfigured
    | PrefillReported | FirstToken | Finished | Failed | Released | PolicyOverran | Tick
)  # fmt: skip
SchedulerInput = PlaceRequest | SchedulerEvent

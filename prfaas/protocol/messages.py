"""Messages between processes: plain msgspec structs, tagged, versioned by `PROTOCOL_VERSION`.

gateway → decode worker     POST /v1/generate: `GenerateRequest` in, NDJSON stream of `GenerateFrame` out
decode → prefill worker     one WebSocket per pair and incarnation (/v1/peer): `PeerMessage`, msgpack
worker → gateway            GET /v1/events: NDJSON stream of `WorkerEvent` (snapshot, deltas, status)

Durations travel as seconds, never as wall-clock times: clusters need no common clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from prfaas.kv.layout import CompatRecord, KVLayout

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    BlockHashes = list[int] | NDArray[np.uint64]
    """An array within a process (the simulator's), a list once decoded."""
else:
    BlockHashes = list[int]

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 4 * 2**20
"""Bound on one frame in either direction; a longer one ends the connection."""
MAX_DEADLINE_S = 24 * 3600.0
"""Bound on deadlines and leases in messages; a longer one is a mistake and refused."""


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of every message; fields that a newer version adds must have defaults."""


# ---------------------------------------------------------------- sampling


class Sampling(Message, frozen=True, kw_only=True):
    """How to choose tokens; the gateway has validated and filled in every field."""

    max_tokens: int
    temperature: float = 0.0
    """0 = greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = -1
    """-1 = none; 0 = of the chosen token; n = and of the n likeliest."""


class TokenLogprobs(Message, frozen=True, kw_only=True):
    """Natural-log probabilities at one position."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


# ---------------------------------------------------------------- gateway → decode worker


class PrefillSite(Message, frozen=True, kw_only=True):
    """A prefill worker that the decode worker is to use."""

    worker: str
    url: str
    cluster: str


class GenerateRequest(Message, frozen=True, kw_only=True):
    version: int = PROTOCOL_VERSION
    request_id: str
    attempt: int
    token_ids: list[int]
    sampling: Sampling
    prefill: PrefillSite | None = None
    """None = prefill here."""
    cache_salt: str = ""
    deadline_s: float
    """Seconds left for the whole request, on arrival."""


class PrefillReport(Message, frozen=True, kw_only=True):
    """How the prompt's KV came to be; seconds are durations at the named side."""

    site: str
    cached_tokens: int
    """Prompt tokens found in the prefix cache of the site that prefilled (the honest `cached_tokens`)."""
    decode_cached_tokens: int
    """Prompt tokens that the decode worker had itself."""
    computed_tokens: int
    queue_s: float
    """From the grant (or submission) until the first chunk ran."""
    prefill_s: float
    """From the first chunk's start to the last layer computed."""
    ready_s: float
    """From request arrival at the decode worker until its KV was complete there."""
    kv_bytes: int = 0
    """Bytes written over the link for this request."""
    transfer_s: float = 0.0
    """From the first write posted to the last byte landed, at the sender."""
    tail_s: float = 0.0
    """Last byte landed minus last layer computed, at the sender; never negative."""


class Accepted(Message, frozen=True, kw_only=True, tag="accepted"):
    request_id: str
    attempt: int
    decode_cached_tokens: int


class Prefilled(Message, frozen=True, kw_only=True, tag="prefilled"):
    report: PrefillReport


class Tokens(Message, frozen=True, kw_only=True, tag="tokens"):
    token_ids: list[int]
    text: str
    """Whole characters only; what may still be the start of a stop string is held back."""
    logprobs: list[TokenLogprobs] = []


class Finished(Message, frozen=True, kw_only=True, tag="finished"):
    finish_reason: str
    """`stop` or `length`."""
    completion_tokens: int


class Failed(Message, frozen=True, kw_only=True, tag="failed"):
    """The attempt is over and its resources are released or quarantined. Only the gateway places again."""

    site: str
    """Worker at fault."""
    reason: str
    """One of FAILURE_REASONS."""
    attempt: int
    message: str
    complete_tokens: int = 0
    """Prompt tokens whose KV is complete and cached on the decode worker, so not sent again."""


FAILURE_REASONS = (
    "peer_lost",        # prefill worker dead, silent, or its session cut
    "incompatible",     # compatibility record differs
    "overloaded",       # queue limit, or too few pages
    "transfer_failed",  # NIXL error
    "engine_failed",    # engine process died
    "deadline",         # a deadline passed
    "draining",         # worker is shutting down
    "cancelled",
    "bad_request",
    "corrupt",          # page checksum differs (test mode)
)  # fmt: skip

GenerateFrame = Accepted | Prefilled | Tokens | Finished | Failed


# ---------------------------------------------------------------- decode ↔ prefill worker


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """First message of a session, decode → prefill. A session is the fence unit: one NIXL agent on each
    side lives and dies with it."""

    version: int = PROTOCOL_VERSION
    session: str
    """Unique; names the NIXL agents."""
    worker: str
    cluster: str
    incarnation: str
    compat: CompatRecord
    layout: KVLayout
    pool_address: int
    agent_metadata: bytes


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    worker: str
    incarnation: str
    agent_metadata: bytes


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """The session cannot be; the service stays up."""

    reason: str
    fields: list[tuple[str, str, str]] = []
    message: str = ""


class Grant(Message, frozen=True, kw_only=True, tag="grant"):
    """Permission to write the named pages: KV of token_ids[first_page·page_size : len(token_ids)-1]."""

    request_id: str
    attempt: int
    token_ids: list[int]
    cache_salt: str = ""
    first_page: int
    """Index, in the prompt, of the first page that the decode worker lacks."""
    page_ids: list[int]
    """Destination pages for prompt pages first_page, first_page + 1, …"""
    lease_s: float
    deadline_s: float


class Cancel(Message, frozen=True, kw_only=True, tag="cancel"):
    """Stop writing; answered by `GrantFailed` once no write will follow."""

    request_id: str
    attempt: int


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    """Sent by both sides every `timeouts.heartbeat`. From decode it renews the lease of every grant."""

    sequence: int
    echo: int = -1
    """The last sequence received from the other side: measures the round trip."""
    echo_delay_s: float = 0.0
    """How long that one lay here before it was echoed."""


class GrantAccepted(Message, frozen=True, kw_only=True, tag="grant_accepted"):
    request_id: str
    attempt: int
    cached_tokens: int


class GrantProgress(Message, frozen=True, kw_only=True, tag="grant_progress"):
    request_id: str
    attempt: int
    computed_tokens: int


class GrantFinished(Message, frozen=True, kw_only=True, tag="grant_finished"):
    """Every write is DONE; none will follow. Completion itself is counted by the receiver."""

    request_id: str
    attempt: int
    report: PrefillReport
    checksums: list[int] = []
    """Test mode: XXH3-64 per (layer, page), layer-major."""


class GrantFailed(Message, frozen=True, kw_only=True, tag="grant_failed"):
    """The grant is over and no write will follow: the receiver may free the pages."""

    request_id: str
    attempt: int
    reason: str
    message: str = ""


PeerMessage = (
    Hello | Welcome | Refused | Grant | Cancel | Heartbeat
    | GrantAccepted | GrantProgress | GrantFinished | GrantFailed
)  # fmt: skip


# ---------------------------------------------------------------- worker → gateway


class LinkCounters(Message, frozen=True, kw_only=True):
    """Running totals of one worker's sending towards one cluster; the router takes differences."""

    cluster: str
    bytes_total: int
    """Bytes landed."""
    sampled_bytes_total: int
    """Bytes landed in intervals in which further bytes were waiting: samples of the link."""
    sampled_s_total: float
    rtt_s: float
    """Smallest round trip seen on the control channel lately; 0 = not measured."""
    inflight_bytes: int = 0
    errors_total: int = 0


class WorkerStatus(Message, frozen=True, kw_only=True, tag="status"):
    """Sent at once on connection, then every heartbeat and on every change of state."""

    worker: str
    incarnation: str
    role: str
    state: str
    """`starting`, `ready`, `draining`."""
    waiting: int = 0
    running: int = 0
    waiting_prefill_tokens: int = 0
    running_context_tokens: int = 0
    total_pages: int = 0
    free_pages: int = 0
    """Free or evictable at once."""
    cached_pages: int = 0
    quarantined_pages: int = 0
    pinned_pages: int = 0
    """Held by running requests and transfers."""
    live_grants: int = 0
    """Grants not over yet, given (decode) or taken (prefill)."""
    sessions: int = 0
    """Peer sessions whose NIXL agent is not destroyed."""
    prefill_tokens_per_s: float = 0.0
    """Measured lately; 0 = none computed lately."""
    decode_step_s: float = 0.0
    links: list[LinkCounters] = []


class KVSnapshot(Message, frozen=True, kw_only=True, tag="kv_snapshot"):
    """Every block cached now; replaces what the router believed of this worker. Deltas follow it."""

    generation: str
    sequence: int
    page_size: int
    block_hashes: BlockHashes
    """Chained XXH3-64 block hashes (docs/protocol.md)."""


class KVStored(Message, frozen=True, kw_only=True, tag="kv_stored"):
    generation: str
    sequence: int
    block_hashes: BlockHashes


class KVRemoved(Message, frozen=True, kw_only=True, tag="kv_removed"):
    generation: str
    sequence: int
    block_hashes: BlockHashes


WorkerEvent = WorkerStatus | KVSnapshot | KVStored | KVRemoved
KVEvent = KVSnapshot | KVStored | KVRemoved


class WorkerInfo(Message, frozen=True, kw_only=True):
    """GET /v1/info: what does not change while an incarnation lives."""

    worker: str
    cluster: str
    role: str
    incarnation: str
    model: str
    context_length: int
    layout: KVLayout
    compat: CompatRecord
    chunk_tokens: int
    max_running: int
    max_queue: int


class WarmRequest(Message, frozen=True, kw_only=True):
    """POST /v1/warm on a decode worker: open the peer session to this site now, not at the first grant."""

    prefill: PrefillSite


class ErrorBody(Message, frozen=True, kw_only=True):
    """Body of a non-2xx answer of a worker's control plane."""

    reason: str
    message: str

"""What the transfer layer tells the messengers; delivered on the event loop, in order.

Each attempt gets exactly one *terminal* event on the sending side (`SendFinished`, `SendCancelled`,
`SendFailed`, `SendClosed`): only then may its source pages be reused. On the receiving side an attempt ends
with `ReceiveComplete` or with `ReceiveAbandoned`, the latter followed by `ReceiveReleased` where pages had
to be quarantined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class AttemptKey(NamedTuple):
    """One try of one request; granted at most once, ever."""

    request_id: str
    attempt: int


# ---------------------------------------------------------------- sending side


@dataclass(frozen=True)
class SendStats:
    """How the sending of one attempt went, by the sender's clock."""

    kv_bytes: int
    """Bytes landed at the receiver."""
    transfer_s: float
    """From the first write posted to the last byte landed."""
    tail_s: float
    """Last byte landed minus last layer computed; never negative."""
    first_post_s: float
    """From `begin` to the first write posted."""


@dataclass(frozen=True)
class SendFinished:
    """Every page was written and every write is done."""

    key: AttemptKey
    stats: SendStats


@dataclass(frozen=True)
class SendCancelled:
    """`cancel` was called; no write is in flight and none will follow."""

    key: AttemptKey
    stats: SendStats


@dataclass(frozen=True)
class SendFailed:
    """A write failed or pages were never given; no write is in flight and none will follow."""

    key: AttemptKey
    stats: SendStats
    message: str


@dataclass(frozen=True)
class SendClosed:
    """The session's agent is destroyed; no write can reach the receiver any more."""

    key: AttemptKey
    stats: SendStats


SendEvent = SendFinished | SendCancelled | SendFailed | SendClosed

# ---------------------------------------------------------------- receiving side


@dataclass(frozen=True)
class ReceiveComplete:
    """Every (layer, page) of the grant holds its KV; no write to these pages can follow."""

    key: AttemptKey


@dataclass(frozen=True)
class ReceiveAbandoned:
    """The attempt ended without completion."""

    key: AttemptKey
    complete_pages: tuple[int, ...]
    """Destination pages of the longest prefix of the grant that is complete over all layers: valid KV that no
    write can reach any more. The host may commit them as cached prefix."""
    quarantined_pages: tuple[int, ...]
    """The rest: a late write may still reach them until `ReceiveReleased`."""


@dataclass(frozen=True)
class ReceiveReleased:
    """No write can reach these pages any more; they leave quarantine."""

    key: AttemptKey
    page_ids: tuple[int, ...]


@dataclass(frozen=True)
class FenceDue:
    """End this session now (close its WebSocket, then `PageReceiver.close`)."""

    session: str
    why: str


ReceiveEvent = ReceiveComplete | ReceiveAbandoned | ReceiveReleased

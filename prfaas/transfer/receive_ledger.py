"""The receiving side's books: what each grant still lacks, and which pages a late write may still reach.

Pure: no I/O and no clock. `PageReceiver` drives it, tests explore it. Every event has a defined effect in
every state; what does not fit is counted and changes nothing.

    expect ──▶ LIVE ── last bit ──▶ (complete: gone)
                │
                ├─ abandon ──▶ QUARANTINED ── confirm, finish, fence, last bit ──▶ (released: gone)
                └─ confirm, fence ──▶ (abandoned and released: gone)

A page whose bits are all set is safe at once: each (layer, page) is written once per attempt and its tag
follows the data, so no write to it can be under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from prfaas.transfer.events import AttemptKey, FenceDue, ReceiveAbandoned, ReceiveComplete, ReceiveReleased

ReceiveAction = ReceiveComplete | ReceiveAbandoned | ReceiveReleased | FenceDue


@dataclass(frozen=True)
class QuarantineLimits:
    """When a session's quarantine calls for the fence."""

    age_s: float
    """Any page quarantined for longer."""
    share: float = 0.05
    """More than this share of the pool …"""
    share_age_s: float = 0.5
    """… quarantined for longer than this: long enough for the answer to an ordinary cancel, so that giving
    up one long prompt does not cost the session its other attempts."""


@dataclass
class TagCounts:
    """Tags that changed nothing, or not everything that they named."""

    duplicate: int = 0
    unknown: int = 0
    """Of no attempt of that session: late, or stale."""
    invalid: int = 0
    """Malformed, or naming a layer or page outside the grant."""


@dataclass
class _Attempt:
    session: str
    first_page: int
    page_ids: tuple[int, ...]
    missing: list[int]
    """Per layer: bit i set = prompt page first_page + i has not arrived."""
    finished: bool = False
    """The sender said that every write is done."""
    quarantined_since_s: float | None = None
    quarantined: tuple[int, ...] = ()

    def complete_prefix(self) -> int:
        """Pages that are complete over all layers, counted from the first up to the first gap."""
        lacking = 0
        for bits in self.missing:
            lacking |= bits
        return len(self.page_ids) if lacking == 0 else (lacking & -lacking).bit_length() - 1


@dataclass
class ReceiveLedger:
    """Attempts of all sessions of one worker.

    Args:
        num_layers, num_pages: shape of the pool.
        limits: when quarantine calls for the fence.
    """

    num_layers: int
    num_pages: int
    limits: QuarantineLimits
    counts: TagCounts = field(default_factory=TagCounts)
    _sessions: dict[str, bool] = field(default_factory=dict)
    """Open sessions → whether `FenceDue` has been given for it."""
    _attempts: dict[AttemptKey, _Attempt] = field(default_factory=dict)
    _held: set[int] = field(default_factory=set)
    """Pages of live attempts, and quarantined ones."""

    # ------------------------------------------------------------ what there is

    @property
    def live_attempts(self) -> int:
        return sum(attempt.quarantined_since_s is None for attempt in self._attempts.values())

    @property
    def quarantined_pages(self) -> int:
        return sum(len(attempt.quarantined) for attempt in self._attempts.values())

    def complete_prefix_pages(self, key: AttemptKey) -> int:
        """Pages of the grant's longest prefix that is complete over all layers; 0 for unknown keys."""
        attempt = self._attempts.get(key)
        return attempt.complete_prefix() if attempt else 0

    # ------------------------------------------------------------ events

    def open(self, session: str) -> None:
        """A session with a receive agent of its own exists.

        Raises:
            ValueError: it is open already.
        """
        if session in self._sessions:
            raise ValueError(f"session {session} is open already")
        self._sessions[session] = False

    def expect(self, session: str, key: AttemptKey, first_page: int, page_ids: Sequence[int]) -> None:
        """A grant is about to be sent for prompt pages first_page, … in `page_ids`, over all layers.

        Raises:
            ValueError: session unknown, key in use, or the pages cannot be granted.
        """
        if session not in self._sessions:
            raise ValueError(f"session {session} is not open")
        if key in self._attempts:
            raise ValueError(f"attempt {key} is expected already")
        wanted = set(page_ids)
        if not page_ids or len(wanted) != len(page_ids) or first_page < 0:
            raise ValueError(f"grant of {key} needs distinct pages from a page index >= 0")
        if min(wanted) < 0 or max(wanted) >= self.num_pages:
            raise ValueError(f"grant of {key} names pages outside the pool of {self.num_pages}")
        if taken := wanted & self._held:
            raise ValueError(f"grant of {key} names pages of other attempts: {sorted(taken)[:8]}")
        self._held |= wanted
        everything = (1 << len(page_ids)) - 1
        self._attempts[key] = _Attempt(session, first_page, tuple(page_ids), [everything] * self.num_layers)

    def tag(
        self, session: str, key: AttemptKey, layer: int, runs: Iterable[tuple[int, int]]
    ) -> list[ReceiveAction]:
        """A write has landed: (first prompt page, count) runs of one layer."""
        attempt = self._attempts.get(key)
        if attempt is None or attempt.session != session:
            self.counts.unknown += 1
            return []
        arrived = _bits(runs, attempt.first_page, len(attempt.page_ids))
        if arrived is None or not 0 <= layer < self.num_layers:
            self.counts.invalid += 1
            return []
        if arrived & ~attempt.missing[layer]:
            self.counts.duplicate += 1
        attempt.missing[layer] &= ~arrived
        if any(attempt.missing):
            return []
        if attempt.quarantined_since_s is not None:
            return self._release(key)
        self._drop(key)
        return [ReceiveComplete(key)]

    def abandon(self, key: AttemptKey, now_s: float) -> list[ReceiveAction]:
        """The attempt is given up on this side; its sender may not know yet."""
        attempt = self._attempts.get(key)
        if attempt is None or attempt.quarantined_since_s is not None:
            return []
        actions = self._quarantine(key, now_s)
        return actions + self._release(key) if attempt.finished else actions

    def confirm(self, key: AttemptKey, now_s: float) -> list[ReceiveAction]:
        """The sender has given up and will write nothing more."""
        return self.abandon(key, now_s) + self._release(key)

    def finish(self, key: AttemptKey) -> list[ReceiveAction]:
        """The sender has done every write; the last tags may still be on their way."""
        attempt = self._attempts.get(key)
        if attempt is None:
            return []
        if attempt.quarantined_since_s is not None:
            return self._release(key)
        attempt.finished = True
        return []

    def fenced(self, session: str, now_s: float) -> list[ReceiveAction]:
        """The session's receive agent is destroyed: nothing can land through it any more."""
        self._sessions.pop(session, None)
        keys = [key for key, attempt in self._attempts.items() if attempt.session == session]
        return [action for key in keys for action in self.confirm(key, now_s)]

    def tick(self, now_s: float) -> list[ReceiveAction]:
        """Time has passed: ask for the fence of sessions whose quarantine is too old or too big. Once per
        session."""
        actions: list[ReceiveAction] = []
        for session, due in self._sessions.items():
            if not due and (why := self._overdue(session, now_s)):
                self._sessions[session] = True
                actions.append(FenceDue(session, why))
        return actions

    # ------------------------------------------------------------ transitions

    def _quarantine(self, key: AttemptKey, now_s: float) -> list[ReceiveAction]:
        attempt = self._attempts[key]
        complete = attempt.complete_prefix()
        attempt.quarantined_since_s = now_s
        attempt.quarantined = attempt.page_ids[complete:]
        self._held.difference_update(attempt.page_ids[:complete])
        return [ReceiveAbandoned(key, attempt.page_ids[:complete], attempt.quarantined)]

    def _release(self, key: AttemptKey) -> list[ReceiveAction]:
        """Free what `key` has in quarantine; nothing for unknown keys."""
        attempt = self._attempts.get(key)
        if attempt is None:
            return []
        self._drop(key)
        return [ReceiveReleased(key, attempt.quarantined)]

    def _drop(self, key: AttemptKey) -> None:
        attempt = self._attempts.pop(key)
        self._held.difference_update(attempt.quarantined or attempt.page_ids)

    def _overdue(self, session: str, now_s: float) -> str:
        """Why the session's quarantine calls for the fence; empty if it does not."""
        lingering = 0
        for key, attempt in self._attempts.items():
            if attempt.session != session or attempt.quarantined_since_s is None:
                continue
            age_s = now_s - attempt.quarantined_since_s
            if age_s > self.limits.age_s:
                return f"pages of {key} are quarantined for {age_s:.3f} s, limit {self.limits.age_s:.3f} s"
            if age_s > self.limits.share_age_s:
                lingering += len(attempt.quarantined)
        if lingering > self.limits.share * self.num_pages:
            return f"{lingering} of {self.num_pages} pages are quarantined, limit {self.limits.share:.0%}"
        return ""


def _bits(runs: Iterable[tuple[int, int]], first_page: int, num_pages: int) -> int | None:
    """The runs as a bit mask over the grant's pages; None if a run is empty or leaves the grant."""
    mask = 0
    for start, count in runs:
        offset = start - first_page
        if count < 1 or offset < 0 or offset + count > num_pages:
            return None
        mask |= ((1 << count) - 1) << offset
    return mask

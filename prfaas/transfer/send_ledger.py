"""The sending side's books: what each attempt has queued and in flight, and when it is over.

Pure: no I/O and no clock. `PageSender` drives it, tests explore it. Every event has a defined effect in
every state. An attempt ends exactly once, and never while a write of it is in flight, unless the session's
agent has been destroyed: so its end is when its source pages may be reused.

    begin ──▶ RUNNING ── end, nothing queued, nothing in flight ──▶ finished
                │
                └─ cancel | fail | write failed ──▶ STOPPING ── nothing in flight ──▶ cancelled | failed
    closed (session): every attempt of it ──▶ closed
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from prfaas.transfer.events import AttemptKey

Outcome = Literal["finished", "cancelled", "failed", "closed"]


@dataclass(frozen=True)
class SendEnded:
    """The attempt is over: no write of it is in flight and none will follow; its source pages may be
    reused."""

    key: AttemptKey
    outcome: Outcome
    message: str = ""


@dataclass
class _Attempt:
    session: str
    queued: int = 0
    """Writes handed over and not posted."""
    in_flight: int = 0
    ended: bool = False
    """No further writes will be handed over."""
    stopping: Outcome | None = None
    message: str = ""


@dataclass
class SendLedger:
    """Attempts of all sessions of one worker."""

    _sessions: set[str] = field(default_factory=set)
    _attempts: dict[AttemptKey, _Attempt] = field(default_factory=dict)

    def running(self, key: AttemptKey) -> bool:
        """Whether the attempt is known and takes writes."""
        attempt = self._attempts.get(key)
        return attempt is not None and attempt.stopping is None

    @property
    def attempts(self) -> int:
        return len(self._attempts)

    # ------------------------------------------------------------ events

    def open(self, session: str) -> None:
        """A session with a send agent of its own exists.

        Raises:
            ValueError: it is open already.
        """
        if session in self._sessions:
            raise ValueError(f"session {session} is open already")
        self._sessions.add(session)

    def begin(self, session: str, key: AttemptKey) -> None:
        """A grant has arrived.

        Raises:
            ValueError: session unknown or key in use.
        """
        if session not in self._sessions:
            raise ValueError(f"session {session} is not open")
        if key in self._attempts:
            raise ValueError(f"attempt {key} is in use")
        self._attempts[key] = _Attempt(session)

    def queue(self, key: AttemptKey, writes: int) -> bool:
        """Writes have been handed over; False (and nothing happens) unless the attempt is running."""
        if not self.running(key):
            return False
        attempt = self._attempts[key]
        if attempt.ended:
            raise ValueError(f"attempt {key} was ended: no writes may follow")
        attempt.queued += writes
        return True

    def post(self, key: AttemptKey) -> bool:
        """May a queued write be posted now? True moves it into flight."""
        if not self.running(key) or self._attempts[key].queued == 0:
            return False
        self._attempts[key].queued -= 1
        self._attempts[key].in_flight += 1
        return True

    def done(self, key: AttemptKey) -> list[SendEnded]:
        """A write has been acknowledged."""
        attempt = self._attempts.get(key)
        if attempt is None or attempt.in_flight == 0:
            return []
        attempt.in_flight -= 1
        return self._settle(key)

    def write_failed(self, key: AttemptKey, message: str) -> list[SendEnded]:
        """A write has ended with an error, or could not be posted."""
        attempt = self._attempts.get(key)
        if attempt is None or attempt.in_flight == 0:
            return []
        attempt.in_flight -= 1
        return self.fail(key, message)

    def fail(self, key: AttemptKey, message: str) -> list[SendEnded]:
        """The attempt cannot succeed any more."""
        return self._stop(key, "failed", message)

    def cancel(self, key: AttemptKey) -> list[SendEnded]:
        """The attempt is not wanted any more."""
        return self._stop(key, "cancelled", "")

    def end(self, key: AttemptKey) -> list[SendEnded]:
        """No further writes will be handed over."""
        attempt = self._attempts.get(key)
        if attempt is None:
            return []
        attempt.ended = True
        return self._settle(key)

    def closed(self, session: str) -> list[SendEnded]:
        """The session's agent is destroyed: its writes read and write nothing any more."""
        self._sessions.discard(session)
        keys = [key for key, attempt in self._attempts.items() if attempt.session == session]
        for key in keys:
            del self._attempts[key]
        return [SendEnded(key, "closed") for key in keys]

    # ------------------------------------------------------------ transitions

    def _stop(self, key: AttemptKey, outcome: Outcome, message: str) -> list[SendEnded]:
        """Drop what is queued; the first reason to stop is the one that counts."""
        attempt = self._attempts.get(key)
        if attempt is None:
            return []
        if attempt.stopping is None:
            attempt.stopping, attempt.message, attempt.queued = outcome, message, 0
        return self._settle(key)

    def _settle(self, key: AttemptKey) -> list[SendEnded]:
        attempt = self._attempts[key]
        if attempt.in_flight or not (attempt.stopping or (attempt.ended and not attempt.queued)):
            return []
        del self._attempts[key]
        return [SendEnded(key, attempt.stopping or "finished", attempt.message)]

"""The sending side's books: exactly one end per attempt, never while a write is in flight."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prfaas.transfer.events import AttemptKey
from prfaas.transfer.send_ledger import SendEnded, SendLedger

KEY = AttemptKey("r", 1)


def make() -> SendLedger:
    ledger = SendLedger()
    ledger.open("s")
    ledger.begin("s", KEY)
    return ledger


def test_finished_only_when_ended_and_all_writes_are_done() -> None:
    ledger = make()
    ledger.queue(KEY, 2)
    assert ledger.post(KEY)
    assert ledger.done(KEY) == []
    assert ledger.end(KEY) == []
    assert ledger.post(KEY)
    assert ledger.done(KEY) == [SendEnded(KEY, "finished")]
    assert ledger.attempts == 0


def test_cancel_drops_what_is_queued_and_waits_for_what_is_in_flight() -> None:
    ledger = make()
    ledger.queue(KEY, 3)
    ledger.post(KEY)
    assert ledger.cancel(KEY) == []
    assert not ledger.post(KEY)
    assert not ledger.queue(KEY, 1)
    assert ledger.done(KEY) == [SendEnded(KEY, "cancelled")]


def test_a_failed_write_fails_the_attempt_after_the_others_in_flight() -> None:
    ledger = make()
    ledger.queue(KEY, 2)
    ledger.post(KEY)
    ledger.post(KEY)
    assert ledger.write_failed(KEY, "peer gone") == []
    assert ledger.cancel(KEY) == []
    assert ledger.write_failed(KEY, "again") == [SendEnded(KEY, "failed", "peer gone")]


def test_closing_a_session_ends_its_attempts_at_once() -> None:
    ledger = make()
    ledger.open("t")
    ledger.begin("t", AttemptKey("q", 1))
    ledger.queue(KEY, 1)
    ledger.post(KEY)
    assert ledger.closed("s") == [SendEnded(KEY, "closed")]
    assert ledger.done(KEY) == []
    assert ledger.attempts == 1
    with pytest.raises(ValueError, match="not open"):
        ledger.begin("s", AttemptKey("r", 2))


def test_events_of_unknown_attempts_change_nothing() -> None:
    ledger = SendLedger()
    assert not ledger.post(KEY)
    assert not ledger.queue(KEY, 1)
    for actions in (ledger.done(KEY), ledger.write_failed(KEY, ""), ledger.cancel(KEY), ledger.end(KEY)):
        assert actions == []
    assert ledger.closed("nowhere") == []


def test_handing_over_after_the_end_is_a_bug_that_is_named() -> None:
    ledger = make()
    ledger.queue(KEY, 1)
    ledger.end(KEY)
    with pytest.raises(ValueError, match="was ended"):
        ledger.queue(KEY, 1)


class SendingSide(RuleBasedStateMachine):
    """Random events; a shadow count of what is in flight says when an attempt may end."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = SendLedger()
        self.ledger.open("s")
        self.in_flight: dict[AttemptKey, int] = {}
        self.ended: list[AttemptKey] = []
        self.begun: set[AttemptKey] = set()
        self.over: set[AttemptKey] = set()
        self.closed = False

    def note(self, ended: list[SendEnded]) -> None:
        for end in ended:
            assert end.key in self.begun
            assert end.key not in self.ended, "ended twice"
            assert end.outcome == "closed" or self.in_flight[end.key] == 0, "ended with a write in flight"
            self.ended.append(end.key)

    keys = st.builds(AttemptKey, st.just("r"), st.integers(1, 3))

    @precondition(lambda self: not self.closed)
    @rule(key=keys)
    def begin(self, key: AttemptKey) -> None:
        if key not in self.begun:
            self.ledger.begin("s", key)
            self.begun.add(key)
            self.in_flight[key] = 0

    @rule(key=keys, writes=st.integers(0, 3))
    def queue(self, key: AttemptKey, writes: int) -> None:
        if key not in self.over:
            self.ledger.queue(key, writes)

    @rule(key=keys)
    def post(self, key: AttemptKey) -> None:
        if self.ledger.post(key):
            assert key not in self.ended
            self.in_flight[key] += 1

    @rule(key=keys, ok=st.booleans())
    def write_ends(self, key: AttemptKey, ok: bool) -> None:
        if self.in_flight.get(key):
            self.in_flight[key] -= 1
            self.note(self.ledger.done(key) if ok else self.ledger.write_failed(key, "error"))

    @rule(key=keys)
    def end(self, key: AttemptKey) -> None:
        self.over.add(key)
        self.note(self.ledger.end(key))

    @rule(key=keys)
    def cancel(self, key: AttemptKey) -> None:
        self.note(self.ledger.cancel(key))

    @rule()
    def close(self) -> None:
        self.note(self.ledger.closed("s"))
        self.in_flight = dict.fromkeys(self.in_flight, 0)
        self.closed = True

    @invariant()
    def every_attempt_is_either_in_the_books_or_ended(self) -> None:
        assert self.ledger.attempts == len(self.begun) - len(self.ended)

    def teardown(self) -> None:
        self.note(self.ledger.closed("s"))
        assert sorted(self.ended) == sorted(self.begun)


SendingSide.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)
TestSendingSide = SendingSide.TestCase

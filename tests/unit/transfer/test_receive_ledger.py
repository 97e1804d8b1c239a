"""The receiving side's books: one end per attempt, and no page free while a write may still reach it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.transfer.events import (
    AttemptKey,
    FenceDue,
    ReceiveAbandoned,
    ReceiveComplete,
    ReceiveReleased,
)
from prfaas.transfer.receive_ledger import QuarantineLimits, ReceiveLedger

KEY = AttemptKey("r", 1)
LAYERS = 2


def make(pages: int = 100, age_s: float = 2.0) -> ReceiveLedger:
    ledger = ReceiveLedger(LAYERS, pages, QuarantineLimits(age_s))
    ledger.open("s")
    return ledger


def drained(ledger: ReceiveLedger) -> bool:
    return not (ledger.live_attempts or ledger.quarantined_pages or ledger._held or ledger._attempts)


def test_complete_when_every_layer_has_every_page() -> None:
    ledger = make()
    ledger.expect("s", KEY, 3, [7, 5, 9])
    assert ledger.tag("s", KEY, 0, [(3, 3)]) == []
    assert ledger.tag("s", KEY, 1, [(4, 2)]) == []
    assert ledger.complete_prefix_pages(KEY) == 0
    assert ledger.tag("s", KEY, 1, [(3, 1)]) == [ReceiveComplete(KEY)]
    assert drained(ledger)


@given(
    order=st.permutations([(layer, page) for layer in range(LAYERS) for page in range(4)]), repeats=st.data()
)
@settings(deadline=None, max_examples=50)
def test_order_and_repetition_of_tags_do_not_matter(
    order: list[tuple[int, int]], repeats: st.DataObject
) -> None:
    ledger = make()
    ledger.expect("s", KEY, 0, [1, 2, 3, 4])
    for position, (layer, page) in enumerate(order):
        actions = ledger.tag("s", KEY, layer, [(page, 1)])
        assert actions == ([ReceiveComplete(KEY)] if position == len(order) - 1 else [])
        again = repeats.draw(st.sampled_from(order[: position + 1]))
        assert ledger.tag("s", KEY, again[0], [(again[1], 1)]) == []
    assert ledger.counts.duplicate == len(order) - 1
    assert ledger.counts.unknown == 1  # the repetition after completion


def test_stale_and_foreign_tags_touch_only_their_own_attempt() -> None:
    ledger = make()
    ledger.open("other")
    ledger.expect("s", AttemptKey("r", 2), 0, [1])
    for session, key in [("s", KEY), ("other", AttemptKey("r", 2)), ("unheard of", AttemptKey("r", 2))]:
        for layer in range(LAYERS):
            assert ledger.tag(session, key, layer, [(0, 1)]) == []
    assert ledger.counts.unknown == 6
    assert ledger.complete_prefix_pages(AttemptKey("r", 2)) == 0


@pytest.mark.parametrize(
    ("layer", "runs"),
    [
        (-1, [(0, 1)]),
        (LAYERS, [(0, 1)]),
        (0, [(0, 3)]),
        (0, [(-1, 1)]),
        (0, [(0, 0)]),
        (0, [(0, 1), (9, 2**30)]),
    ],
)
def test_a_tag_outside_the_grant_sets_no_bit(layer: int, runs: list[tuple[int, int]]) -> None:
    ledger = make()
    ledger.expect("s", KEY, 0, [1, 2])
    assert ledger.tag("s", KEY, layer, runs) == []
    assert ledger.counts.invalid == 1
    assert ledger._attempts[KEY].missing == [3, 3]


def test_an_abandoned_attempt_keeps_its_complete_prefix_and_quarantines_the_rest() -> None:
    ledger = make()
    ledger.expect("s", KEY, 0, [10, 11, 12, 13])
    ledger.tag("s", KEY, 0, [(0, 3)])
    ledger.tag("s", KEY, 1, [(0, 1), (2, 2)])
    assert ledger.abandon(KEY, 0.0) == [ReceiveAbandoned(KEY, (10,), (11, 12, 13))]
    assert ledger.abandon(KEY, 0.0) == []
    assert ledger.quarantined_pages == 3
    ledger.expect(
        "s", AttemptKey("r", 2), 0, [10]
    )  # complete pages are free for others, quarantined ones not
    with pytest.raises(ValueError, match="other attempts"):
        ledger.expect("s", AttemptKey("r", 3), 0, [12])
    assert ledger.confirm(KEY, 1.0) == [ReceiveReleased(KEY, (11, 12, 13))]
    assert ledger.confirm(KEY, 1.0) == []


def test_the_last_landing_write_releases_the_quarantine_without_confirmation() -> None:
    ledger = make()
    ledger.expect("s", KEY, 0, [10])
    ledger.abandon(KEY, 0.0)
    assert ledger.tag("s", KEY, 0, [(0, 1)]) == []
    assert ledger.tag("s", KEY, 1, [(0, 1)]) == [ReceiveReleased(KEY, (10,))]
    assert drained(ledger)


def test_the_senders_failure_abandons_and_releases_at_once() -> None:
    ledger = make()
    ledger.expect("s", KEY, 0, [10, 11])
    assert ledger.confirm(KEY, 0.0) == [
        ReceiveAbandoned(KEY, (), (10, 11)),
        ReceiveReleased(KEY, (10, 11)),
    ]
    assert drained(ledger)


def test_finished_before_the_last_tag_still_completes_and_then_needs_no_quarantine() -> None:
    ledger = make()
    ledger.expect("s", KEY, 0, [10])
    assert ledger.finish(KEY) == []
    ledger.tag("s", KEY, 0, [(0, 1)])
    assert ledger.tag("s", KEY, 1, [(0, 1)]) == [ReceiveComplete(KEY)]
    ledger.expect("s", AttemptKey("r", 2), 0, [10])
    ledger.finish(AttemptKey("r", 2))
    assert ledger.abandon(AttemptKey("r", 2), 0.0)[1:] == [ReceiveReleased(AttemptKey("r", 2), (10,))]


def test_the_fence_ends_every_attempt_of_its_session_and_of_no_other() -> None:
    ledger = make()
    ledger.open("t")
    other = AttemptKey("q", 1)
    ledger.expect("s", KEY, 0, [1])
    ledger.expect("s", AttemptKey("r", 2), 0, [2])
    ledger.expect("t", other, 0, [3])
    ledger.abandon(KEY, 0.0)
    assert ledger.fenced("s", 1.0) == [
        ReceiveReleased(KEY, (1,)),
        ReceiveAbandoned(AttemptKey("r", 2), (), (2,)),
        ReceiveReleased(AttemptKey("r", 2), (2,)),
    ]
    assert ledger.live_attempts == 1
    with pytest.raises(ValueError, match="not open"):
        ledger.expect("s", AttemptKey("r", 3), 0, [5])


def test_old_quarantine_asks_for_the_fence_once() -> None:
    ledger = make()
    ledger.expect("s", KEY, 0, [1])
    ledger.abandon(KEY, 10.0)
    assert ledger.tick(12.0) == []
    (due,) = ledger.tick(12.1)
    assert isinstance(due, FenceDue)
    assert due.session == "s"
    assert ledger.tick(20.0) == []


def test_big_quarantine_asks_for_the_fence_once_a_cancel_had_time_to_be_answered() -> None:
    ledger = make(pages=100)
    ledger.expect("s", KEY, 0, list(range(6)))
    ledger.abandon(KEY, 10.0)
    assert ledger.tick(10.4) == []
    (due,) = ledger.tick(10.6)
    assert "6 of 100 pages" in due.why


@pytest.mark.parametrize("pages", [[], [1, 1], [-1], [100]])
def test_impossible_grants_are_refused(pages: list[int]) -> None:
    ledger = make()
    with pytest.raises(ValueError, match="grant of"):
        ledger.expect("s", KEY, 0, pages)
    assert drained(ledger)


def test_a_key_or_session_in_use_is_refused() -> None:
    ledger = make()
    ledger.expect("s", KEY, 0, [1])
    with pytest.raises(ValueError, match="expected already"):
        ledger.expect("s", KEY, 0, [2])
    with pytest.raises(ValueError, match="open already"):
        ledger.open("s")

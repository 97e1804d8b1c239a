"""Both ledgers together, joined by a lossy, reordering network: the safety the transfer layer rests on.

The model knows which writes are in flight and may land at any time, even after everybody gave up, until
either agent is destroyed. It checks that no such write can ever touch a page that the receiver has let go of,
and read no source page that the sender has let go of. Hypothesis draws a seed; a walk over the events that
can happen goes deeper than its own choice of rules.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.transfer.events import AttemptKey, FenceDue, ReceiveAbandoned, ReceiveComplete, ReceiveReleased
from prfaas.transfer.receive_ledger import QuarantineLimits, ReceiveAction, ReceiveLedger
from prfaas.transfer.send_ledger import SendEnded, SendLedger

LAYERS, PAGES = 2, 8
SESSION = "s"


class Transfer:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.receive = ReceiveLedger(LAYERS, PAGES, QuarantineLimits(5.0, share_age_s=2.0))
        self.send = SendLedger()
        self.receive.open(SESSION)
        self.send.open(SESSION)
        self.now_s = 0.0
        self.attempts = 0
        self.free = set(range(PAGES))
        self.granted: dict[AttemptKey, list[int]] = {}
        self.grants: list[AttemptKey] = []
        self.queued: dict[AttemptKey, list[tuple[int, int]]] = {}
        self.flying: list[tuple[AttemptKey, int, int]] = []
        self.tags: list[tuple[AttemptKey, int, int]] = []
        self.to_sender: list[AttemptKey] = []
        self.to_receiver: list[SendEnded] = []
        self.ends: Counter[AttemptKey] = Counter()
        self.send_ends: Counter[AttemptKey] = Counter()
        self.fence_due = self.receiver_gone = self.sender_gone = False

    # ---- the two hosts

    def received(self, actions: list[ReceiveAction]) -> None:
        for action in actions:
            if isinstance(action, FenceDue):
                self.fence_due = True
            elif isinstance(action, ReceiveComplete):
                self.ends[action.key] += 1
                self.let_go(action.key, self.granted.pop(action.key))
            elif isinstance(action, ReceiveAbandoned):
                self.ends[action.key] += 1
                assert [*action.complete_pages, *action.quarantined_pages] == self.granted[action.key]
                self.let_go(action.key, list(action.complete_pages))
            elif isinstance(action, ReceiveReleased):
                del self.granted[action.key]
                self.let_go(action.key, list(action.page_ids))

    def let_go(self, key: AttemptKey, pages: list[int]) -> None:
        assert not self.free.intersection(pages), "a page was let go twice"
        if not (self.receiver_gone or self.sender_gone):
            assert not [w for w in self.flying if w[0] == key and w[2] in pages], "a write may still land"
        self.free.update(pages)

    def sent(self, ended: list[SendEnded]) -> None:
        for end in ended:
            self.send_ends[end.key] += 1
            assert self.sender_gone or not [w for w in self.flying if w[0] == end.key], "source still read"
            self.queued.pop(end.key, None)
            self.to_receiver.append(end)

    # ---- what can happen

    def postable(self) -> list[AttemptKey]:
        return [key for key, writes in self.queued.items() if writes and self.send.running(key)]

    def possible(self) -> list[Callable[[], None]]:
        receiver, sender = not self.receiver_gone, not self.sender_gone
        events = {
            self.grant: receiver and len(self.free) >= 3,
            self.grant_arrives: sender and self.grants,
            self.post: sender and self.postable(),
            self.write_ends: sender and self.flying,
            self.tag_arrives: self.tags,
            self.receiver_gives_up: self.granted and self.random.random() < 0.3,
            self.cancel_arrives: sender and self.to_sender,
            self.answer_arrives: receiver and self.to_receiver,
            self.time_passes: self.random.random() < 0.3,
            self.fence: receiver and (self.fence_due or self.sender_gone),
            self.sender_closes: sender and self.random.random() < 0.02,
        }
        return [event for event, possible in events.items() if possible]

    def pop(self, items: list[Any]) -> Any:
        return items.pop(self.random.randrange(len(items)))

    def grant(self) -> None:
        pages = self.random.sample(sorted(self.free), self.random.randint(1, 3))
        self.attempts += 1
        key = AttemptKey("r", self.attempts)
        self.free.difference_update(pages)
        self.granted[key] = pages
        self.receive.expect(SESSION, key, 0, pages)
        self.grants.append(key)
        self.queued[key] = [(layer, page) for page in pages for layer in range(LAYERS)]

    def grant_arrives(self) -> None:
        key = self.pop(self.grants)
        self.send.begin(SESSION, key)
        self.send.queue(key, len(self.queued[key]))
        self.sent(self.send.end(key))

    def post(self) -> None:
        key = self.random.choice(self.postable())
        assert self.send.post(key)
        layer, page = self.pop(self.queued[key])
        assert self.receiver_gone or page in self.granted.get(key, []), "written to a page of others"
        self.flying.append((key, layer, page))

    def write_ends(self) -> None:
        key, layer, page = self.pop(self.flying)
        if self.random.random() < 0.1:
            self.sent(self.send.write_failed(key, "error"))
            return
        if not self.receiver_gone:
            self.tags.append((key, layer, page))
        self.sent(self.send.done(key))

    def tag_arrives(self) -> None:
        key, layer, page = tag = self.pop(self.tags)
        if self.random.random() < 0.2:
            self.tags.append(tag)  # it will arrive again
        pages = self.granted.get(key, [])
        prompt_page = pages.index(page) if page in pages else 0
        self.received(self.receive.tag(SESSION, key, layer, [(prompt_page, 1)]))

    def receiver_gives_up(self) -> None:
        key = self.random.choice(list(self.granted))
        self.to_sender.append(key)
        self.received(self.receive.abandon(key, self.now_s))

    def cancel_arrives(self) -> None:
        self.sent(self.send.cancel(self.pop(self.to_sender)))

    def answer_arrives(self) -> None:
        end = self.pop(self.to_receiver)
        if end.outcome == "finished":
            self.received(self.receive.finish(end.key))
        elif end.outcome in ("cancelled", "failed"):
            self.received(self.receive.confirm(end.key, self.now_s))

    def time_passes(self) -> None:
        self.now_s += self.random.uniform(0.1, 3.0)
        self.received(self.receive.tick(self.now_s))

    def fence(self) -> None:
        self.receiver_gone = True
        self.received(self.receive.fenced(SESSION, self.now_s))

    def sender_closes(self) -> None:
        self.sender_gone = True
        self.sent(self.send.closed(SESSION))

    # ---- what must always hold

    def check(self) -> None:
        held = {page for pages in self.granted.values() for page in pages}
        assert len(self.free | held) == PAGES, "a page is lost"
        assert max(self.ends.values(), default=0) <= 1, "the receiver's host was told twice"
        assert max(self.send_ends.values(), default=0) <= 1, "the sender's host was told twice"

    def finish(self) -> None:
        """However far it got: destroying both agents leaves nothing behind."""
        self.sender_gone = self.receiver_gone = True
        self.sent(self.send.closed(SESSION))
        self.received(self.receive.fenced(SESSION, self.now_s))
        assert self.free == set(range(PAGES))
        assert not self.granted
        assert self.send.attempts == 0
        assert self.receive.live_attempts == self.receive.quarantined_pages == 0
        assert all(self.ends[AttemptKey("r", n)] == 1 for n in range(1, self.attempts + 1))


@given(seed=st.integers(0, 2**32), steps=st.integers(5, 150))
@settings(deadline=None, max_examples=400)
def test_no_write_reaches_a_page_that_was_let_go_and_nothing_leaks(seed: int, steps: int) -> None:
    transfer = Transfer(seed)
    for _ in range(steps):
        if possible := transfer.possible():
            transfer.random.choice(possible)()
            transfer.check()
    transfer.finish()

"""Random use of the page pool, checked against its invariants and a naive model of its contents.

The model remembers what each page physically holds (its tokens and everything before them). A match is
right only if the pages found hold exactly the prompt's tokens: the fault this guards against is another
request's KV.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from prfaas.errors import OutOfPages
from prfaas.kv.pool import PagePool

PAGE = 2
NUM_PAGES = 10
# Few tokens and short prompts, so that prefixes often coincide.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12)
salts = st.sampled_from(["", "s"])


class Held:
    """A sequence as the engine holds it."""

    def __init__(self, token_ids: list[int], salt: str, pages: list[int], computed: int) -> None:
        self.token_ids, self.salt, self.pages, self.computed = token_ids, salt, pages, computed


class PoolMachine(RuleBasedStateMachine):
    sequences = Bundle("sequences")
    quarantines = Bundle("quarantines")

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.pool = PagePool(NUM_PAGES, PAGE, self._stored, self._removed)
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.pins: dict[int, int] = {}
        self.quarantined: set[int] = set()

    def _stored(self, hashes: list[int]) -> None:
        assert hashes
        assert not self.known & set(hashes), "stored twice"
        self.known |= set(hashes)

    def _removed(self, hashes: list[int]) -> None:
        assert set(hashes) <= self.known, "removed but never stored"
        self.known -= set(hashes)

    def _pin(self, pages: list[int]) -> None:
        for page in pages:
            self.pins[page] = self.pins.get(page, 0) + 1

    def _unpin(self, pages: list[int]) -> None:
        for page in pages:
            self.pins[page] -= 1
            if not self.pins[page]:
                del self.pins[page]

    @rule(target=sequences, prompt=prompts, salt=salts)
    def start(self, prompt: list[int], salt: str) -> Any:
        match = self.pool.match(prompt, salt, max_tokens=len(prompt) - 1)
        assert match.tokens == len(match.page_ids) * PAGE <= len(prompt) - 1
        for i, page in enumerate(match.page_ids):
            assert self.content[page] == (salt, tuple(prompt[: (i + 1) * PAGE])), "another prefix's KV"
        self._pin(match.page_ids)
        lacking = -(-len(prompt) // PAGE) - len(match.page_ids)
        try:
            fresh = self.pool.allocate(lacking)
        except OutOfPages:
            assert lacking > self.pool.available
            self.pool.release(match.page_ids)
            self._unpin(match.page_ids)
            return multiple()
        assert not set(fresh) & set(self.pins), "allocated a page in use"
        assert not set(fresh) & self.quarantined
        self._pin(fresh)
        for page in fresh:
            self.content.pop(page, None)
        return Held(prompt, salt, [*match.page_ids, *fresh], match.tokens)

    @rule(held=sequences, more=st.integers(1, 8), from_start=st.booleans())
    def compute(self, held: Held, more: int, from_start: bool) -> None:
        start = 0 if from_start else held.computed // PAGE
        held.computed = min(held.computed + more, len(held.token_ids))
        for i in range(held.computed // PAGE):
            # Writing what is there already is what the pages of a match would show as well.
            self.content[held.pages[i]] = (held.salt, tuple(held.token_ids[: (i + 1) * PAGE]))
        self.pool.commit(held.token_ids[: held.computed], held.pages, held.salt, start_page=start)
        again = self.pool.match(held.token_ids[: held.computed], held.salt)
        assert again.tokens == held.computed // PAGE * PAGE, "committed content is not found"
        self.pool.release(again.page_ids)

    @rule(held=consumes(sequences), reverse=st.booleans())
    def finish(self, held: Held, reverse: bool) -> None:
        self.pool.release(held.pages[::-1] if reverse else held.pages)
        self._unpin(held.pages)

    @rule(target=sequences, held=sequences)
    def share(self, held: Held) -> Held:
        self.pool.pin(held.pages)
        self._pin(held.pages)
        return Held(held.token_ids, held.salt, held.pages, held.computed)

    @rule(target=quarantines, n=st.integers(1, 3))
    def allocate_and_quarantine(self, n: int) -> Any:
        if n > self.pool.available:
            return multiple()
        pages = self.pool.allocate(n)
        for page in pages:
            self.content.pop(page, None)
        self.pool.quarantine(pages)
        self.quarantined |= set(pages)
        return pages

    @rule(pages=consumes(quarantines))
    def confirm(self, pages: list[int]) -> None:
        self.pool.unquarantine(pages)
        self.quarantined -= set(pages)

    @invariant()
    def bookkeeping_is_sound(self) -> None:
        self.pool.check()
        counts = self.pool.counts()
        assert counts.free + counts.pinned + counts.cached + counts.quarantined == NUM_PAGES
        assert counts.quarantined == len(self.quarantined)
        assert counts.pinned >= len(self.pins)
        assert self.pool.total_pins == sum(self.pins.values())
        assert set(self.pool.snapshot()) == self.known

    def teardown(self) -> None:
        # Everything given back: all pages are free or cached, and all can be had at once.
        self.pool.release([page for page, pins in self.pins.items() for _ in range(pins)])
        self.pool.unquarantine(self.quarantined)
        self.pool.check()
        assert self.pool.available == NUM_PAGES
        assert len(self.pool.allocate(NUM_PAGES)) == NUM_PAGES
        assert self.known == set()


TestPoolModel = PoolMachine.TestCase
TestPoolModel.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)

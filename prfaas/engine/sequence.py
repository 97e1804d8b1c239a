"""One sequence as the batch scheduler sees it: tokens, pages, and how far it has come."""

from __future__ import annotations

from prfaas.engine.interface import SequenceRequest
from prfaas.errors import OutOfPages
from prfaas.kv.pool import PagePool


class Sequence:
    """State of one submitted `SequenceRequest`.

    Attributes:
        order: arrival number; smaller is older and goes first.
        tokens: prompt and everything generated.
        computed: positions [0, computed) hold valid KV.
        page_ids: pages held, in order; each carries one pin of ours.
    """

    def __init__(self, order: int, request: SequenceRequest) -> None:
        self.order = order
        self.id = request.sequence_id
        self.salt = request.cache_salt
        self.sampling = request.sampling
        self.tokens = list(request.token_ids)
        self.prompt_tokens = len(request.token_ids)
        self.page_ids = list(request.page_ids)
        self.computed = request.computed_tokens
        self.started = False
        """A chunk of its prefill has been planned."""
        self.rematch = False
        """Preempted: look into the prefix cache before computing anything again."""
        self.ending: tuple[str, str] | None = None
        """(finish reason, error) to end with once the running step's result is in."""

    @property
    def prefill_end(self) -> int:
        """Prefill covers positions before this; the last token is decode's first input."""
        return len(self.tokens) - 1

    @property
    def prefill_left(self) -> int:
        """Tokens to compute before this sequence can decode."""
        return self.prefill_end - self.computed

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def is_preemptible(self) -> bool:
        """A prefill-only sequence is not: its pages are being streamed to another worker."""
        return self.sampling is not None

    def grow(self, pool: PagePool, end: int) -> bool:
        """Hold pages for positions [0, end); False if the pool has too few."""
        lacking = -(-end // pool.page_size) - len(self.page_ids)
        if lacking > 0:
            try:
                self.page_ids += pool.allocate(lacking)
            except OutOfPages:
                return False
        return True

    def advance(self, pool: PagePool, computed: int) -> None:
        """KV of positions before `computed` is valid now: publish the pages that became full."""
        first = self.computed // pool.page_size
        self.computed = computed
        if computed // pool.page_size > first:
            pool.commit(self.tokens[:computed], self.page_ids, self.salt, start_page=first)

    def give_back(self, pool: PagePool) -> None:
        """Release every page and forget the KV; generated tokens stay."""
        pages, self.page_ids = self.page_ids, []
        self.computed = 0
        self.started = False
        pool.release(pages)

    def reuse_cache(self, pool: PagePool) -> None:
        """After preemption: take what the prefix cache still has of the sequence."""
        self.rematch = False
        match = pool.match(self.tokens, self.salt, max_tokens=self.prefill_end)
        self.page_ids, self.computed = match.page_ids, match.tokens

"""One request while it lives; what becomes of it goes to the recorder's columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulations.engine.page_cache import NO_BLOCKS, Blocks, Held

if TYPE_CHECKING:
    from simulations.engine.decode_worker import DecodeWorker
    from simulations.engine.links import Stream
    from simulations.engine.prefill_worker import PrefillWorker


class Request:
    """State over all attempts. Fields below `attempt` belong to the current one."""

    __slots__ = (
        "answer",
        "arrival_s",
        "attempt",
        "avoid",
        "blocks",
        "cached",
        "computed",
        "context",
        "decode",
        "early_pages",
        "fetched",
        "finish_step",
        "first_chunk_s",
        "first_token_s",
        "generated",
        "held",
        "id",
        "index",
        "order",
        "output",
        "placed_s",
        "preempted",
        "prompt",
        "session",
        "site",
        "site_cached",
        "site_computed_s",
        "site_held",
        "site_queued_s",
        "site_started_s",
        "state",
        "stream",
        "submitted_s",
    )

    def __init__(
        self,
        index: int,
        arrival_s: float,
        prompt: int,
        output: int,
        blocks: Blocks,
        session: str,
        answer: Blocks = NO_BLOCKS,
    ) -> None:
        self.index = index
        self.id = str(index)
        self.arrival_s = arrival_s
        self.prompt = prompt
        self.output = output
        """True length of the answer: known to decode workers only."""
        self.blocks = blocks
        """Ids of the full pages of `prompt - 1` tokens, as the router gets them."""
        self.session = session
        self.answer = answer
        """Ids of the full pages that the answer fills, as far as a later prompt repeats them."""
        self.attempt = 0
        self.avoid: tuple[str, ...] = ()
        self.first_token_s = -1.0
        self.restart()

    def restart(self) -> None:
        """Forget the former attempt."""
        self.state = QUEUED
        self.decode: DecodeWorker | None = None
        self.site: PrefillWorker | None = None
        """Prefill worker; None = the decode worker computes."""
        self.placed_s = 0.0
        self.held: Held | None = None
        """Pages on the decode worker."""
        self.cached = 0
        """Tokens that the decode worker had itself."""
        self.fetched = False
        """Whether the prompt's KV came from another worker."""
        self.order = 0
        """Age in the decode worker's engine: the youngest is preempted."""
        self.computed = 0
        """Tokens with KV on the decode worker, where it prefills here."""
        self.submitted_s = 0.0
        self.first_chunk_s = -1.0
        self.generated = 0
        """Answer tokens before the last join."""
        self.preempted = False
        """Whether it joined a batch and lost its pages again."""
        self.context = 0
        """Tokens held when it joined the batch, less the worker's step count then: context at step s is
        `context + s`."""
        self.finish_step = 0
        self.site_held: Held | None = None
        self.early_pages = 0
        """Cached pages held on the prefill worker while it waits for its turn there."""
        self.site_cached = 0
        self.site_queued_s = 0.0
        self.site_started_s = 0.0
        self.site_computed_s = 0.0
        self.stream: Stream | None = None


QUEUED, FETCHING, WAITING, READY, DECODING, ENDED = range(6)
"""Waiting for pages on the decode worker; prefilled elsewhere; waiting or prefilling in the decode worker's
engine; waiting for a slot; in the batch; over."""

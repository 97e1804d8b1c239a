"""What the control process asks of an engine, and what it hears back.

An engine computes; it owns no pages. The control process owns the page pool (`prfaas.kv`) and NIXL. The
native engine (`prfaas.engine.native`) keeps its batch scheduler in the control process and one runner
process per rank; another engine may take its place behind `Engine`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from prfaas.protocol.messages import Sampling, TokenLogprobs

if TYPE_CHECKING:
    from prfaas.kv.layout import KVLayout
    from prfaas.kv.pool import PagePool


class SequenceRequest(msgspec.Struct, kw_only=True):
    """One sequence to run.

    The host has already matched the prefix cache and pinned `page_ids`; positions before
    `computed_tokens` hold valid KV. The engine allocates further pages from the pool as it needs them.
    """

    sequence_id: str
    token_ids: list[int]
    """Prompt. Prefill covers all of it but the last token, which is the first decode step's input."""
    page_ids: list[int]
    """Pages of the prompt held so far, in order; at least the ones holding `computed_tokens`.
    The engine takes over the pins and gives them back (`PagePool.release`) when the sequence ends."""
    computed_tokens: int
    cache_salt: str = ""
    sampling: Sampling | None = None
    """None = prefill only: the sequence ends when KV of token_ids[:-1] is in its pages."""


class ChunkPlan(msgspec.Struct, frozen=True):
    """A prefill chunk about to run; announced before the step starts, so that layers can be streamed."""

    sequence_id: str
    start_token: int
    end_token: int
    """KV of positions [start_token, end_token) is written by this step."""
    layers_done_before: int
    """Value of the layer counter when the step starts: layer i's KV is in its pages as soon as the
    counter is >= layers_done_before + i + 1."""
    last: bool
    """Whether this chunk ends the prefill: a partly filled last page is final now."""
    page_ids: list[int] = []
    """The sequence's pages in order, at least those of positions 0 … end_token - 1."""


class SequenceEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something happened to a sequence; delivered on the control process's event loop, in order."""

    sequence_id: str
    token_ids: list[int] = []
    """Newly sampled tokens (none for a prefill-only sequence)."""
    logprobs: list[TokenLogprobs] = []
    prefilled_tokens: int | None = None
    """KV of positions before this are computed (set whenever a prefill chunk has ended)."""
    finish_reason: str | None = None
    """`stop` (EOS or stop token), `length`, `prefilled` (prefill only), `cancelled` or `error`; set
    once, on the last event. The sequence's pages have been given back when it is delivered, except
    after `prefilled`, where the host takes the pins back over (`page_ids`)."""
    page_ids: list[int] = []
    """With `prefilled`: the pages, in order, pins now the host's."""
    error: str = ""


class EngineLoad(msgspec.Struct, frozen=True):
    """A snapshot for status messages and the router's queue terms."""

    waiting: int
    running: int
    waiting_prefill_tokens: int
    """Prompt tokens not computed yet, over waiting and running sequences."""
    running_context_tokens: int
    prefill_tokens_total: int
    decode_tokens_total: int
    steps_total: int
    busy_s_total: float


class StepProfile(msgspec.Struct, frozen=True):
    """Measured step times, for the router's cost model.

    prefill_s(n, c)  = prefill_base_s + n·prefill_token_s + n·(c + n/2)·prefill_context_s
        one chunk of n new tokens after c cached ones (n ≤ chunk_tokens)
    decode_s(B, C)   = decode_base_s + B·decode_sequence_s + C·decode_context_s
        one step of B sequences with C context tokens in all
    """

    chunk_tokens: int
    prefill_base_s: float
    prefill_token_s: float
    prefill_context_s: float
    decode_base_s: float
    decode_sequence_s: float
    decode_context_s: float


class LayerCounter(ABC):
    """A number in shared memory that the runner bumps after each layer's KV is written."""

    @abstractmethod
    def value(self) -> int:
        """Layers finished since the engine started, over all steps; never decreases."""


class Engine(ABC):
    """One engine instance, seen from the control process's event loop (not thread safe)."""

    layout: KVLayout
    pool: PagePool
    layer_counter: LayerCounter
    on_chunk: Callable[[ChunkPlan], None]
    """Called right before a step that computes prompt KV; set by the role (default: do nothing)."""

    @abstractmethod
    async def start(self) -> None:
        """Start the runner processes and load the model.

        Raises:
            EngineFailure: a runner died or did not become ready; the message carries its last words.
        """

    @abstractmethod
    async def stop(self) -> None:
        """End the runners; running sequences get a last event `cancelled`."""

    @abstractmethod
    def submit(self, request: SequenceRequest, on_event: Callable[[SequenceEvent], None]) -> None:
        """Queue a sequence. FIFO within prefill; decodes join the running batch as slots free up."""

    @abstractmethod
    def cancel(self, sequence_id: str) -> None:
        """End a sequence at the next step boundary (it gets `cancelled`). Unknown ids are ignored."""

    @abstractmethod
    def load(self) -> EngineLoad: ...

    @abstractmethod
    async def calibrate(self, contexts: Sequence[int], batches: Sequence[int]) -> StepProfile:
        """Time prefill chunks and decode steps on scratch pages and fit a `StepProfile`."""

"""Feeds the trace's requests in: as recorded, or each turn after the answer to the one before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulations.engine.page_cache import NO_BLOCKS, Blocks
from simulations.engine.request import Request
from simulations.engine.worker_spec import FleetError
from simulations.engine.world import World
from simulations.workload.trace import Trace


class Arrivals:
    """Only one request beyond the present waits in the event loop, however long the trace is.

    Raises:
        FleetError: the trace's blocks do not fit the fleet's pages.
    """

    def __init__(self, world: World, trace: Trace, page_size: int, *, causal: bool) -> None:
        self._world = world
        self._trace = trace
        self._blocks = PageHashes(trace, page_size)
        self._sessions = len(trace.session) > 0
        answers = trace.answers if trace.block_tokens == page_size else {}
        self._answers = {row: ids.view(np.uint64) for row, ids in answers.items()}
        self._next_turn: dict[int, int] = {}
        """Request → the next one of its session, in a causal replay."""
        self._firsts: Sequence[int] = range(len(trace))
        if causal and len(trace.session):
            self._firsts = self._chain()
        self._position = 0

    def start(self) -> None:
        """Schedule the first arrival."""
        self._schedule()

    def ended(self, request: Request) -> None:
        """A request is over: its session's next turn follows after the think time."""
        turn = self._next_turn.pop(request.index, None)
        if turn is not None:
            think_s = self._trace.think_s.item(turn) if len(self._trace.think_s) else 0.0
            self._world.loop.at(self._world.loop.now_s + think_s, self._arrive, turn)

    def _chain(self) -> list[int]:
        """Link the turns of each session; returns the first ones."""
        last: dict[int, int] = {}
        firsts = []
        for index, session in enumerate(self._trace.session.tolist()):
            former = last.get(session) if session >= 0 else None
            if former is None:
                firsts.append(index)
            else:
                self._next_turn[former] = index
            last[session] = index
        return firsts

    def _schedule(self) -> None:
        if self._position < len(self._firsts):
            index = self._firsts[self._position]
            self._position += 1
            self._world.loop.at(self._trace.arrival_s.item(index), self._on_time, index)

    def _on_time(self, index: int) -> None:
        self._schedule()
        self._arrive(index)

    def _arrive(self, index: int) -> None:
        trace = self._trace
        session = trace.session.item(index) if self._sessions else -1
        self._world.arrive(
            Request(
                index,
                self._world.loop.now_s,
                trace.prompt_tokens.item(index),
                trace.output_tokens.item(index),
                self._blocks.of(index),
                str(session) if session >= 0 else "",
                self._answers.get(index, NO_BLOCKS),
            )
        )


class PageHashes:
    """Hashes of a prompt's full pages (without its last token), from the trace's block ids.

    Where a block is several pages, each gets an id of its own; where a page is several blocks, the last
    one's id stands for it, since ids are chained.
    """

    def __init__(self, trace: Trace, page_size: int) -> None:
        block = trace.block_tokens
        if len(trace.block_offsets) > 1 and block % page_size and page_size % block:
            raise FleetError(
                f"page_size={page_size} and the trace's blocks of {block} tokens do not divide each other; "
                f"set page_size to {block}"
            )
        self._page = page_size
        self._per_block = max(1, block // page_size)
        self._per_page = max(1, page_size // block)
        # Writable, though nobody does: compiled code takes read-only arrays for another type.
        self._blocks: Blocks = np.require(trace.blocks, requirements=["C", "W"]).view(np.uint64)
        self._offsets = trace.block_offsets
        self._prompt = trace.prompt_tokens

    def of(self, index: int) -> Blocks:
        """The request's page hashes, first page first; read only."""
        if len(self._offsets) <= 1:
            return _NONE
        pages = (self._prompt.item(index) - 1) // self._page
        blocks = self._blocks[self._offsets.item(index) : self._offsets.item(index + 1)]
        if self._per_page > 1:
            blocks = np.ascontiguousarray(blocks[self._per_page - 1 :: self._per_page])
        elif self._per_block > 1:
            parts = np.arange(self._per_block, dtype=np.uint64)
            blocks = (blocks[:, None] * np.uint64(self._per_block) + parts).reshape(-1)
        return blocks[:pages]


_NONE: Blocks = np.zeros(0, np.uint64)

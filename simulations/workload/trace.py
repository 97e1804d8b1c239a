"""A request trace as columns: what arrives when, how long it is, which prompts share a prefix.

Columns instead of objects, so that a million requests are a few tens of megabytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from prfaas.errors import ConfigError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival; row i of every column is request i.

    Block ids are chained: equal ids at the same depth mean equal prompts up to there. A trace without prefix
    identity has no blocks at all, and then nothing of it is ever found in a cache.
    """

    name: str
    arrival_s: Floats
    """From the trace's begin, not decreasing. In a causal replay the floor of a first turn's arrival only."""
    prompt_tokens: Ints
    """At least 2: decode computes the last one."""
    output_tokens: Ints
    """True answer length (at least 1); hidden from every policy."""
    block_tokens: int = 512
    """Tokens per block id; the last block of a prompt may be partial and is never cached."""
    blocks: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Block ids of all requests, one after the other."""
    block_offsets: Ints = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    """Request i has `blocks[block_offsets[i]:block_offsets[i + 1]]`; shape [requests + 1] (or [1]: none)."""
    session: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Conversation of each request, or empty: every request stands alone. Turns of one are in trace order."""
    think_s: Floats = field(default_factory=lambda: np.zeros(0, dtype=np.float64))
    """Time between the end of the former turn's answer and this request; used by causal replay."""
    answers: Mapping[int, Ints] = field(default_factory=dict)
    """By request: ids of the blocks behind its prompt's that its answer fills, where a recording knows them
    because a later prompt repeats them. Known for blocks of the fleet's page size only."""
    notes: tuple[str, ...] = ()
    """What the importer assumed or left out, for people."""

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def duration_s(self) -> float:
        """From the first to the last arrival."""
        return float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) else 0.0

    @property
    def rate_per_s(self) -> float:
        """Mean arrival rate."""
        return (len(self) - 1) / self.duration_s if self.duration_s > 0 else float("inf")

    def block_hashes(self, index: int) -> tuple[int, ...]:
        """Ids of the full blocks of the prompt without its last token, as the router hashes it."""
        if len(self.block_offsets) <= 1:
            return ()
        begin = int(self.block_offsets[index])
        full = (int(self.prompt_tokens[index]) - 1) // self.block_tokens
        end = min(begin + full, int(self.block_offsets[index + 1]))
        return tuple(self.blocks[begin:end].tolist())

    def repaged(self, page_tokens: int) -> Trace:
        """The same prompts named by blocks of `page_tokens`, as a fleet with that page size hashes them.

        Larger pages take the id of their last block: it names all before it. Smaller ones are numbered within
        their block; two prompts that part inside a block still part at its begin, as the trace cannot tell.

        Raises:
            ConfigError: one size does not divide the other.
        """
        if page_tokens == self.block_tokens:
            return self
        if len(self.block_offsets) <= 1:
            return replace(self, block_tokens=page_tokens, answers={})
        if page_tokens % self.block_tokens == 0:
            return self._coarser(page_tokens)
        if page_tokens >= 1 and self.block_tokens % page_tokens == 0:
            return self._finer(page_tokens)
        raise ConfigError(
            f"trace {self.name} has blocks of {self.block_tokens} tokens and the fleet pages of "
            f"{page_tokens}; `page_size` must be a multiple or a divisor"
        )

    def _coarser(self, page_tokens: int) -> Trace:
        times = page_tokens // self.block_tokens
        counts = np.diff(self.block_offsets) // times
        begins = self.block_offsets[:-1] + times - 1
        within, offsets = counting(counts)
        return replace(
            self,
            block_tokens=page_tokens,
            blocks=self.blocks[np.repeat(begins, counts) + times * within],
            block_offsets=offsets,
            answers={},
        )

    def _finer(self, page_tokens: int) -> Trace:
        times = self.block_tokens // page_tokens
        pages = np.diff(self.block_offsets) * times
        counts = np.minimum(self.prompt_tokens // page_tokens, pages)  # a partial block has fewer pages
        within, offsets = counting(counts)
        parents = self.blocks[np.repeat(self.block_offsets[:-1], counts) + within // times]
        blocks = parents * times + within % times
        return replace(self, block_tokens=page_tokens, blocks=blocks, block_offsets=offsets, answers={})

    def at_rate(self, scale: float) -> Trace:
        """The same requests arriving `scale` times as fast (think times are people's and stay)."""
        return replace(self, arrival_s=self.arrival_s / scale)

    def part(self, begin: int, end: int) -> Trace:
        """Requests begin … end-1, starting at time 0."""
        arrival_s = self.arrival_s[begin:end]
        offsets, blocks = self.block_offsets, self.blocks
        if len(offsets) > 1:
            offsets = offsets[begin : end + 1]
            blocks = blocks[offsets[0] : offsets[-1]]
            offsets = offsets - offsets[0]
        return replace(
            self,
            arrival_s=arrival_s - (arrival_s[0] if len(arrival_s) else 0.0),
            prompt_tokens=self.prompt_tokens[begin:end],
            output_tokens=self.output_tokens[begin:end],
            blocks=blocks,
            block_offsets=offsets,
            session=self.session[begin:end],
            think_s=self.think_s[begin:end],
            answers={row - begin: ids for row, ids in self.answers.items() if begin <= row < end},
        )


def counting(counts: Ints) -> tuple[Ints, Ints]:
    """(0 … counts[i]-1 for every i, one after the other; offsets [len(counts) + 1])."""
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts), offsets

"""From an importer's rows to a checked `Trace`: every complaint names file, line and field."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prfaas.errors import ConfigError
from simulations.workload.trace import Floats, Ints, Trace

MAX_TOKENS = 2**24
"""Longer prompts or answers are taken for damage (the longest contexts of today are 10 M tokens)."""
MAX_SECONDS = 1e8
"""A trace of over three years is taken for a wrong unit."""


@dataclass(slots=True)
class TraceBuilder:
    """Columns in the making; one `add` per request, then `build`."""

    source: str
    """File, for errors."""
    names: dict[str, str] = field(default_factory=dict)
    """What the file calls `arrival_s`, `prompt_tokens`, `output_tokens`, `blocks`, `think_s`."""
    lines: array[int] = field(default_factory=lambda: array("q"))
    arrival_s: array[float] = field(default_factory=lambda: array("d"))
    prompt_tokens: array[int] = field(default_factory=lambda: array("q"))
    output_tokens: array[int] = field(default_factory=lambda: array("q"))
    blocks: array[int] = field(default_factory=lambda: array("Q"))
    block_counts: array[int] = field(default_factory=lambda: array("q"))
    sessions: list[str | None] = field(default_factory=list)
    think_s: array[float] = field(default_factory=lambda: array("d"))

    def add(
        self,
        line: int,
        arrival_s: float,
        prompt_tokens: int,
        output_tokens: int,
        blocks: list[int] | tuple[int, ...] | None = None,
        session: str | None = None,
        think_s: float = 0.0,
    ) -> None:
        """Append one request; `blocks` None = the trace has no prefix identity here."""
        try:
            self.prompt_tokens.append(prompt_tokens)
            self.output_tokens.append(output_tokens)
        except OverflowError:
            name = "prompt_tokens" if abs(prompt_tokens) > MAX_TOKENS else "output_tokens"
            raise self.error(
                line, name, f"is not a number of tokens: {max(prompt_tokens, output_tokens)}"
            ) from None
        try:
            self.blocks.extend(blocks or ())
        except (OverflowError, TypeError):
            raise self.error(line, "blocks", "must be whole numbers of 0 … 2⁶⁴-1") from None
        self.lines.append(line)
        self.arrival_s.append(arrival_s)
        self.block_counts.append(-1 if blocks is None else len(blocks))
        self.sessions.append(session)
        self.think_s.append(think_s)

    def error(self, line: int, column: str, problem: str) -> ConfigError:
        """What is wrong with `column` in `line`, under the file's own name of it."""
        return ConfigError(f"{self.source}, line {line}: `{self.names.get(column, column)}` {problem}")

    def build(self, name: str, block_tokens: int, *, sort: bool = False) -> Trace:
        """The trace, from time 0.

        Args:
            sort: the file's order means nothing; else a request that arrives before the one above it is
                an error.

        Raises:
            ConfigError: the first bad value, by line.
        """
        if not len(self.lines):
            raise ConfigError(f"{self.source} holds no request")
        arrival_s = np.array(self.arrival_s)
        prompts, answers = np.array(self.prompt_tokens), np.array(self.output_tokens)
        self._refuse(~np.isfinite(arrival_s), "arrival_s", "is not a finite number", arrival_s)
        self._refuse(arrival_s < 0, "arrival_s", "is negative", arrival_s)
        self._refuse(
            arrival_s - arrival_s.min() > MAX_SECONDS,
            "arrival_s",
            "is years after the first; which unit is it?",
            arrival_s,
        )
        if not sort:
            falls = np.concatenate([[False], np.diff(arrival_s) < 0])
            self._refuse(falls, "arrival_s", "is before the line above; sort the file by time", arrival_s)
        for column, values in (("prompt_tokens", prompts), ("output_tokens", answers)):
            self._refuse(values < 1, column, "must be at least 1", values)
            self._refuse(values > MAX_TOKENS, column, f"is more than {MAX_TOKENS}", values)
        think_s = np.array(self.think_s)
        self._refuse(
            ~((think_s >= 0) & (think_s <= MAX_SECONDS)), "think_s", "must be a time of 0 or more", think_s
        )
        self._check_block_counts(prompts, block_tokens)
        return self._trace(name, block_tokens, arrival_s, np.maximum(prompts, 2), answers, think_s)

    def _refuse(self, bad: NDArray[np.bool_], column: str, problem: str, values: Floats | Ints) -> None:
        if bad.any():
            first = int(np.argmax(bad))
            unit = " s" if values.dtype.kind == "f" else ""
            raise self.error(self.lines[first], column, f"{problem}, got {values[first]:.10g}{unit}")

    def _check_block_counts(self, prompts: Ints, block_tokens: int) -> None:
        counts = np.array(self.block_counts)
        if (counts < 0).all():
            return
        if (counts < 0).any():
            first = int(np.argmax(counts < 0))
            raise self.error(self.lines[first], "blocks", "is missing, and other lines have it")
        started = -(-prompts // block_tokens)
        # With the last, partly filled block; without it; or without the last token, as our router hashes.
        bad = (counts != started) & (counts != prompts // block_tokens)
        bad &= counts != (prompts - 1) // block_tokens
        if bad.any():
            first = int(np.argmax(bad))
            raise self.error(
                self.lines[first],
                "blocks",
                f"has {counts[first]} ids; {prompts[first]} tokens in blocks of {block_tokens} "
                f"are {started[first]}",
            )

    def _trace(
        self, name: str, block_tokens: int, arrival_s: Floats, prompts: Ints, answers: Ints, think_s: Floats
    ) -> Trace:
        order = np.argsort(arrival_s, kind="stable")
        has_blocks = self.block_counts[0] >= 0
        blocks, offsets = np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64)
        if has_blocks:
            counts = np.array(self.block_counts)
            given, offsets = reordered(np.array(self.blocks), counts, order)
            blocks = chained(dense(given), offsets)
        has_sessions = any(session is not None for session in self.sessions)
        return Trace(
            name=name,
            arrival_s=arrival_s[order] - arrival_s.min(),
            prompt_tokens=prompts[order],
            output_tokens=answers[order],
            block_tokens=block_tokens,
            blocks=blocks,
            block_offsets=offsets,
            session=self._session_numbers(order) if has_sessions else np.zeros(0, dtype=np.int64),
            think_s=think_s[order] if has_sessions else np.zeros(0),
        )

    def _session_numbers(self, order: NDArray[np.intp]) -> Ints:
        """Sessions numbered by first appearance; a request without one is a session of its own."""
        numbers: dict[object, int] = {}
        keys = (self.sessions[index] if self.sessions[index] is not None else int(index) for index in order)
        return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def reordered(
    blocks: NDArray[np.uint64], counts: Ints, order: NDArray[np.intp]
) -> tuple[NDArray[np.uint64], Ints]:
    """(blocks, offsets [requests + 1]) with the requests in `order`."""
    begins = np.concatenate([[0], np.cumsum(counts)])
    offsets = np.concatenate([[0], np.cumsum(counts[order])])
    take = np.repeat(begins[:-1][order] - offsets[:-1], counts[order]) + np.arange(offsets[-1])
    return blocks[take], offsets


def dense(blocks: NDArray[np.uint64]) -> Ints:
    """The same identities numbered from 0: small numbers survive being split into pages."""
    return np.unique(blocks, return_inverse=True)[1].astype(np.int64).reshape(-1)


def chained(blocks: Ints, offsets: Ints) -> Ints:
    """Ids that name a block and all before it. Equal to `blocks` where those do already.

    Some sources number a block by its own content alone: the same id after two different blocks would then
    look like a shared prefix where there is none.
    """
    parents = np.concatenate([[-1], blocks[:-1]])
    parents[offsets[:-1][np.diff(offsets) > 0]] = -1
    seen = np.zeros(int(blocks.max(initial=-1)) + 1, dtype=np.int64)
    seen[blocks] = parents
    if np.array_equal(seen[blocks], parents):
        return blocks
    numbers: dict[tuple[int, int], int] = {}
    result = np.empty_like(blocks)
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        parent = -1
        for index in range(begin, end):
            parent = numbers.setdefault((parent, int(blocks[index])), len(numbers))
            result[index] = parent
    return result

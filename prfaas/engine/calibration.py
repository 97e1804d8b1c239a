"""Measure an engine's step times and fit the router's `StepProfile` to them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain, combinations, product, zip_longest
from statistics import median

import msgspec
import numpy as np
from numpy.typing import NDArray

from prfaas.engine.interface import StepProfile
from prfaas.engine.step import RunnerError, SequenceStep, StepPlan, StepResult
from prfaas.errors import EngineFailure, OutOfPages
from prfaas.kv.pool import PagePool
from prfaas.protocol.messages import Sampling

Execute = Callable[[StepPlan], Awaitable[StepResult | RunnerError]]

MAX_ROUNDS = 5
MIN_POINTS = 8
"""Measured even if the budget is spent: the four corners of both families."""


class PrefillPoint(msgspec.Struct, frozen=True):
    """One chunk of `tokens` new tokens after `context` cached ones."""

    tokens: int
    context: int

    def features(self) -> tuple[float, float, float]:
        """Factors of base, token and context seconds in `StepProfile`."""
        return 1.0, float(self.tokens), self.tokens * (self.context + self.tokens / 2)


class DecodePoint(msgspec.Struct, frozen=True):
    """One step of `batch` sequences with `context` tokens each."""

    batch: int
    context: int

    def features(self) -> tuple[float, float, float]:
        """Factors of base, sequence and context seconds in `StepProfile`."""
        return 1.0, float(self.batch), float(self.batch * self.context)


Point = PrefillPoint | DecodePoint


def fit_profile(chunk_tokens: int, seconds: dict[Point, list[float]]) -> StepProfile:
    """The `StepProfile` that explains the measured seconds best.

    Medians per point, so that a disturbed step counts little; *relative* errors are minimised, so that short
    steps weigh as much as long ones; no coefficient is negative.

    Raises:
        ValueError: there is no prefill or no decode point.
    """
    fits = []
    for family in (PrefillPoint, DecodePoint):
        points = [point for point in seconds if isinstance(point, family)]
        if not points:
            raise ValueError(f"no {family.__name__} was measured")
        measured = np.array([median(seconds[point]) for point in points])
        features = np.array([point.features() for point in points])
        fits.append(nonnegative_least_squares(features / measured[:, None], np.ones(len(points))))
    return StepProfile(chunk_tokens, *(float(x) for x in fits[0]), *(float(x) for x in fits[1]))


def nonnegative_least_squares(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """argmin over x ≥ 0 of |a·x - b|, for a few columns.

    The minimum is the ordinary least-squares solution on its own support, so trying every support finds it.
    """
    columns = a.shape[1]
    best, best_error = np.zeros(columns), float(b @ b)
    # Columns differ by many orders of magnitude: scale them, or lstsq drops the small ones as noise.
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0.0] = 1.0
    supports = chain.from_iterable(combinations(range(columns), size) for size in range(1, columns + 1))
    for support in map(list, supports):
        part = np.linalg.lstsq(a[:, support] / scale[support], b, rcond=None)[0]
        error = float(np.sum((a[:, support] / scale[support] @ part - b) ** 2))
        if (part >= 0.0).all() and error < best_error:
            best, best_error = np.zeros(columns), error
            best[support] = part / scale[support]
    return best


async def measure_profile(
    execute: Execute,
    pool: PagePool,
    *,
    chunk_tokens: int,
    context_length: int,
    contexts: Sequence[int],
    batches: Sequence[int],
    budget_s: float,
) -> StepProfile:
    """Time steps on scratch pages, several rounds within about `budget_s` seconds, and fit.

    Args:
        execute: runs one step on an otherwise idle engine.
        pool: lends the scratch pages; nothing is published in it.
        contexts: cached tokens before a chunk, and context of each decoding sequence; those that do not
            fit the model or the pool are shortened.
        batches: numbers of sequences in a decode step.

    Raises:
        ValueError: `contexts` or `batches` is empty.
        OutOfPages: no page is free for scratch.
        EngineFailure: a step failed.
    """
    if not contexts or not batches:
        raise ValueError("calibration needs at least one context and one batch size")
    if not pool.available:
        raise OutOfPages(f"calibration needs scratch pages, all {pool.num_pages} are in use")
    room = min(context_length, pool.available * pool.page_size)
    chunk = max(1, min(chunk_tokens, room // 2))
    usable = sorted({max(0, min(context, room - chunk - 1)) for context in contexts})
    points = _points(chunk, usable, sorted(set(batches)))
    scratch = pool.allocate(min(pool.available, max(_pages(point, pool.page_size) for point in points)))
    try:
        seconds = await _measure(execute, points, scratch, pool.page_size, budget_s)
    finally:
        pool.release(scratch)
    return fit_profile(chunk_tokens, seconds)


def _points(chunk: int, contexts: list[int], batches: list[int]) -> list[Point]:
    """Chunks and decodes in turn, corners first: a slow machine gets through the beginning only."""
    sizes = sorted({max(1, chunk // 4), max(1, chunk // 2), chunk})
    prefill = [PrefillPoint(tokens, context) for tokens, context in _corners_first(sizes, contexts)]
    decode = [DecodePoint(batch, context) for batch, context in _corners_first(batches, contexts)]
    return [point for pair in zip_longest(prefill, decode) for point in pair if point is not None]


def _corners_first(a: list[int], b: list[int]) -> list[tuple[int, int]]:
    """Every pair of the ascending lists, those of two extremes first."""
    return sorted(product(a, b), key=lambda p: not (p[0] in (a[0], a[-1]) and p[1] in (b[0], b[-1])))


async def _measure(
    execute: Execute, points: list[Point], scratch: list[int], page_size: int, budget_s: float
) -> dict[Point, list[float]]:
    """Seconds of every point, as often as the budget allows, seen from the control process."""
    plans = {point: StepPlan(0, _sequences(point, scratch, page_size)) for point in points}
    seconds: dict[Point, list[float]] = {}
    end_s = time.perf_counter() + budget_s
    # First steps touch memory and fill torch's caches: run small ones of the longest context unmeasured.
    for family in (PrefillPoint, DecodePoint):
        first = [point for point in points if isinstance(point, family)]
        warm_up = min(first, key=lambda point: (-point.context, point.features()))
        await _timed(execute, plans[warm_up])
    for point in points * MAX_ROUNDS:
        if time.perf_counter() > end_s and len(seconds) >= min(MIN_POINTS, len(points)):
            break
        seconds.setdefault(point, []).append(await _timed(execute, plans[point]))
    return seconds


async def _timed(execute: Execute, plan: StepPlan) -> float:
    began_s = time.perf_counter()
    answer = await execute(plan)
    if isinstance(answer, RunnerError):
        raise EngineFailure(f"calibration step failed: {answer.message}")
    return time.perf_counter() - began_s


def _pages(point: Point, page_size: int) -> int:
    """Pages that the point's step uses where every sequence has its own."""
    match point:
        case PrefillPoint(tokens, context):
            return -(-(context + tokens) // page_size)
        case DecodePoint(batch, context):
            return batch * -(-(context + 1) // page_size)


def _sequences(point: Point, scratch: list[int], page_size: int) -> list[SequenceStep]:
    """The point as a step; sequences share pages where there are too few (the values do not matter)."""
    match point:
        case PrefillPoint(tokens, context):
            pages = scratch[: _pages(point, page_size)]
            return [SequenceStep(token_ids=[0] * tokens, start=context, page_ids=pages, sampling=None)]
        case DecodePoint(batch, context):
            each = _pages(point, page_size) // batch
            return [
                SequenceStep(
                    token_ids=[0],
                    start=context,
                    page_ids=[scratch[(i * each + j) % len(scratch)] for j in range(each)],
                    sampling=Sampling(max_tokens=1),
                )
                for i in range(batch)
            ]

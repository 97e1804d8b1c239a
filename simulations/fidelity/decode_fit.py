"""Decode step times from recorded answers: what each answer's tokens took, beside what ran with it.

While an answer was written, its worker ran B sequences with C tokens in all, on average over that time; both
follow from when the other answers began and ended. So time per token is base + B·sequence + C·context, and
least squares over the answers find the three. Time in which the worker prefilled a prompt of its own is left
out, with a token per chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prfaas.engine.calibration import nonnegative_least_squares
from prfaas.engine.interface import StepProfile
from simulations.fidelity.recording import Row
from simulations.workload.trace import Floats

_LEAST_TOKENS = 3
_PRIOR_WEIGHT = 0.1
"""Of each point of the calibrated profile, beside 1 for each answer."""
_PRIOR_POINTS = ((1, 256), (1, 1024), (2, 1024), (4, 1024), (4, 4096), (8, 8192))
"""(sequences, tokens in all)."""


def fit_decode(profile: StepProfile, worker: str, rows: Sequence[Row]) -> tuple[float, float, float]:
    """(base, sequence, context) seconds of `worker`; the calibrated ones where too few answers tell more."""
    here = [row for row in rows if row.decode == worker and row.complete]
    points = [point for row in here if (point := _point(row, here, profile.chunk_tokens)) is not None]
    prior = (profile.decode_base_s, profile.decode_sequence_s, profile.decode_context_s)
    if len(points) < len(prior):
        return prior
    batch, context, seconds = (np.array(column) for column in zip(*points, strict=True))
    # The profile's shape counts, not its level: bring it to the answers' first.
    level = float(np.median(seconds / _predict(prior, batch, context)))
    prior_batch, prior_context = (
        np.array(column, dtype=np.float64) for column in zip(*_PRIOR_POINTS, strict=True)
    )
    all_batch = np.concatenate([batch, prior_batch])
    all_context = np.concatenate([context, prior_context])
    all_seconds = np.concatenate([seconds, level * _predict(prior, prior_batch, prior_context)])
    weights = np.concatenate([np.ones(len(batch)), np.full(len(prior_batch), _PRIOR_WEIGHT)])
    features = np.stack([np.ones_like(all_batch), all_batch, all_context], axis=1)
    scale = (weights / all_seconds)[:, None]
    base, sequence, per_token = nonnegative_least_squares(features * scale, weights)
    return float(base), float(sequence), float(per_token)


def _predict(coefficients: tuple[float, float, float], batch: Floats, context: Floats) -> Floats:
    base, sequence, per_token = coefficients
    result: Floats = base + batch * sequence + context * per_token
    return result


def _point(row: Row, here: Sequence[Row], chunk_tokens: int) -> tuple[float, float, float] | None:
    """(mean sequences, mean tokens in all, seconds per token) of one answer; None where it is too short."""
    begin_s, end_s = row.arrival_s + row.ttft_s, row.arrival_s + row.end_s
    length_s = end_s - begin_s
    tokens = float(row.completion_tokens - 1)
    if length_s <= 0:
        return None
    batch, context, busy_s = 0.0, 0.0, 0.0
    for other in here:
        share = (
            _overlap(begin_s, end_s, other.arrival_s + other.ttft_s, other.arrival_s + other.end_s) / length_s
        )
        batch += share
        context += share * (other.prompt_tokens + other.completion_tokens / 2)
        busy, chunks = _prefilled_meanwhile(begin_s, end_s, other, chunk_tokens)
        busy_s += busy
        tokens -= chunks
    if tokens < _LEAST_TOKENS or busy_s >= length_s:
        return None
    return batch, context, (length_s - busy_s) / tokens


def _prefilled_meanwhile(begin_s: float, end_s: float, other: Row, chunk_tokens: int) -> tuple[float, float]:
    """(seconds, chunks) of `other`'s local prefill within a time."""
    report = other.report
    if report is None or other.site != other.decode or report.prefill_s <= 0:
        return 0.0, 0.0
    ready_s = other.arrival_s + report.ready_s
    busy_s = _overlap(begin_s, end_s, ready_s - report.prefill_s, ready_s)
    return busy_s, busy_s / report.prefill_s * -(-report.computed_tokens // chunk_tokens)


def _overlap(a: float, b: float, c: float, d: float) -> float:
    return max(0.0, min(b, d) - max(a, c))

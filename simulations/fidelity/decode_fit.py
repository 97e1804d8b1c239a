"""Decode step times from recorded answers: what each answer's tokens took, beside what ran with it.

While an answer was written, its worker ran B sequences with C tokens in all, on average over that time; both
follow from when the other answers began and ended. So time per token is base + B·sequence + C·context, and
least squares over the answers find the three. Time in which the worker prefilled a prompt of its own is left
out, with a token per chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

from prfaas.engine.interface import StepProfile
from simulations.fidelity.activity import Activity, mean_batch, overlap_s, prefill_span
from simulations.fidelity.recording import Row
from simulations.fidelity.step_fit import Coefficients, Sample, fit_steps

_LEAST_TOKENS = 3
_PRIOR_TERMS = tuple(
    (1, batch, context)
    for batch, context in ((1, 256), (1, 1024), (2, 1024), (4, 1024), (4, 4096), (8, 8192))
)


def fit_decode(profile: StepProfile, samples: Sequence[Sample]) -> Coefficients:
    """(base, sequence, context) seconds; the calibrated ones where too few answers tell more."""
    prior = (profile.decode_base_s, profile.decode_sequence_s, profile.decode_context_s)
    return fit_steps(samples, prior, _PRIOR_TERMS)


def decode_samples(worker: str, rows: Sequence[Row], chunk_tokens: int) -> list[Sample]:
    """Seconds per token of each answer that `worker` wrote, with (1, sequences, tokens in all)."""
    here = [row for row in rows if row.decode == worker and row.complete]
    activity = Activity(rows)
    found = (_sample(row, here, activity, chunk_tokens) for row in here)
    return [sample for sample in found if sample is not None]


def _sample(row: Row, here: Sequence[Row], activity: Activity, chunk_tokens: int) -> Sample | None:
    """One answer; None where it is too short."""
    begin_s, end_s = row.arrival_s + row.ttft_s, row.arrival_s + row.end_s
    length_s = end_s - begin_s
    tokens = float(row.completion_tokens - 1)
    if length_s <= 0:
        return None
    busy_s = 0.0
    for other in here:
        busy, chunks = _prefilled_meanwhile(begin_s, end_s, other, chunk_tokens)
        busy_s += busy
        tokens -= chunks
    if tokens < _LEAST_TOKENS or busy_s >= length_s:
        return None
    beside = activity.beside(row.decode, begin_s, end_s)
    batch, context = mean_batch(here, begin_s, end_s)
    return Sample((1.0, batch, context), (length_s - busy_s) / tokens, beside)


def _prefilled_meanwhile(begin_s: float, end_s: float, other: Row, chunk_tokens: int) -> tuple[float, float]:
    """(seconds, chunks) of `other`'s local prefill within a time."""
    report = other.report
    if report is None or other.site != other.decode or report.prefill_s <= 0:
        return 0.0, 0.0
    busy_s = overlap_s(begin_s, end_s, *prefill_span(other))
    return busy_s, busy_s / report.prefill_s * -(-report.computed_tokens // chunk_tokens)

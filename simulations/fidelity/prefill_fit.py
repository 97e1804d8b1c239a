"""Prefill step times from recorded prefills: per chunk, per token, per token and what it attends to, and per
chunk and what was there before it, whose KV each chunk reads once.

A prompt that a decode worker prefills itself takes its steps together with the running decodes: what these
add to a chunk is taken off first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from prfaas.engine.interface import StepProfile
from simulations.fidelity.activity import Activity, mean_batch, prefill_span
from simulations.fidelity.recording import Row
from simulations.fidelity.step_fit import Coefficients, Sample, fit_steps, level
from simulations.hardware.step_times import tokens_read

_PRIOR_CHUNKS = ((0.1, 0.0), (1.0, 0.0), (4.0, 0.0), (8.0, 0.0), (0.1, 8.0), (1.0, 8.0))
"""(new tokens, cached tokens) in chunks."""
_ROUNDS = 3
"""Of finding the common shape and each worker's speed in turn."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """One recorded prefill."""

    sample: Sample
    batch: float = 0.0
    """Sequences that were decoded beside it, on average."""
    context: float = 0.0
    """Their tokens in all."""


def prefills(worker: str, rows: Sequence[Row], chunk_tokens: int) -> list[Prefill]:
    """Seconds of each prefill on `worker`."""
    activity, found = Activity(rows), []
    here = [row for row in rows if row.decode == worker and row.complete]
    for row in rows:
        report = row.report
        if row.site != worker or not row.complete or report is None or report.computed_tokens < 1:
            continue
        if report.prefill_s > 0:
            beside = activity.beside(worker, *prefill_span(row))
            terms = _terms(report.computed_tokens, report.cached_tokens, chunk_tokens)
            batch, context = mean_batch(here, *prefill_span(row)) if row.decode == worker else (0.0, 0.0)
            found.append(Prefill(Sample(terms, report.prefill_s, beside), batch, context))
    return found


def without_decodes(found: Sequence[Prefill], profile: StepProfile, decode: Coefficients) -> list[Sample]:
    """Samples of the prefills alone.

    Args:
        decode: (base, sequence, context) seconds of the worker's decode steps.
    """
    base_s, sequence_s, context_s = decode
    # A step of both has one fixed part.
    own_base_s = base_s - min(profile.prefill_base_s, base_s)
    samples = []
    for prefill in found:
        chunks = prefill.sample.terms[0]
        step_s = (
            prefill.batch * sequence_s + prefill.context * context_s + min(prefill.batch, 1.0) * own_base_s
        )
        samples.append(replace(prefill.sample, extra_s=chunks * step_s))
    return samples


def prefill_prior(profile: StepProfile) -> Coefficients:
    """Seconds per chunk, per token, per token and token before it, and per chunk and token before it.

    Live calibration does not tell the last two apart: a chunk is taken to read KV as fast as a decode does.
    """
    chunk = profile.chunk_tokens
    read_s = min(profile.decode_context_s, profile.prefill_context_s * chunk)
    return (
        profile.prefill_base_s,
        profile.prefill_token_s,
        profile.prefill_context_s - read_s / chunk,
        read_s,
    )


def fit_prefills(
    priors: Sequence[Coefficients], chunks: Sequence[int], samples: Sequence[Sequence[Sample]]
) -> list[Coefficients]:
    """Coefficients of each worker, as `prefill_prior` names them.

    What all workers together show is the prior of each, so that one with few prompts of its own learns from
    the others: the model is the same, and speeds differ more than shapes do.

    Args:
        priors: of each worker.
        chunks: tokens of each one's chunks.
        samples: of each worker.
    """
    points = [_prior_points(chunk) for chunk in chunks]
    common: Coefficients = (1.0,) * len(priors[0])
    for _ in range(_ROUNDS):
        shapes = [_times(common, prior) for prior in priors]
        together = [
            Sample(_times(sample.terms, prior), sample.seconds / speed)
            for prior, shape, rows in zip(priors, shapes, samples, strict=True)
            for speed in (level(rows, shape),)
            for sample in rows
        ]
        prior_terms = [
            _times(terms, prior) for prior, rows in zip(priors, points, strict=True) for terms in rows
        ]
        common = fit_steps(together, (1.0,) * len(common), prior_terms)
    shapes = [_times(common, prior) for prior in priors]
    return [
        tuple(level(rows, shape) * value for value in shape)
        for shape, rows in zip(shapes, samples, strict=True)
    ]


def _prior_points(chunk: int) -> list[Coefficients]:
    return [_terms(max(1.0, new * chunk), cached * chunk, chunk) for new, cached in _PRIOR_CHUNKS]


def _times(a: Coefficients, b: Coefficients) -> Coefficients:
    return tuple(x * y for x, y in zip(a, b, strict=True))


def _terms(new: float, cached: float, chunk_tokens: int) -> Coefficients:
    chunks = -(-new // chunk_tokens)
    return chunks, new, new * (cached + new / 2), tokens_read(chunks, cached, chunk_tokens)

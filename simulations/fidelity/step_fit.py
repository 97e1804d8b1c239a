"""Step times from recorded seconds: least squares over what was measured, with a prior.

Decode steps and prefills are both sums of a few terms, each with a coefficient to be found. The prior's shape
counts as a few points of little weight, at the level of what was measured. Where workers share a machine,
each sample tells what the others did meanwhile, and is brought to what it would have taken alone first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prfaas.engine.calibration import nonnegative_least_squares
from simulations.fleet import MachineSpec
from simulations.workload.trace import Floats

_PRIOR_WEIGHT = 0.1
"""Of each point of the prior, beside 1 for each sample."""
_OUTLIER = 0.3
"""Relative errors beyond this count as much as this: something else held that request up."""
_LEAST_SHARE = 0.1
"""Of a sample's seconds that is its own, whatever `extra_s` says."""

Coefficients = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """`seconds` were measured for a sum of `terms`."""

    terms: tuple[float, ...]
    seconds: float
    beside: tuple[float, float] = (0.0, 0.0)
    """Other workers of the machine that computed prompts, and that only decoded, on average."""
    extra_s: float = 0.0
    """Of the seconds alone: what something else took that is known."""


def alone(samples: Sequence[Sample], machine: MachineSpec | None) -> list[Sample]:
    """The same without others on the machine, and without what else was in them."""
    found = []
    for sample in samples:
        factor = 1.0 if machine is None else machine.slowdown(*sample.beside)
        whole_s = sample.seconds / factor
        found.append(Sample(sample.terms, max(whole_s - sample.extra_s, _LEAST_SHARE * whole_s)))
    return found


def fit_steps(
    samples: Sequence[Sample], prior: Coefficients, prior_terms: Sequence[tuple[float, ...]]
) -> Coefficients:
    """Coefficients that explain the samples; `prior` where there are fewer samples than coefficients."""
    if len(samples) < len(prior):
        return prior
    terms, seconds = _columns(samples)
    prior_rows = np.array(prior_terms, dtype=np.float64)
    all_terms = np.concatenate([terms, prior_rows])
    # The prior's shape counts, not its level.
    all_seconds = np.concatenate([seconds, level(samples, prior) * (prior_rows @ np.array(prior))])
    weights = np.concatenate([np.ones(len(samples)), np.full(len(prior_rows), _PRIOR_WEIGHT)])
    found = nonnegative_least_squares(all_terms * (weights / all_seconds)[:, None], weights)
    return tuple(found.tolist()) if found.any() else prior


def level(samples: Sequence[Sample], coefficients: Coefficients) -> float:
    """measured ÷ explained, the median; 1 without samples."""
    if not samples:
        return 1.0
    terms, seconds = _columns(samples)
    return float(np.median(seconds / (terms @ np.array(coefficients))))


def misfit(samples: Sequence[Sample], coefficients: Coefficients) -> float:
    """Sum of squared relative errors, those of outliers capped."""
    if not samples:
        return 0.0
    terms, seconds = _columns(samples)
    errors = np.abs(terms @ np.array(coefficients) / seconds - 1.0)
    return float(np.sum(np.minimum(errors, _OUTLIER) ** 2))


def _columns(samples: Sequence[Sample]) -> tuple[Floats, Floats]:
    terms = np.array([sample.terms for sample in samples], dtype=np.float64)
    return terms, np.array([sample.seconds for sample in samples])

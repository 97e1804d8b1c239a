"""The linear profile nearest to a cost table: what calibration of such a worker would report.

Least squares of **relative** errors, so that short steps are not drowned by long ones, with no coefficient
below zero. A chunk's weight is the square root of its tokens: between every chunk counting alike (long
prompts are mostly full chunks, which then come out too cheap) and every token counting alike.
`python -m simulations.hardware.fit MODEL/SYSTEM/TP [CHUNK]` prints a profile for `simulations/hardware/`.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prfaas.engine.interface import StepProfile
from simulations.hardware.tables import CostTable, kv_capacity_tokens, load_table

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FitError:
    """Relative errors |fit ÷ table - 1| over the table's cells that were fitted."""

    prefill_median: float
    prefill_max: float
    decode_median: float
    decode_max: float


def fit_profile(table: CostTable, chunk_tokens: int, kv_tokens: int) -> tuple[StepProfile, FitError]:
    """The `StepProfile` nearest to `table`, and how near it is.

    Fitted over chunks of at most `chunk_tokens` after any prefix, and over decode batches whose whole context
    fits `kv_tokens`: what such a worker can be asked to run.
    """
    new, prefix = np.meshgrid(table.new_tokens, table.prefix_tokens, indexing="ij")
    used = new <= max(chunk_tokens, table.new_tokens[0])
    new, prefix, prefill_s = new[used], prefix[used], table.prefill_s[used]
    chunk_terms = np.column_stack([np.ones_like(new), new, new * (prefix + new / 2)])
    chunk = relative_least_squares(chunk_terms, prefill_s, np.sqrt(new))

    batch, context = np.meshgrid(table.batch, table.context, indexing="ij")
    used = (batch * context <= kv_tokens) | ((batch == batch.min()) & (context == context.min()))
    batch, context, decode_s = batch[used], context[used], table.decode_s[used]
    step_terms = np.column_stack([np.ones_like(batch), batch, batch * context])
    step = relative_least_squares(step_terms, decode_s)

    profile = StepProfile(
        chunk_tokens=chunk_tokens,
        prefill_base_s=float(chunk[0]),
        prefill_token_s=float(chunk[1]),
        prefill_context_s=float(chunk[2]),
        decode_base_s=float(step[0]),
        decode_sequence_s=float(step[1]),
        decode_context_s=float(step[2]),
    )
    chunk_error = np.abs(chunk_terms @ chunk / prefill_s - 1.0)
    step_error = np.abs(step_terms @ step / decode_s - 1.0)
    return profile, FitError(
        float(np.median(chunk_error)),
        float(chunk_error.max()),
        float(np.median(step_error)),
        float(step_error.max()),
    )


def relative_least_squares(terms: Floats, values: Floats, weights: Floats | None = None) -> Floats:
    """Coefficients ≥ 0 that minimise Σ weights · (terms·x ÷ values - 1)².

    With a handful of terms the best subset is found by trying them all (the optimum under x ≥ 0 is the
    unconstrained optimum over its nonzero coefficients).

    Args:
        terms: [cases, terms], not negative.
        values: [cases], above 0.
        weights: [cases]; None = all alike.
    """
    root = np.sqrt(np.ones_like(values) if weights is None else weights)
    scaled = terms / values[:, None] * root[:, None]
    columns = scaled.shape[1]
    best, best_error = np.zeros(columns), float((root**2).sum())
    for size in range(1, columns + 1):
        for subset in itertools.combinations(range(columns), size):
            chosen = list(subset)
            weight = np.abs(scaled[:, chosen]).max(axis=0)
            weight[weight == 0.0] = 1.0  # columns differ by ten orders of magnitude
            found = np.linalg.lstsq(scaled[:, chosen] / weight, root, rcond=None)[0] / weight
            error = float(((scaled[:, chosen] @ found - root) ** 2).sum())
            if (found >= 0.0).all() and error < best_error:
                best, best_error = np.zeros(columns), error
                best[chosen] = found
    return best


def profile_yaml(name: str, chunk_tokens: int = 8192) -> str:
    """A file for `simulations/hardware/`: the fit of table `name`, its error in the comment."""
    kv_tokens = kv_capacity_tokens(name)
    profile, error = fit_profile(load_table(name), chunk_tokens, kv_tokens)
    fields = [field for field in profile.__struct_fields__ if field != "chunk_tokens"]
    lines = [
        f"# {name}, fitted to estimated kernel times by",
        f"# `python -m simulations.hardware.fit {name} {chunk_tokens}`",
        f"# |fit / table - 1|: prefill median {error.prefill_median:.1%}, worst {error.prefill_max:.0%}; "
        f"decode median {error.decode_median:.1%}, worst {error.decode_max:.0%}.",
        "linear:",
        *(f"  {field}: {getattr(profile, field):.4e}" for field in fields),
        f"chunk_tokens: {chunk_tokens}",
        f"kv_tokens: {kv_tokens}",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(profile_yaml(sys.argv[1], *map(int, sys.argv[2:])), end="")

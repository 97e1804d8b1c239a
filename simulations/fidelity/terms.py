"""Prediction error by term: live rows beside the same rows as predicted.

A prediction may be several replays. Each request's is then their median, which errs least on average; the
percentiles are those of single replays, on average, as a median of many spreads less than any run does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from simulations.fidelity.recording import Row
from simulations.workload.trace import Floats

_LEAST_SHARE = 0.02
"""Of the request's TTFT: a relative error of a shorter part says nothing, so those rows count in the
percentiles of seconds but not in those of errors."""


def _from_report(name: str) -> Callable[[Row], float]:
    def get(row: Row) -> float:
        return float("nan") if row.report is None else float(getattr(row.report, name))

    return get


TERMS: dict[str, Callable[[Row], float]] = {
    "queue_s": _from_report("queue_s"),
    "prefill_s": _from_report("prefill_s"),
    "ready_s": _from_report("ready_s"),
    "step_s": lambda row: float("nan") if row.report is None else row.ttft_s - row.report.ready_s,
    "ttft_s": lambda row: row.ttft_s,
    "tpot_s": lambda row: row.tpot_s,
    "total_s": lambda row: row.end_s,
}
"""What `PrefillReport` and the client measure: waiting for the site, prefill, until the KV is complete, from
then to the first token, and so on."""


@dataclass(frozen=True, slots=True)
class TermError:
    """One term over all rows that were answered both live and predicted."""

    rows: int
    live_median_s: float
    predicted_median_s: float
    live_p90_s: float
    predicted_p90_s: float
    median_error: float
    """Median over the rows of |predicted ÷ live - 1|, rows where the term is next to nothing left out."""
    p90_error: float

    @property
    def of_median(self) -> float:
        """Relative error of the median."""
        return self.predicted_median_s / self.live_median_s - 1.0 if self.live_median_s else float("nan")

    @property
    def of_p90(self) -> float:
        """Relative error of the 90th percentile."""
        return self.predicted_p90_s / self.live_p90_s - 1.0 if self.live_p90_s else float("nan")

    def as_dict(self) -> dict[str, float]:
        """For `--json`."""
        return {
            "rows": float(self.rows),
            "live_median_s": self.live_median_s,
            "predicted_median_s": self.predicted_median_s,
            "live_p90_s": self.live_p90_s,
            "predicted_p90_s": self.predicted_p90_s,
            "error_of_median": self.of_median,
            "error_of_p90": self.of_p90,
            "median_error": self.median_error,
            "p90_error": self.p90_error,
        }


def term_errors(live: Sequence[Row], *replays: Sequence[Row]) -> dict[str, TermError]:
    """Errors of every term of `TERMS`, and of the router's own forecast (`router_ttft_s`).

    Args:
        replays: each parallel to `live`.
    """
    found = {name: _error(live, replays, get, get) for name, get in TERMS.items()}
    found["router_ttft_s"] = _error(live, [live], TERMS["ttft_s"], lambda row: row.predicted_ttft_s)
    return found


def _error(
    live: Sequence[Row],
    replays: Sequence[Sequence[Row]],
    of_live: Callable[[Row], float],
    of_predicted: Callable[[Row], float],
) -> TermError:
    rows = [
        (of_live(a), _LEAST_SHARE * a.ttft_s, *map(of_predicted, predicted))
        for a, *predicted in zip(live, *replays, strict=True)
        if a.complete and not any(row.failed for row in predicted)
    ]
    values: Floats = np.array(rows, dtype=np.float64).reshape(-1, 2 + len(replays))
    values = values[~np.isnan(values).any(axis=1)]
    if not len(values):
        return TermError(0, *([float("nan")] * 6))
    actual, least, predicted = values[:, 0], values[:, 1], values[:, 2:]
    counted = actual > least
    errors = np.abs(np.median(predicted[counted], axis=1) / actual[counted] - 1.0)
    errors = errors if len(errors) else np.array([np.nan])
    return TermError(
        len(values),
        float(np.median(actual)),
        float(np.median(predicted, axis=0).mean()),
        float(np.percentile(actual, 90)),
        float(np.percentile(predicted, 90, axis=0).mean()),
        float(np.median(errors)),
        float(np.percentile(errors, 90)),
    )

"""Live beside simulated: the same measures of both, and their relative errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from simulations.workload.trace import Floats, Ints

_QUANTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What became of each request of a trace, live or simulated; NaN where it was not served."""

    arrival_s: Floats
    ttft_s: Floats
    tpot_s: Floats
    end_s: Floats
    """On the clock of `arrival_s`."""
    output_tokens: Ints

    @property
    def served(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return ~np.isnan(self.ttft_s)

    def measures(self) -> dict[str, float]:
        """Percentiles, and throughput from the first arrival to the last end."""
        served = self.served
        if not served.any():
            return {"served": 0.0}
        found = {"served": float(served.sum())}
        for name, values in (("ttft", self.ttft_s[served]), ("tpot", self.tpot_s[served])):
            values = values[~np.isnan(values)]
            for quantile in _QUANTILES:
                value = float(np.percentile(values, quantile)) if len(values) else float("nan")
                found[f"{name}_p{quantile}_s"] = value
            found[f"{name}_mean_s"] = float(values.mean()) if len(values) else float("nan")
        elapsed_s = float(self.end_s[served].max() - self.arrival_s.min())
        found["requests_per_s"] = float(served.sum()) / elapsed_s
        found["output_tokens_per_s"] = float(self.output_tokens[served].sum()) / elapsed_s
        return found


def relative_errors(live: Mapping[str, float], simulated: Mapping[str, float]) -> dict[str, float]:
    """simulated ÷ live - 1 by measure, where both have it and the live one is not 0."""
    return {
        name: simulated[name] / value - 1.0
        for name, value in live.items()
        if name in simulated and value and value == value
    }


def errors_by_request(live: Floats, simulated: Floats) -> Floats:
    """|simulated ÷ live - 1| of the requests that both served."""
    both = ~np.isnan(live) & ~np.isnan(simulated) & (live > 0)
    result: Floats = np.abs(simulated[both] / live[both] - 1.0)
    return result


def median_and_p90(errors: Floats) -> tuple[float, float]:
    """NaN for none."""
    if not len(errors):
        return float("nan"), float("nan")
    return float(np.median(errors)), float(np.percentile(errors, 90))

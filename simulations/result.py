"""What a run found: one row per request, and the work done by each worker and link."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from simulations.fleet import SLO
from simulations.workload.trace import Floats, Ints

SERVED, REFUSED, FAILED, UNFINISHED = range(4)
"""States of a request at the end of a run."""


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """One worker's or one link direction's work over the run, sampled on a common time grid."""

    name: str
    kind: str
    """`prefill`, `decode`, `link`."""
    busy_s: float
    """Seconds of prefill, seconds with a decode batch, or bytes over capacity."""
    samples: dict[str, Floats] = field(default_factory=dict)
    """By quantity (`utilisation`, `queue`, `running`, `pages`), each of shape [times]."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """Requests are in trace order; a request that got no first token has NaN there."""

    policy: str
    fleet: str
    trace: str
    seed: int
    complete: bool
    """False after Ctrl-C or a time limit: what follows is what was known by then."""
    state: Ints
    refusal: tuple[str, ...]
    """`NoCapacity.reason` or failure reason by request, empty where served."""
    arrival_s: Floats
    ttft_s: Floats
    tpot_s: Floats
    """Mean seconds per output token after the first; NaN for one-token answers."""
    end_s: Floats
    """When the answer ended, on the run's clock."""
    prompt_tokens: Ints
    output_tokens: Ints
    kind: Ints
    """`PlacementKind`; -1 where never placed."""
    decode: Ints
    """Index into `workers`; -1 where never placed."""
    site: Ints
    decode_cached_tokens: Ints
    """Found in the decode worker's cache when the request came."""
    site_cached_tokens: Ints
    kv_bytes: Ints
    """Bytes that crossed to the decode worker, over all attempts."""
    attempts: Ints
    predicted_ttft_s: Floats
    regret_s: Floats
    """Cost of the chosen candidate less the least cost among the candidates."""
    workers: tuple[str, ...]
    times_s: Floats
    """The grid of the resources' samples."""
    resources: tuple[ResourceUse, ...]
    cpu_s: float = 0.0
    """CPU seconds that the run took; not part of what equal seeds reproduce."""

    def summary(self) -> dict[str, float]:
        """Rates, shares and percentiles; what tables, reports and `--json` print."""
        served = self.state == SERVED
        duration_s = float(np.nanmax(self.end_s, initial=0.0) - np.min(self.arrival_s, initial=0.0))
        placed = self.kind >= 0
        result = {
            "requests": float(len(self.state)),
            "served": float(served.sum()),
            "duration_s": duration_s,
            "requests_per_s": float(served.sum()) / duration_s if duration_s > 0 else 0.0,
            "output_tokens_per_s": float(self.output_tokens[served].sum()) / duration_s
            if duration_s > 0
            else 0.0,
            "prefix_hit_share": _share(
                np.maximum(self.decode_cached_tokens, self.site_cached_tokens)[placed].sum(),
                self.prompt_tokens[placed].sum(),
            ),
            "kv_gbytes": float(self.kv_bytes.sum()) / 1e9,
        }
        for index, name in enumerate(("reuse", "local", "pool", "remote")):
            result[f"share_{name}"] = _share((self.kind == index).sum(), placed.sum())
        for name, values in (("ttft", self.ttft_s[served]), ("tpot", self.tpot_s[served])):
            values = values[~np.isnan(values)]
            result[f"{name}_mean_s"] = float(values.mean()) if len(values) else float("nan")
            for quantile in (50, 75, 90, 99):
                found = float(np.percentile(values, quantile)) if len(values) else float("nan")
                result[f"{name}_p{quantile}_s"] = found
        return result

    def meets(self, slo: SLO) -> bool:
        """Whether every request was served and every level of `slo` holds."""
        if not self.complete or (self.state != SERVED).any():
            return False
        found = self.summary()
        asked = {name: getattr(slo, name) for name in slo.__struct_fields__}
        return all(level is None or found[f"{name}_s"] <= level for name, level in asked.items())


def _share(part: float, whole: float) -> float:
    return float(part) / float(whole) if whole else 0.0

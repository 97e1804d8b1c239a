"""One run's figures by name: what `--json` prints, tables show and reports compare.

Names are those of common load generators: `ttft`, `tpot`, `itl`, `e2e` with mean and percentiles, throughput,
goodput, prefix reuse ratio. Only served requests count in latencies; a figure with nothing to count is None.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from policies.types import Bools, PlacementKind
from simulations.fleet import SLO, Fleet
from simulations.hardware.profiles import hardware_of
from simulations.result import FAILED, REFUSED, SERVED, UNFINISHED, ResourceUse, RunResult
from simulations.workload.trace import Floats

KINDS = tuple(kind.label for kind in PlacementKind)
PERCENTILES = (50, 75, 90, 99)


def summarize(result: RunResult, fleet: Fleet, bound_rps: float | None = None) -> dict[str, Any]:
    """Figures of `result` as JSON-able values; `bound_rps`: the rate that no policy can exceed, where known.

    Goodput counts requests that kept the service levels each by itself; unfinished requests of a stopped run
    count neither way. Rates are over the whole run, which ends with its last answer. `itl_s` is the time
    between tokens as load generators report it: TPOT.
    """
    served = result.state == SERVED
    duration_s = run_seconds(result)
    good = is_good(result, fleet.slo)
    tokens_out = float(result.output_tokens[served].sum())
    tokens_in = float(result.prompt_tokens[served].sum())
    tpot_s = spread(result.tpot_s[served])
    summary: dict[str, Any] = {
        "policy": result.policy,
        "fleet": result.fleet,
        "trace": result.trace,
        "seed": result.seed,
        "complete": result.complete,
        "requests": len(result.state),
        "served": int(served.sum()),
        "refused": int((result.state == REFUSED).sum()),
        "failed": int((result.state == FAILED).sum()),
        "unfinished": int((result.state == UNFINISHED).sum()),
        "retried": int((result.attempts > 1).sum()),
        "duration_s": duration_s,
        "offered_rps": offered_rps(result),
        "request_throughput_rps": _per(float(served.sum()), duration_s),
        "output_token_throughput_tps": _per(tokens_out, duration_s),
        "total_token_throughput_tps": _per(tokens_in + tokens_out, duration_s),
        "goodput_rps": _per(float(good.sum()), duration_s),
        "good_share": _share(good[result.state != UNFINISHED]),
        "ttft_s": spread(result.ttft_s[served]),
        "tpot_s": tpot_s,
        "itl_s": tpot_s,
        "e2e_s": spread((result.end_s - result.arrival_s)[served]),
        "placement": placement_shares(result),
        "prefix_reuse_ratio": reuse_ratio(result),
        "kv_gbytes": float(result.kv_bytes.sum()) / 1e9,
        "regret_s": spread(result.regret_s[result.kind >= 0]),
        "least_cost_share": _share(result.regret_s[result.kind >= 0] <= 1e-9),
        "ttft_prediction_error": prediction_error(result),
        "utilisation": {group.name: group.mean for group in utilisation(result)},
        "fullness": {group.name: group.fullness for group in utilisation(result)},
        "slo": levels(result, fleet.slo),
        "cost": cost(result, fleet, good),
        "cpu_s": result.cpu_s,
    }
    summary["slo_met"], summary["slo_words"] = verdict(summary)
    if bound_rps is not None:
        summary["bound_rps"] = bound_rps
        summary["achieved_over_bound"] = _per(summary["request_throughput_rps"], bound_rps)
    return summary


def run_seconds(result: RunResult) -> float:
    """From the first arrival to the last answer's end; 0 where nothing ended."""
    ended = result.end_s[~np.isnan(result.end_s)]
    return float(ended.max() - np.nanmin(result.arrival_s)) if len(ended) else 0.0


def offered_rps(result: RunResult) -> float | None:
    """Mean arrival rate of what arrived (in a run that was stopped, not everything did)."""
    arrivals = result.arrival_s[~np.isnan(result.arrival_s)]
    span_s = float(np.ptp(arrivals)) if len(arrivals) else 0.0
    return (len(arrivals) - 1) / span_s if span_s > 0 else None


def spread(values: Floats) -> dict[str, float | None]:
    """Mean, percentiles (linear between order statistics) and maximum of what is not NaN."""
    names = ("mean", *(f"p{q}" for q in PERCENTILES), "max")
    values = values[~np.isnan(values)]
    if not len(values):
        return dict.fromkeys(names)
    found = (values.mean(), *np.percentile(values, PERCENTILES), values.max())
    return {name: float(value) for name, value in zip(names, found, strict=True)}


def limits(slo: SLO) -> tuple[float, float]:
    """(TTFT, TPOT) that one request must keep to be good: the level of the highest percentile asked for."""

    def loosest(metric: str) -> float:
        asked = [getattr(slo, f"{metric}_p{q}") for q in (50, 90, 99)]
        return next((float(level) for level in reversed(asked) if level is not None), float("inf"))

    return loosest("ttft"), loosest("tpot")


def is_good(result: RunResult, slo: SLO) -> Bools:
    """By request: served, within both limits. A one-token answer has no TPOT and cannot miss it."""
    ttft_s, tpot_s = limits(slo)
    within = (result.ttft_s <= ttft_s) & (np.isnan(result.tpot_s) | (result.tpot_s <= tpot_s))
    good: Bools = (result.state == SERVED) & within
    return good


def placement_shares(result: RunResult) -> dict[str, float | None]:
    """Share of each placement kind among placed requests."""
    placed = result.kind[result.kind >= 0]
    return {name: _share(placed == index) for index, name in enumerate(KINDS)}


def reuse_ratio(result: RunResult) -> float | None:
    """Prompt tokens found in a cache (the better of decode worker and site), by those of all placed."""
    placed = result.kind >= 0
    cached = np.maximum(result.decode_cached_tokens, result.site_cached_tokens)[placed].sum()
    return _per(float(cached), float(result.prompt_tokens[placed].sum()))


def prediction_error(result: RunResult) -> float | None:
    """Median of |predicted - actual| / actual TTFT over the served."""
    served = (result.state == SERVED) & (result.ttft_s > 0)
    if not served.any():
        return None
    actual = result.ttft_s[served]
    return float(np.nanmedian(np.abs(result.predicted_ttft_s[served] - actual) / actual))


# ---------------------------------------------------------------- service levels


def levels(result: RunResult, slo: SLO) -> dict[str, dict[str, Any]]:
    """By level asked for, e.g. `ttft_p90`: what was asked, what was found, whether it holds."""
    found: dict[str, dict[str, Any]] = {}
    served = result.state == SERVED
    for name in slo.__struct_fields__:
        asked = getattr(slo, name)
        if asked is None:
            continue
        metric, percentile = name.split("_")
        values = (result.ttft_s if metric == "ttft" else result.tpot_s)[served]
        value = spread(values)[percentile]
        found[name] = {
            "asked_s": float(asked),
            "found_s": value,
            "met": value is not None and value <= asked,
        }
    return found


def verdict(summary: dict[str, Any]) -> tuple[bool | None, str]:
    """Whether the service levels hold (None: none asked for, or the run was stopped), and why in words."""
    if not summary["complete"]:
        return None, "not known: the run was stopped before its end"
    missed = [
        f"{level_name(name)} is {duration(level['found_s'])}, above {level_text(level['asked_s'])}"
        for name, level in summary["slo"].items()
        if not level["met"]
    ]
    missed += [
        f"{count:,} {'request was' if count == 1 else 'requests were'} {state}"
        for state in ("refused", "failed", "unfinished")
        if (count := summary[state])
    ]
    if missed:
        return False, "; ".join(missed)
    if not summary["slo"]:
        return None, "none asked for; every request was served"
    kept = [
        f"{level_name(name)} is {duration(level['found_s'])} of {level_text(level['asked_s'])}"
        for name, level in summary["slo"].items()
    ]
    return True, "; ".join(kept)


def level_name(name: str) -> str:
    """`ttft_p90` → `TTFT P90`."""
    return name.replace("_", " ").upper()


def duration(seconds: float | None) -> str:
    """Seconds as people read them: `41 ms`, `1.24 s`, `12.4 s`."""
    if seconds is None or np.isnan(seconds):
        return "unknown"
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    if seconds >= 10:
        return f"{seconds:.1f} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"


def level_text(seconds: float) -> str:
    """A level as it was asked for: `60 ms`, `2.5 s`."""
    return f"{seconds:g} s" if seconds >= 1 else f"{1e3 * seconds:g} ms"


# ---------------------------------------------------------------- resources


class Group:
    """Equal workers, or one link direction: their use together."""

    def __init__(self, name: str, members: list[ResourceUse]) -> None:
        self.name = name
        self.kind = members[0].kind
        self.members = members

    def over_time(self, quantity: str) -> Floats | None:
        """Mean over the members (a sum for `queue` and `running`); None where it was not sampled."""
        found = [member.samples[quantity] for member in self.members if quantity in member.samples]
        if not found or not len(found[0]):
            return None
        together: Floats = np.vstack(found).sum(axis=0)
        return together if quantity in ("queue", "running") else together / len(found)

    @property
    def fullness(self) -> float | None:
        """Mean share of what it has that is used: pinned KV pages where it decodes, else utilisation.

        A decode worker with one sequence is busy all the time, and nearly empty.
        """
        series = self.over_time("pages" if self.kind == "decode" else "utilisation")
        return float(np.nanmean(series)) if series is not None else None

    @property
    def mean(self) -> float | None:
        """Mean utilisation over members and time."""
        series = self.over_time("utilisation")
        return float(np.nanmean(series)) if series is not None else None


def utilisation(result: RunResult) -> list[Group]:
    """Groups in order of appearance: `decode-0`, `decode-1`, … are one group `decode`; links stay alone."""
    members: dict[str, list[ResourceUse]] = {}
    for resource in result.resources:
        name = resource.name if resource.kind == "link" else re.sub(r"[-_]\d+$", "", resource.name)
        members.setdefault(name, []).append(resource)
    return [Group(name, found) for name, found in members.items()]


def worker_busy_share(resource: ResourceUse, result: RunResult) -> float | None:
    """Mean sampled utilisation of one worker, else its busy seconds over the run's."""
    samples = resource.samples.get("utilisation")
    if samples is not None and len(samples):
        return float(np.nanmean(samples))
    return _per(resource.busy_s, run_seconds(result))


# ---------------------------------------------------------------- money


def price_per_hour(fleet: Fleet) -> float | None:
    """Of all instances; None where a worker's hardware has no price."""
    total = 0.0
    for cluster in fleet.clusters.values():
        for workers in cluster.workers.values():
            price = hardware_of(fleet, workers).price_per_hour
            if price <= 0:
                return None
            total += workers.count * price
    return total


def cost(result: RunResult, fleet: Fleet, good: Bools) -> dict[str, float | None]:
    """The fleet's price over the run by a million tokens: all, answers' only, those of good requests."""
    price = price_per_hour(fleet)
    names = ("per_million_tokens", "per_million_output_tokens", "per_million_good_tokens")
    if price is None:
        return {"fleet_per_hour": None, **dict.fromkeys(names)}
    spent = price * run_seconds(result) / 3600
    served = result.state == SERVED
    both = result.prompt_tokens + result.output_tokens
    counts = (both[served].sum(), result.output_tokens[served].sum(), both[good].sum())
    by_million = (_per(spent, float(count) / 1e6) for count in counts)
    return {"fleet_per_hour": price, **dict(zip(names, by_million, strict=True))}


def _per(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _share(flags: Iterable[Any]) -> float | None:
    found = np.asarray(flags)
    return float(found.mean()) if found.size else None

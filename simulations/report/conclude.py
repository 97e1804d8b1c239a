"""What a study says, in words made from its figures: who wins by how much, what binds, what to change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from simulations.report.noise import good_share_difference, ttft_ratio
from simulations.report.study import Study
from simulations.report.summary import Group, duration, utilisation
from simulations.result import RunResult

Summaries = Sequence[dict[str, Any]]

FULL = 0.85
"""Mean fullness from which on a resource counts as what binds: queues grow steeply beyond."""
HALF_IDLE = 0.5
SMALL = 0.02
"""A relative difference below this is called none, however certain."""


class Finding(msgspec.Struct, frozen=True):
    head: str
    text: str


def conclude(study: Study, summaries: Summaries) -> list[Finding]:
    """Findings in the order in which one tells them; `summaries` belong to `study.runs`."""
    order = ranking(summaries)
    best = order[0]
    findings = [
        _winner(study, summaries, order) if len(order) > 1 else _alone(summaries[best]),
        Finding("Service levels", _levels(summaries)),
        Finding("What binds", _binds(study, study.runs[best], summaries[best])),
        Finding("What to change", _advice(study.runs[best], summaries[best])),
        Finding("How far to trust this", _caveats(summaries, order)),
    ]
    return [finding for finding in findings if finding.text]


def ranking(summaries: Summaries) -> list[int]:
    """Indices by the share of requests that kept the service levels, then by TTFT P90; best first.

    Shares that differ by under half a point count as equal.
    """
    most = max(summary["good_share"] or 0.0 for summary in summaries)

    def key(index: int) -> tuple[float, float]:
        ttft_s = summaries[index]["ttft_s"]["p90"]
        steps = round((most - (summaries[index]["good_share"] or 0.0)) / 0.005)
        return steps, float("inf") if ttft_s is None else ttft_s

    return sorted(range(len(summaries)), key=key)


# ---------------------------------------------------------------- who wins


def _alone(summary: dict[str, Any]) -> Finding:
    heads = {True: "The service levels hold", False: "The service levels do not hold", None: "One run"}
    head = heads[summary["slo_met"]] if summary["complete"] else "Stopped before the end"
    ttft, tpot = summary["ttft_s"], summary["tpot_s"]
    return Finding(
        head,
        f"Under {summary['policy']}, {_rate(summary['request_throughput_rps'])} were served with TTFT P50 "
        f"{duration(ttft['p50'])} and P90 {duration(ttft['p90'])}, TPOT P90 {duration(tpot['p90'])}; "
        f"{_percent(summary['good_share'])} of all requests kept the levels for themselves.",
    )


def _winner(study: Study, summaries: Summaries, order: list[int]) -> Finding:
    first, second, last = order[0], order[1], order[-1]
    a, b, z = summaries[first], summaries[second], summaries[last]
    good = good_share_difference(study.runs[first], study.runs[second], study.fleet.slo)
    gain = _relative(a["good_share"], b["good_share"])
    if good is not None and good[0] > 0 and gain > SMALL:
        head = f"{a['policy']} wins: {_more(gain, 'requests within the service levels')} the next"
        text = (
            f"{a['policy']} keeps the service levels for {_kept(a)}; the next, {b['policy']}, for "
            f"{_kept(b)}. The difference is more than chance on this trace: between {100 * good[0]:.1f} and "
            f"{100 * good[1]:.1f} points (95 %)."
        )
    else:
        head, text = _by_latency(study, summaries, first, second)
    if len(order) > 2 and _relative(a["good_share"], z["good_share"]) > SMALL:
        text += f" Last is {z['policy']} with {_kept(z)}."
    return Finding(head, text)


def _kept(summary: dict[str, Any]) -> str:
    return f"{_percent(summary['good_share'])} of requests ({_rate(summary['goodput_rps'])})"


def _by_latency(study: Study, summaries: Summaries, first: int, second: int) -> tuple[str, str]:
    """The shares of good requests do not tell the two apart: does TTFT?"""
    a, b = summaries[first], summaries[second]
    text = (
        f"{a['policy']} and {b['policy']} keep the service levels equally often, as far as one trace can "
        f"tell: for {_kept(a)} and {_kept(b)}. "
    )
    ratio = ttft_ratio(study.runs[first], study.runs[second])
    both = f"TTFT P90 is {duration(a['ttft_s']['p90'])} and {duration(b['ttft_s']['p90'])}"
    if ratio is None:
        return (
            f"Too few requests to tell {a['policy']} from {b['policy']}",
            text + f"{both}; too few requests to call that a difference.",
        )
    if ratio[1] < 1 - SMALL:
        head = f"{a['policy']} answers sooner than {b['policy']}, at equal service levels"
        return head, text + (
            f"{both}: {a['policy']}'s is {_percent(1 - ratio[1])} to {_percent(1 - ratio[0])} shorter (95 %)."
        )
    if ratio[0] > 1 + SMALL:
        head = f"{b['policy']} answers sooner than {a['policy']}, at equal service levels"
        return head, text + (
            f"{both}: {b['policy']}'s is {_percent(1 - 1 / ratio[0])} to {_percent(1 - 1 / ratio[1])} "
            "shorter (95 %)."
        )
    head = f"No winner: {a['policy']} and {b['policy']} are within noise"
    return head, text + f"{both}, which is within noise too: choose by other criteria."


# ---------------------------------------------------------------- levels, what binds


def _levels(summaries: Summaries) -> str:
    if not summaries[0]["slo"]:
        return "The fleet asks for none."
    kept = [summary["policy"] for summary in summaries if summary["slo_met"]]
    missed = [f"{s['policy']} ({s['slo_words']})" for s in summaries if s["slo_met"] is False]
    parts = []
    if kept:
        parts.append(f"Every level holds under {_listed(kept)}.")
    if missed:
        parts.append(f"Not under {'; '.join(missed)}.")
    if stopped := [summary["policy"] for summary in summaries if not summary["complete"]]:
        parts.append(f"Not known under {_listed(stopped)}.")
    return " ".join(parts)


def _binds(study: Study, run: RunResult, summary: dict[str, Any]) -> str:
    groups = _fullest(run)
    if not groups:
        return ""
    name = summary["policy"]
    top, share = groups[0]
    others = ", ".join(f"{_what(group)} {_percent(use)}" for group, use in groups[1:5])
    if share >= FULL:
        text = f"Under {name}, {_what(top)} is full: {_percent(share)} on average"
    else:
        text = (
            f"Under {name} no resource is full on average; the fullest is {_what(top)} with {_percent(share)}"
        )
    text += f" ({others})." if others else "."
    peak = _peak(top)
    if share < FULL <= peak:
        text += f" In the busiest twentieth of the time it reaches {_percent(peak)}: bursts make the queues."
    return text + _against_bound(study, summary)


def _against_bound(study: Study, summary: dict[str, Any]) -> str:
    if study.bound_rps is None:
        return ""
    text = f" No policy could serve more than {_rate(study.bound_rps)} here"
    text += f" (runs out first: {study.binding})" if study.binding else ""
    text += f"; {summary['policy']} reached {_percent(summary['achieved_over_bound'])} of that"
    offered = summary["offered_rps"]
    if offered and offered < 0.95 * study.bound_rps:
        text += f", and only {_percent(offered / study.bound_rps)} was offered"
    return text + "."


def _advice(run: RunResult, summary: dict[str, Any]) -> str:
    if not summary["complete"]:
        return "Not known before the run's end."
    prefill, decode, link = (_fullest(run, kind) for kind in ("prefill", "decode", "link"))
    parts = []
    if _top(link) >= FULL:
        parts.append(
            f"{_capital(_what(link[0][0]))} is full: a wider link, or a policy that sends less, before more "
            "prefill workers."
        )
    if _top(prefill) >= FULL:
        parts.append(_prefill_advice(prefill, _top(decode)))
    if _top(decode) >= FULL:
        parts.append(
            "Decode memory is full while prefill is half idle: turn a prefill worker into a decode worker."
            if prefill and _top(prefill) < HALF_IDLE
            else "Decode memory is full: add decode workers, or ones with more KV memory."
        )
    elif any(not level["met"] for name, level in summary["slo"].items() if name.startswith("tpot")):
        parts.append(_tpot_advice(summary))
    if not parts:
        parts.append(
            "No resource is full on average, yet levels are missed: look at bursts (queue depth) and at long "
            "prompts."
            if summary["slo_met"] is False
            else "Nothing for this load: the fleet has room for a higher rate (prfaas simulate capacity "
            "tells how much)."
        )
    return " ".join(parts)


def _prefill_advice(prefill: list[tuple[Group, float]], decode_share: float) -> str:
    full = _what(prefill[0][0])
    spare = [group.name for group, share in prefill if share < HALF_IDLE]
    if spare:
        return f"{_capital(full)} is full while {_listed(spare)} idles: move work there, or workers here."
    if decode_share < HALF_IDLE:
        return (
            f"{_capital(full)} is full while decode memory is half empty: turn a decode worker into prefill."
        )
    return f"{_capital(full)} is full: add prefill workers there."


def _tpot_advice(summary: dict[str, Any]) -> str:
    on_decode = (summary["placement"]["local"] or 0.0) + (summary["placement"]["reuse"] or 0.0)
    if on_decode > 0.3:
        return (
            f"TPOT is missed while {_percent(on_decode)} of prompts are computed on decode workers, where "
            "they slow the running answers: compute fewer there, or add decode workers."
        )
    return "TPOT is missed with decode memory to spare: too many sequences per step; add decode workers."


def _caveats(summaries: Summaries, order: list[int]) -> str:
    partial = [summary["policy"] for summary in summaries if not summary["complete"]]
    parts = []
    if partial:
        parts.append(
            f"Partial: {_listed(partial)} stopped before the end; figures are of what was known by then."
        )
    seeds = {summary["seed"] for summary in summaries}
    parts.append(
        f"One trace, one seed ({', '.join(map(str, sorted(seeds)))}), {summaries[0]['requests']:,} requests."
        if len(seeds) == 1
        else f"Seeds {', '.join(map(str, sorted(seeds)))}."
    )
    if len(order) > 1:
        parts.append(
            "Intervals come from resampling stretches of this trace; other traces may rank otherwise."
        )
    error = summaries[order[0]]["ttft_prediction_error"]
    if error is not None:
        parts.append(f"The router's own TTFT prediction was off by {_percent(error)} (median).")
    return " ".join(parts)


# ---------------------------------------------------------------- helpers


def _fullest(run: RunResult, kind: str = "") -> list[tuple[Group, float]]:
    found = [(group, share) for group in utilisation(run) if (share := group.fullness) is not None]
    return sorted([(g, s) for g, s in found if kind in ("", g.kind)], key=lambda pair: -pair[1])


def _top(groups: list[tuple[Group, float]]) -> float:
    return groups[0][1] if groups else 0.0


def _peak(group: Group) -> float:
    series = group.over_time("pages" if group.kind == "decode" else "utilisation")
    return float(np.nanpercentile(series, 95)) if series is not None else 0.0


def _what(group: Group) -> str:
    if group.kind == "link":
        return f"the link {group.name}"
    if group.kind == "decode":
        return f"KV memory of {group.name}"
    return group.name


def _relative(a: float | None, b: float | None) -> float:
    if not a:
        return 0.0
    return a / b - 1 if b else 999.0


def _rate(value: float | None) -> str:
    return "nothing" if not value else f"{value:.2f} requests/s"


def _more(share: float, what: str) -> str:
    """A relative gain in words: `32 % more … than`, `5.4 times as many … as`."""
    if share >= 1.0:
        return f"{share + 1:.1f} times as many {what} as"
    return f"{_percent(share)} more {what} than"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _percent(share: float | None) -> str:
    if share is None:
        return "an unknown share"
    return f"{100 * share:.1f} %" if abs(share) < 0.1 else f"{100 * share:.0f} %"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

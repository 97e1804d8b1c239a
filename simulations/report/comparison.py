"""Charts that put the runs of a study beside each other: one line or bar per policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from simulations.report.chart import Axis, Chart, Mark, Number, Series
from simulations.report.study import Study
from simulations.report.summary import KINDS, level_name, level_text, limits
from simulations.result import SERVED, RunResult
from simulations.workload.trace import Floats

CURVE_POINTS = 200
CUT_AT = 6.0
"""Cost bars are cut at this many times the shortest; else a very long one hides how the others differ."""
COLOURS = 7
"""Policies beyond this many repeat the colours with another dash."""
_SHARE_LEVELS = np.linspace(0.0, 1.0, CURVE_POINTS)


def comparison_charts(study: Study, summaries: Sequence[dict[str, Any]]) -> list[Chart]:
    """`summaries` belong to `study.runs`, in the same order."""
    ttft_limit_s, tpot_limit_s = limits(study.fleet.slo)
    curves = [
        _cdf(study, "ttft", "Time to first token", ttft_limit_s, lambda run: run.ttft_s),
        _cdf(study, "tpot", "Time per output token", tpot_limit_s, lambda run: run.tpot_s),
        _cdf(study, "e2e", "Whole request", float("inf"), lambda run: run.end_s - run.arrival_s),
        _regret(study),
    ]
    if len(study.runs) == 1:
        return curves  # a single bar compares nothing; its figure stands in the table
    charts = [
        _goodput(study, summaries),
        _placement(study, summaries),
        _bars(
            study,
            "reuse",
            "Prompt tokens found in caches",
            "Tokens that nobody had to compute again. Longer is better.",
            Axis(label="share of prompt tokens", percent=True, low=0.0, high=1.0),
            [summary["prefix_reuse_ratio"] for summary in summaries],
        ),
    ]
    if study.capacity_rps:
        charts.insert(0, _capacity(study))
    if study.bound_rps is not None:
        charts.append(
            _bars(
                study,
                "bound",
                "Achieved ÷ bound",
                f"Served rate as a share of {study.bound_rps:.2f} requests/s, which no policy can exceed here"
                + (f" (runs out first: {study.binding})." if study.binding else "."),
                Axis(label="served rate ÷ bound", percent=True, low=0.0, high=1.0),
                [summary["achieved_over_bound"] for summary in summaries],
            )
        )
    if summaries[0]["cost"]["fleet_per_hour"] is not None:
        charts.append(_cost(study, summaries))
    return [*curves, *charts]


def policy_colour(index: int) -> tuple[str, int]:
    """(colour role, dash) of the policy at this place in the study."""
    return f"policy-{index % COLOURS}", index // COLOURS


def quantile_curve(values: Floats) -> tuple[list[float], list[Number]]:
    """(value, share of values at or below it) at evenly spaced shares; empty of nothing."""
    values = values[~np.isnan(values)]
    if not len(values):
        return [], []
    return np.quantile(values, _SHARE_LEVELS).tolist(), _SHARE_LEVELS.tolist()


def _cdf(study: Study, key: str, title: str, limit_s: float, values: Callable[[RunResult], Floats]) -> Chart:
    series = []
    for index, run in enumerate(study.runs):
        x, y = quantile_curve(values(run)[run.state == SERVED])
        colour, dash = policy_colour(index)
        series.append(Series(name=run.policy, colour=colour, dash=dash, x=[max(v, 1e-4) for v in x], y=y))
    marks = [Mark(axis="y", at=0.9, label="P90")]
    caption = "Share of served requests at or below each time. Further left is better."
    if limit_s != float("inf"):
        asked = [name for name in study.fleet.slo.__struct_fields__ if name.startswith(key)]
        name = [name for name in asked if getattr(study.fleet.slo, name) is not None][-1]
        marks.append(Mark(axis="x", at=limit_s, label=f"{level_name(name)} ≤ {level_text(limit_s)}"))
        caption += " A curve that passes left of where the two dotted lines cross keeps the level."
    return Chart(
        key=key,
        title=f"{title} ({key.upper()})",
        caption=caption,
        kind="curve",
        x=Axis(label=f"{key.upper()}, seconds (log scale)", log=True),
        y=Axis(label="share of requests", percent=True, low=0.0, high=1.0),
        series=series,
        marks=marks,
    )


def _goodput(study: Study, summaries: Sequence[dict[str, Any]]) -> Chart:
    marks = []
    offered = summaries[0]["offered_rps"]
    if offered:
        marks.append(Mark(axis="x", at=offered, label=f"offered {offered:.2f}"))
    ttft_s, tpot_s = limits(study.fleet.slo)
    asked = [
        f"{name} ≤ {level_text(limit)}"
        for name, limit in (("TTFT", ttft_s), ("TPOT", tpot_s))
        if limit != float("inf")
    ]
    return _bars(
        study,
        "goodput",
        "Goodput",
        f"Requests per second that kept {' and '.join(asked) or 'no level'}, each alone. Longer is better.",
        Axis(label="requests per second", low=0.0),
        [summary["goodput_rps"] for summary in summaries],
        marks,
    )


def _capacity(study: Study) -> Chart:
    marks = []
    if study.bound_rps is not None:
        marks.append(Mark(axis="x", at=study.bound_rps, label=f"bound {study.bound_rps:.2f}"))
    return _bars(
        study,
        "capacity",
        "Capacity at the service levels",
        "Highest arrival rate at which every level held. Longer is better. Dotted: the bound of any policy.",
        Axis(label="requests per second", low=0.0),
        [study.capacity_rps.get(run.policy) for run in study.runs],
        marks,
    )


def _placement(study: Study, summaries: Sequence[dict[str, Any]]) -> Chart:
    names = [run.policy for run in study.runs]
    return Chart(
        key="placement",
        title="Where prompts were computed",
        caption="Share of requests by place of prefill. Warm colour: the KV cache crossed the link.",
        kind="bar",
        x=Axis(label="share of requests", percent=True, low=0.0, high=1.0),
        y=Axis(label=""),
        series=[
            Series(
                name=kind,
                colour=f"kind-{kind}",
                x=names,
                y=[summary["placement"][kind] for summary in summaries],
            )
            for kind in KINDS
        ],
    )


def _cost(study: Study, summaries: Sequence[dict[str, Any]]) -> Chart:
    price = summaries[0]["cost"]["fleet_per_hour"]
    prices = [summary["cost"]["per_million_good_tokens"] for summary in summaries]
    known = [value for value in prices if value is not None]
    cut = CUT_AT * min(known) if known and max(known) > CUT_AT * min(known) else None
    return _bars(
        study,
        "cost",
        "Cost per million good tokens",
        f"The fleet at {price:,.2f} per hour, over all tokens of requests that kept the service levels. "
        "Shorter is better.",
        Axis(label="price units per million tokens", low=0.0, high=cut),
        prices,
    )


def _regret(study: Study) -> Chart:
    found = [np.sort(run.regret_s[(run.kind >= 0) & ~np.isnan(run.regret_s)]) for run in study.runs]
    most = max((float(values[-1]) for values in found if len(values)), default=0.0)
    levels = np.geomspace(1e-3, max(most, 1e-2), CURVE_POINTS)
    series = []
    for index, (run, values) in enumerate(zip(study.runs, found, strict=True)):
        if len(values):
            above = 1 - np.searchsorted(values, levels, side="right") / len(values)
            colour, dash = policy_colour(index)
            series.append(
                Series(name=run.policy, colour=colour, dash=dash, x=levels.tolist(), y=above.tolist())
            )
    return Chart(
        key="regret",
        title="Regret by decision",
        caption="Share of decisions that cost more than x above the cheapest candidate, as the router priced "
        "them. Lower is better for the request at hand; always the least cost = on the axis.",
        kind="curve",
        x=Axis(label="cost above the cheapest, seconds (log scale)", log=True),
        y=Axis(label="share of decisions", percent=True, low=0.0),
        series=series,
    )


def _bars(
    study: Study,
    key: str,
    title: str,
    caption: str,
    axis: Axis,
    values: Sequence[Number],
    marks: Sequence[Mark] = (),
) -> Chart:
    """One bar per policy, each in the policy's colour."""
    series = [
        Series(name=run.policy, colour=policy_colour(index)[0], x=[run.policy], y=[value])
        for index, (run, value) in enumerate(zip(study.runs, values, strict=True))
    ]
    return Chart(
        key=key,
        title=title,
        caption=caption,
        kind="bar",
        x=axis,
        y=Axis(label=""),
        series=series,
        marks=list(marks),
    )

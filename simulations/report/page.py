"""The HTML page: one file that needs nothing else, with its data, its drawing code and plotly inside."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from simulations.report.comparison import policy_colour
from simulations.report.conclude import Finding
from simulations.report.study import Study
from simulations.report.summary import duration, level_name, level_text
from simulations.report.table import policy_table

Summaries = Sequence[dict[str, Any]]


def render_page(study: Study, summaries: Summaries, findings: Sequence[Finding], data: str) -> str:
    """The page's text, best run first; `data` is report.json."""
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
        _part("html")
    )
    stopped = [summary["policy"] for summary in summaries if not summary["complete"]]
    return template.render(
        title=_title(study, summaries),
        subtitle=_subtitle(study, summaries[0]),
        findings=[Finding(_unbroken(f.head), _unbroken(f.text)) for f in findings],
        partial=f"{', '.join(stopped)} did not reach the end" if stopped else "",
        tiles=_tiles(summaries[0]),
        table=_table(summaries),
        slo=_slo(study),
        runs=[run.policy for run in study.runs],
        command=study.command,
        css=Markup(_part("css")),
        data=Markup(_embeddable(data)),
        plotly=Markup(_plotly()),
        script=Markup(_part("js")),
    )


def _part(suffix: str) -> str:
    return files("simulations.report").joinpath(f"page.{suffix}").read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _unbroken(text: str) -> str:
    """Numbers stay on one line with their units."""
    return re.sub(r"(?<=[0-9]) (?=%|m?s\b)", "\u00a0", text)


def _embeddable(json: str) -> str:
    """JSON that cannot end the script element which holds it."""
    return json.replace("<", "\\u003c")


def _title(study: Study, summaries: Summaries) -> str:
    what = f"{len(summaries)} policies" if len(summaries) > 1 else summaries[0]["policy"]
    return f"{what} on {study.fleet.name}, replaying {summaries[0]['trace']}"


def _subtitle(study: Study, summary: dict[str, Any]) -> str:
    fleet = study.fleet
    clusters = []
    for name, cluster in fleet.clusters.items():
        workers = ", ".join(f"{w.count} {w.role} ({w.hardware})" for w in cluster.workers.values())
        clusters.append(f"{name}: {workers}")
    links = [
        f"{name} {link.capacity * 8 / 1e9:g} Gbit/s, {float(link.rtt) * 1e3:g} ms"
        for name, link in fleet.links.items()
    ]
    rate = summary["offered_rps"]
    parts = [
        f"{summary['requests']:,} requests" + (f" at {rate:.2f} per second" if rate else ""),
        fleet.model.name,
        *clusters,
        *links,
        f"seed {summary['seed']}",
    ]
    return " · ".join(parts)


def _slo(study: Study) -> str:
    slo = study.fleet.slo
    asked = {name: getattr(slo, name) for name in slo.__struct_fields__}
    kept = [f"{level_name(name)} ≤ {level_text(level)}" for name, level in asked.items() if level is not None]
    return f"Service levels: {', '.join(kept)}." if kept else "The fleet asks for no service levels."


def _tiles(summary: dict[str, Any]) -> list[dict[str, str]]:
    """The best policy's main figures."""
    name = summary["policy"]
    met = {True: "levels hold", False: "levels missed", None: "levels unknown"}[summary["slo_met"]]
    tiles = [
        ("goodput", f"{summary['goodput_rps'] or 0:.2f} /s", f"{name}; {met}"),
        ("TTFT P90", duration(summary["ttft_s"]["p90"]), f"median {duration(summary['ttft_s']['p50'])}"),
        ("TPOT P90", duration(summary["tpot_s"]["p90"]), f"median {duration(summary['tpot_s']['p50'])}"),
        ("remote prefill", _percent(summary["placement"]["remote"]), f"{summary['kv_gbytes']:,.0f} GB sent"),
        ("found in caches", _percent(summary["prefix_reuse_ratio"]), "of prompt tokens"),
    ]  # fmt: skip
    if "achieved_over_bound" in summary:
        note = f"bound {summary['bound_rps']:.2f} requests/s"
        tiles.append(("achieved ÷ bound", _percent(summary["achieved_over_bound"]), note))
    if (price := summary["cost"]["per_million_good_tokens"]) is not None:
        tiles.append(("price per M good tokens", f"{price:#.3g}", "prompt and answer"))
    return [{"label": label, "value": value, "note": note} for label, value, note in tiles]


def _table(summaries: Summaries) -> dict[str, Any]:
    labels, rows = policy_table(summaries)
    columns = [Markup("<br>").join(label.split("\n")) for label in ("policy", "service\nlevels", *labels)]
    shown = []
    for index, summary in enumerate(summaries):
        met = {True: "yes", False: "no", None: ""}[summary["slo_met"]]
        word = {True: "met", False: "missed", None: "" if summary["complete"] else "partial"}[
            summary["slo_met"]
        ]
        verdict = Markup('<span class="{}" title="{}">{}</span>').format(met, summary["slo_words"], word)
        cells = [{"text": summary["policy"], "style": ""}, {"text": verdict, "style": ""}]
        cells += [{"text": cell.text, "style": "best" if cell.best else ""} for cell in rows[index]]
        shown.append({"colour": policy_colour(index)[0], "cells": cells})
    return {"columns": columns, "rows": shown}


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"

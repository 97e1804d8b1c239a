"""A run, or several beside each other, as tables in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text

from simulations.report.conclude import Finding
from simulations.report.summary import KINDS, Group, duration, level_text, utilisation
from simulations.report.table import policy_table
from simulations.result import RunResult

Summary = dict[str, Any]

KIND_STYLES = {"reuse": "green", "local": "yellow", "pool": "cyan", "remote": "magenta"}
MOST_WORKERS = 24
"""With more, workers are shown by group."""
_BAR = 14
_LATENCIES = (
    ("TTFT", "ttft_s", "ttft"),
    ("TPOT", "tpot_s", "tpot"),
    ("whole request", "e2e_s", "e2e"),
)


def print_run(console: Console, run: RunResult, summary: Summary) -> None:
    """Everything about one run."""
    console.print()
    console.print(_heading(summary))
    for part in (_latency(summary), _figures(summary), _placement(summary), _resources(run)):
        console.print()
        console.print(part)
    console.print()
    console.print(_verdict(summary))


def print_comparison(console: Console, summaries: Sequence[Summary], findings: Sequence[Finding]) -> None:
    """One row per run, in the order given; the best of each column stands out."""
    names = max(len(summary["policy"]) for summary in summaries)
    policy_width = min(names, max(24, console.width // 4))
    labels, rows = policy_table(summaries, console.width - policy_width - 2 - len("service") - 2)
    table = plain_table()
    table.add_column("\npolicy", width=policy_width, overflow="fold")
    for label in labels:
        table.add_column(label, justify="right", no_wrap=True)
    table.add_column("service\nlevels", no_wrap=True)
    for summary, row in zip(summaries, rows, strict=True):
        cells = [Text(cell.text, style="bold green" if cell.best else "") for cell in row]
        table.add_row(summary["policy"], *cells, _met(summary))
    console.print()
    console.print(table)
    console.print()
    print_findings(console, findings)


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """The conclusions as a list of terms."""
    console.print(Text(findings[0].head, style="bold"))
    console.print(Text(findings[0].text))
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for finding in findings[1:]:
        grid.add_row(finding.head, Text(finding.text))
    console.print()
    console.print(grid)


# ---------------------------------------------------------------- parts of one run


def _heading(summary: Summary) -> Text:
    text = Text(f"{summary['policy']} on {summary['fleet']}, replaying {summary['trace']}", style="bold")
    if not summary["complete"]:
        text.append("  PARTIAL: stopped before the end; figures of what was known by then", style="bold red")
    return text


def _latency(summary: Summary) -> Table:
    columns = ("mean", "p50", "p75", "p90", "p99", "max")
    table = plain_table()
    table.add_column("seconds to")
    for column in columns:
        table.add_column(column, justify="right")
    table.add_column("service level")
    for title, key, metric in _LATENCIES:
        cells = [duration(summary[key][column]) for column in columns]
        table.add_row(title, *cells, _levels(summary, metric))
    return table


def _levels(summary: Summary, metric: str) -> Text:
    text = Text()
    for name, level in summary["slo"].items():
        if name.startswith(metric):
            words = f"{name.split('_')[1]} ≤ {level_text(level['asked_s'])} "
            text.append(words + ("met  " if level["met"] else "missed  "), "green" if level["met"] else "red")
    return text


def _figures(summary: Summary) -> Table:
    counts = [f"{summary['served']:,} of {summary['requests']:,} served"]
    counts += [
        f"{summary[state]:,} {state}"
        for state in ("refused", "failed", "unfinished", "retried")
        if summary[state]
    ]
    rate, offered = summary["request_throughput_rps"], summary["offered_rps"]
    lines = {
        "requests": ", ".join(counts),
        "throughput": f"{_number(rate)} requests/s of {_number(offered)} offered, over "
        f"{duration(summary['duration_s'])}; {_number(summary['output_token_throughput_tps'], 0)} answer "
        f"tokens/s, {_number(summary['total_token_throughput_tps'], 0)} with prompts",
        "goodput": f"{_number(summary['goodput_rps'])} requests/s within the service levels "
        f"({_percent(summary['good_share'])} of requests)",
        "found in caches": f"{_percent(summary['prefix_reuse_ratio'])} of prompt tokens",
        "KV moved": f"{summary['kv_gbytes']:,.1f} GB",
        "TTFT prediction": f"off by {_percent(summary['ttft_prediction_error'])} (median); "
        f"{_percent(summary['least_cost_share'])} of decisions took the least cost",
    }
    if "achieved_over_bound" in summary:
        lines["achieved / bound"] = (
            f"{_percent(summary['achieved_over_bound'])} of {_number(summary['bound_rps'])} requests/s, "
            "which no policy can exceed"
        )
    cost = summary["cost"]
    if cost["per_million_tokens"] is not None:
        lines["price"] = (
            f"{cost['per_million_tokens']:#.3g} per million tokens, "
            f"{cost['per_million_output_tokens']:#.3g} per million answer tokens "
            f"({cost['fleet_per_hour']:,.2f} per hour)"
        )
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    for label, value in lines.items():
        grid.add_row(label, value)
    return grid


def _placement(summary: Summary) -> Table:
    table = plain_table()
    table.add_column("placed", min_width=6)
    table.add_column("", min_width=_BAR)
    table.add_column("share", justify="right")
    for kind in KINDS:
        share = summary["placement"][kind] or 0.0
        table.add_row(Text(kind, KIND_STYLES[kind]), Text(_bar(share), KIND_STYLES[kind]), _percent(share))
    return table


def _resources(run: RunResult) -> Lines:
    groups = utilisation(run)
    workers = [group for group in groups if group.kind != "link"]
    if sum(len(group.members) for group in workers) <= MOST_WORKERS:
        workers = [Group(member.name, [member]) for group in workers for member in group.members]
    table = plain_table()
    for heading in ("\nworker", "\nrole", "busy\nof the time"):
        table.add_column(heading, no_wrap=True)
    for heading in ("", "queue\nmean", "\nmax", "KV pages\nmean", "\nmax"):
        table.add_column(heading, justify="right")
    for group in workers:
        name = f"{group.name} ({len(group.members)})" if len(group.members) > 1 else group.name
        queue, pages = group.over_time("queue"), group.over_time("pages")
        table.add_row(
            name,
            group.kind,
            Text(_bar(group.mean or 0.0), "cyan"),
            _percent(group.mean),
            *(_number(value, 1) for value in _mean_max(queue)),
            *(_percent(value) for value in _mean_max(pages)),
        )
    links = plain_table()
    for heading in ("\nlink", "of its capacity\nmean", "", "busiest twentieth\nof the time"):
        links.add_column(heading, no_wrap=True)
    for group in groups:
        if group.kind == "link":
            series = group.over_time("utilisation")
            peak = float(np.nanpercentile(series, 95)) if series is not None else None
            bar = Text(_bar(group.mean or 0.0), "magenta")
            links.add_row(group.name, bar, _percent(group.mean), _percent(peak))
    return Lines(table, "", links) if links.row_count else Lines(table)


def _mean_max(series: Any) -> tuple[float | None, float | None]:
    if series is None or not len(series):
        return None, None
    return float(np.nanmean(series)), float(np.nanmax(series))


def _verdict(summary: Summary) -> Text:
    text = Text("service levels: ", style="bold")
    text.append_text(_met(summary))
    text.append(f" ({summary['slo_words']})")
    return text


def _met(summary: Summary) -> Text:
    words = {True: ("met", "bold green"), False: ("not met", "bold red"), None: ("none", "dim")}
    text, style = words[summary["slo_met"]]
    if not summary["complete"]:
        text, style = "partial", "bold red"
    return Text(text, style)


def plain_table() -> Table:
    """Without lines: what fits 80 columns."""
    return Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))


def _bar(share: float) -> str:
    return "█" * round(_BAR * min(1.0, max(0.0, share)))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"

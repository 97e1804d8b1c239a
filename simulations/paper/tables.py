"""The case study for people: tables, and what to conclude from them in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from simulations.paper.case import FITTED
from simulations.paper.published import PUBLISHED, DeploymentName
from simulations.paper.report import BARS, PaperReport, relative, relative_errors

TITLES: dict[DeploymentName, str] = {
    "prfaas_pd": "PrfaaS-PD · 4 remote prefill instances of 8x H200, 8 PD instances of 8x H20",
    "homogeneous": "Homogeneous PD · 12 instances of 8x H20",
    "naive": "Naive heterogeneous · every prefill on 4 of 8x H200, 8 of 8x H20 decode",
}
LABELS = {
    "lambda_max": "Λ max, req/s",
    "theta_prfaas": "Θ remote, req/s",
    "theta_pd_p": "Θ home, req/s",
    "theta_pd_d": "Θ decode, req/s",
    "threshold_tokens": "threshold, tokens",
    "n_prfaas": "remote instances",
    "n_p": "home instances",
    "n_d": "decode instances",
    "offload_share": "offloaded, %",
    "egress_gbps": "egress, Gbit/s",
    "ttft_mean_s": "TTFT mean, s",
    "ttft_p90_s": "TTFT P90, s",
}


def print_report(console: Console, report: PaperReport) -> None:
    """One table for each deployment, and the conclusion."""
    for name in report.analytic:
        console.print(TITLES[name], style="bold")
        console.print(_deployment_table(report, name))
    for line in conclusions(report):
        console.print(f"• {line}")


def new_table(padding: int = 2) -> Table:
    """In the look that all tables of the case study share; `padding`: spaces between columns."""
    return Table(header_style="dim", box=box.SIMPLE_HEAD, padding=(0, padding, 0, 0), pad_edge=False)


def _deployment_table(report: PaperReport, name: DeploymentName) -> Table:
    analytic, published = asdict(report.analytic[name]), asdict(PUBLISHED[name])
    errors = relative_errors(report.analytic[name], PUBLISHED[name])
    replayed = asdict(report.event_driven[name]) if name in report.event_driven else {}
    table = new_table()
    table.add_column("", no_wrap=True)
    for heading in (
        "paper",
        "analytic",
        "error",
        *(("event-\ndriven", "against\nanalytic") if replayed else ()),
    ):
        table.add_column(heading, justify="right")
    table.add_column("", style="dim")
    for field, label in LABELS.items():
        if not analytic[field] and not published[field]:
            continue
        cells: list[str | Text] = [
            format_figure(field, published[field]),
            format_figure(field, analytic[field]),
            _error(field, errors[field]),
        ]
        if replayed:
            change = relative(replayed[field], analytic[field])
            cells += [format_figure(field, replayed[field]), _share(change)]
        fitted = "fitted" if f"{name}.{field}" in FITTED else ""
        table.add_row(label, *cells, fitted)
    return table


def format_figure(field: str, value: float | None) -> str:
    """One of `Figures`, with the digits that mean something."""
    if value is None:
        return "-"
    if field == "offload_share":
        return f"{100 * value:.1f}"
    if field in ("threshold_tokens", "n_prfaas", "n_p", "n_d"):
        return f"{value:,.0f}"
    return f"{value:.1f}" if field == "egress_gbps" else f"{value:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:+.1f} %"


def _error(field: str, error: float | None) -> Text:
    """Green within the bar, red beyond it; without a bar it is only stated."""
    if error is None:
        return Text("")
    bar = BARS.get(field)
    style = "yellow" if bar is None else "green" if abs(error) <= bar + 1e-12 else "bold red"
    return Text(_share(error), style=style)


def conclusions(report: PaperReport) -> Iterator[str]:
    """Plain words, from the figures at hand."""
    beyond = [
        f"{LABELS[field]} of {name} ({_share(error)})"
        for name, found in report.analytic.items()
        for field, error in relative_errors(found, PUBLISHED[name]).items()
        if error is not None and field in BARS and abs(error) > BARS[field] + 1e-12
    ]
    if beyond:
        yield "Not reproduced: " + "; ".join(beyond) + "."
    else:
        yield "Every throughput, threshold, split and share of the paper comes out within its bar."
    mixed, plain = report.analytic["prfaas_pd"], report.analytic["homogeneous"]
    yield (
        f"The remote pool serves {mixed.lambda_max / plain.lambda_max:.2f} times the homogeneous rate and "
        f"takes {1 - mixed.ttft_mean_s / plain.ttft_mean_s:.0%} off the mean TTFT, sending "
        f"{mixed.egress_gbps or 0:.1f} Gbit/s."
    )
    yield (
        "Fitted, not predicted: the H20 prefill profile (two numbers, from the rates 2.11 and 1.64) and the "
        "decode rate (one, from 3.91). TTFTs are prefill times alone, as in the paper."
    )
    if report.event_driven:
        yield from _queueing_conclusions(report)


def _queueing_conclusions(report: PaperReport) -> Iterator[str]:
    for name, found in report.event_driven.items():
        lost = -(relative(found.lambda_max, report.analytic[name].lambda_max) or 0)
        curve = -(relative(report.queue_free[name], report.analytic[name].lambda_max) or 0)
        yield (
            f"{name}: with Poisson arrivals TTFT P90 stays within twice the unloaded one up to "
            f"{found.lambda_max:.2f} req/s, {lost:.1%} below the model: {curve:.1%} by the prefill curve "
            f"(the simulator joins the paper's points by lines), {lost - curve:.1%} by queueing."
        )
    if {"prfaas_pd", "homogeneous"} <= set(report.event_driven):
        mixed, plain = report.event_driven["prfaas_pd"], report.event_driven["homogeneous"]
        yield (
            f"Two small prefill pools queue sooner than one large one: the gain is then "
            f"{mixed.lambda_max / plain.lambda_max:.2f} times the homogeneous rate, at a TTFT P90 of "
            f"{mixed.ttft_p90_s:.1f} s instead of {plain.ttft_p90_s:.1f} s."
        )
    yield "The model has no queue: it calls a fleet full when waiting has no end; users leave before that."

"""The figures at the end of the demo: a table for people, one JSON object for programs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from launcher.demo.live import KIND_STYLES
from launcher.demo.parity import Parity
from launcher.demo.records import KINDS, Record

_BAR_WIDTH = 12
IN_CLUSTER = "in_cluster"
"""Name under which bytes between workers of one cluster are counted; they cross no link."""


def summarize(
    records: Sequence[Record], parity: Parity, skipped: dict[str, int], elapsed_s: float
) -> dict[str, Any]:
    """The final JSON object; its first ten fields are the documented ones.

    `hidden_fraction` is weighted by bytes over the requests whose KV crossed a link between clusters;
    `prediction_error_p50` is over all requests (calibration uses requests of its own); a figure without a
    single request to count is None.
    """
    answered = [record for record in records if not record.error]
    ttfts = [record.actual_ttft_s for record in answered if record.actual_ttft_s is not None]
    errors = [record.prediction_error for record in answered if record.prediction_error is not None]
    least = [record.cost_was_least for record in records if record.cost_was_least is not None]
    return {
        "requests": len(records),
        "errors": len(records) - len(answered),
        "placements": {kind: sum(record.kind == kind for record in answered) for kind in KINDS},
        "ttft_p50_s": _rounded(quantile(ttfts, 0.5)),
        "ttft_p90_s": _rounded(quantile(ttfts, 0.9)),
        "kv_bytes": bytes_by_link(answered),
        "hidden_fraction": _rounded(hidden_fraction(answered)),
        "prediction_error_p50": _rounded(quantile(errors, 0.5)),
        "argmin_share": _rounded(sum(least) / len(least) if least else None),
        "parity": {"same": parity.same, "near_tie": parity.near_tie, "different": parity.different},
        "prediction_error_p90": _rounded(quantile(errors, 0.9)),
        "cached_share": _rounded(_cached_share(answered)),
        "attempts_over_one": sum(
            record.decision is not None and record.decision.attempt > 1 for record in records
        ),
        "skipped": skipped,
        "elapsed_s": round(elapsed_s, 1),
    }


def quantile(values: Iterable[float], share: float) -> float | None:
    """Quantile by linear interpolation between order statistics; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    at = share * (len(ordered) - 1)
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])


def bytes_by_link(records: Iterable[Record]) -> dict[str, int]:
    """KV bytes written, by link name."""
    totals: defaultdict[str, int] = defaultdict(int)
    for record in records:
        if record.kv_bytes and record.decision:
            totals[record.decision.link or IN_CLUSTER] += record.kv_bytes
    return dict(totals)


def hidden_fraction(records: Iterable[Record]) -> float | None:
    """Share of transfer time that prefill hid, weighted by bytes; None if nothing crossed a link."""
    weighted = total = 0.0
    for record in records:
        decision = record.decision
        if decision and decision.link and decision.hidden_fraction is not None:
            weighted += record.kv_bytes * decision.hidden_fraction
            total += record.kv_bytes
    return weighted / total if total else None


def _cached_share(records: Iterable[Record]) -> float | None:
    reports = [
        (r.decision.report, r.decision.prompt_tokens) for r in records if r.decision and r.decision.report
    ]
    tokens = sum(prompt_tokens for _, prompt_tokens in reports)
    return sum(report.cached_tokens for report, _ in reports) / tokens if tokens else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


# ---------------------------------------------------------------- for people


def print_summary(console: Console, records: Sequence[Record], figures: dict[str, Any]) -> None:
    """The mix of placements, TTFT predicted and measured, and what went over the links."""
    console.print()
    console.print(_mix_table(records))
    console.print()
    grid = Table.grid(padding=(0, 2, 0, 0))
    for label, value in _findings(figures):
        grid.add_row(label, value)
    console.print(grid)


def _findings(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(label, value) of each line below the table; without those that have nothing to say."""
    moved = [f"{count / 1e6:.1f} MB {_over(link)}" for link, count in figures["kv_bytes"].items()]
    parity, skipped = figures["parity"], figures["skipped"]
    lines = {
        "KV moved": ", ".join(moved),
        "link time hidden": _percent(figures["hidden_fraction"], "behind prefill"),
        "TTFT prediction": _percent(figures["prediction_error_p50"], "off (median)"),
        "placed at least cost": _percent(figures["argmin_share"], "of requests"),
        "found in caches": _percent(figures["cached_share"], "of prompt tokens"),
        "failed": f"{figures['errors']} requests" if figures["errors"] else "",
        "skipped": ", ".join(f"{count} {reason}" for reason, count in skipped.items()),
        "compared to one engine": f"{parity['same']} answers the same, {parity['near_tie']} near ties, "
        f"{parity['different']} different",
    }
    yield from ((label, value) for label, value in lines.items() if value)


def _over(link: str) -> str:
    return "inside a cluster" if link == IN_CLUSTER else f"over link {link}"


def _mix_table(records: Sequence[Record]) -> Table:
    table = Table(
        title="placements, with medians", title_justify="left", box=None, header_style="bold", pad_edge=False
    )
    table.add_column("placed", min_width=6)
    table.add_column("", min_width=_BAR_WIDTH)
    table.add_column("requests", justify="right")
    for heading in ("uncached", "TTFT predicted", "actual", "actual p90"):
        table.add_column(heading, justify="right")
    most = max((sum(r.kind == kind for r in records) for kind in KINDS), default=0)
    for kind in KINDS:
        placed = [record for record in records if record.kind == kind and not record.error]
        bar = "█" * round(_BAR_WIDTH * len(placed) / most) if most else ""
        table.add_row(
            f"[{KIND_STYLES[kind]}]{kind}[/]",
            f"[{KIND_STYLES[kind]}]{bar}[/]",
            str(len(placed)),
            _cell(placed, lambda r: r.uncached_tokens, 0.5, "{:.0f}"),
            _cell(placed, lambda r: r.predicted_ttft_s, 0.5, "{:.2f} s"),
            _cell(placed, lambda r: r.actual_ttft_s, 0.5, "{:.2f} s"),
            _cell(placed, lambda r: r.actual_ttft_s, 0.9, "{:.2f} s"),
        )
    return table


def _cell(
    records: Sequence[Record], figure: Callable[[Record], float | None], share: float, form: str
) -> str:
    value = quantile([v for record in records if (v := figure(record)) is not None], share)
    return "" if value is None else form.format(value)


def _percent(value: float | None, of_what: str) -> str:
    return "" if value is None else f"{100 * value:.0f} % {of_what}"

"""The sweeps for people: a row per link rate or load, and what to conclude in words."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from simulations.paper.link_sweep import LinkSweep
from simulations.paper.load_sweep import LoadPoint, LoadSweep
from simulations.paper.published import LINK_GBPS
from simulations.paper.tables import format_figure, new_table


def print_link_sweep(console: Console, sweep: LinkSweep) -> None:
    """The best fleet at each link rate, and where the remote pool pays."""
    console.print("Best PrfaaS-PD by link rate, threshold and split searched anew for each", style="bold")
    table = new_table(padding=1)
    queued = any(point.queued_lambda_max for point in sweep.points)
    second = "with\nqueues" if queued else "egress\nGbit/s"
    for heading in ("link\nGbit/s", "Λ\nreq/s", second, "gain", "t\nK", "N_p\n/N_d", "away\n%"):
        table.add_column(heading, justify="right")
    table.add_column("limited by")
    for heading in ("KV/B\nall", "KV/B\nsent", "RTT/T"):
        table.add_column(heading, justify="right", style="dim")
    for point in sweep.points:
        row = point.figures
        gain = row.lambda_max / sweep.homogeneous_lambda_max
        style = "red" if gain < 1 else "yellow" if row.lambda_max < sweep.equal_cost_lambda_max else "green"
        table.add_row(
            f"{point.link_gbps:.2f}",
            f"[{style}]{row.lambda_max:.2f}[/{style}]",
            _or_dash(point.queued_lambda_max) if queued else format_figure("egress_gbps", row.egress_gbps),
            f"[{style}]{gain:.2f}[/{style}]",
            "-" if row.threshold_tokens is None else f"{row.threshold_tokens / 1000:.1f}",
            f"{row.n_p}/{row.n_d}",
            format_figure("offload_share", row.offload_share),
            point.binding,
            f"{point.groups.offered_kv_over_link:.2f}",
            f"{point.groups.kv_over_link:.2f}",
            f"{point.groups.rtt_over_prefill:.3f}",
        )
    console.print(table)
    for line in link_conclusions(sweep):
        console.print(f"• {line}")


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def link_conclusions(sweep: LinkSweep) -> Iterator[str]:
    """Plain words, from the figures at hand."""
    yield (
        f"From {sweep.unmoved_from_gbps:.1f} Gbit/s on a faster link changes nothing: the paper's "
        f"{LINK_GBPS:.0f} Gbit/s are {LINK_GBPS / sweep.unmoved_from_gbps:.0f} times what its optimum sends."
    )
    yield (
        "Below that the threshold rises and PD instances go back to prefill, so the rate falls more slowly "
        "than the link."
    )
    yield (
        f"Below {sweep.pays_at_equal_cost_from_gbps:.1f} Gbit/s a homogeneous fleet of the same cost "
        f"({sweep.equal_cost_lambda_max:.2f} req/s) serves more, below {sweep.pays_from_gbps:.1f} Gbit/s "
        f"even the paper's 12 H20 instances ({sweep.homogeneous_lambda_max:.2f} req/s, base of the gain): "
        "there remote prefill stops paying."
    )
    yield (
        f"The 8 PD instances alone serve {sweep.pd_alone_lambda_max:.2f} req/s: a pool that stands there "
        "already is worth using over any link."
    )
    yield (
        "Here t is in 1000 tokens, B the bandwidth, T the mean remote prefill; KV/B of all prompts is what "
        "sending every one would ask of the link, beside what is sent."
    )


def print_loads(console: Console, sweep: LoadSweep) -> None:
    """TTFT of each fleet by load, beside queueing theory."""
    for name in dict.fromkeys(point.deployment for point in sweep.points):
        console.print(f"{name}: TTFT by load (arrival rate over the model's Λ max)", style="bold")
        table = new_table(padding=1)
        for heading in ("load", "req/s", "theory\nmean s", "mean\ns", "P90\ns", "P90/\nunloaded"):
            table.add_column(heading, justify="right")
        for heading in ("home", "remote", "decode", "KV/B\nall", "KV/B\nsent"):
            table.add_column(heading, justify="right", style="dim")
        for point in sweep.points:
            if point.deployment == name:
                table.add_row(*_load_row(point))
        console.print(table)
    console.print(
        "• Theory: M/G/c waits of the prefill stages plus prefill. Home, remote, decode: share of their time "
        "in use. P90 turns red beyond twice the unloaded one."
    )


def _load_row(point: LoadPoint) -> Iterator[str]:
    style = "green" if point.p90_over_unloaded <= 2 else "red"
    yield f"{point.load:.2f}"
    yield f"{point.rate_per_s:.2f}"
    yield f"{point.theory_ttft_mean_s:.2f}"
    yield f"{point.ttft_mean_s:.2f}"
    yield f"{point.ttft_p90_s:.2f}"
    yield f"[{style}]{point.p90_over_unloaded:.2f}[/{style}]"
    for stage in ("home", "remote", "decode"):
        share = point.groups.utilisation[stage]
        yield f"{share:.0%}" if share > 0 else "-"
    yield f"{point.groups.offered_kv_over_link:.2f}"
    yield f"{point.groups.kv_over_link:.2f}"

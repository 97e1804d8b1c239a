"""`prfaas simulate validate`: predict measured GPU points, and say how far off the predictions are."""

from __future__ import annotations

import json
import math

import click
from rich.console import Console

from simulations.report.terminal import plain_table
from simulations.validate.closed_loop import Overheads
from simulations.validate.fit import Error, Validation, validate


@click.command(help=__doc__)
@click.option("--data", type=click.Path(), default=None, help="Folder with cost/; default: PRFAAS_DATA.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the split into halves.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(data: str | None, seed: int, as_json: bool) -> None:
    found = validate(seed, data)
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
        return
    show(found, Console())


def show(found: Validation, console: Console) -> None:
    """Print the tables and what to conclude."""
    table = plain_table()
    table.add_column("\nmodel and engine", min_width=30)
    for name in ("\npoints", "TTFT by\ntables", "\nfitted", "TPOT by\ntables", "\nfitted"):
        table.add_column(name, justify="right", no_wrap=True)
    for group in found.groups:
        best, mark = group.own or group.common, "" if group.own else " *"
        table.add_row(
            f"{group.model.split('/')[-1]}\n  {group.system.removesuffix('_sxm')} {group.backend} "
            f"{group.mode}, {group.precision}",
            f"{group.bare.points}",
            _two_lines(group.bare.ttft_median, group.bare.ttft_p90),
            _two_lines(best.ttft_median, best.ttft_p90, mark),
            _two_lines(group.bare.tpot_median, group.bare.tpot_p90),
            _two_lines(best.tpot_median, best.tpot_p90, mark),
        )
    console.print("Relative error |predicted / measured - 1|: median, below it the 90th percentile")
    console.print(table)
    console.print("fitted: on half of the configurations; errors are of the other half. * common overheads")
    for name, error in (
        ("tables alone, all points", found.bare),
        ("one set of overheads, held out", found.common_error),
        ("overheads per model and system, held out", found.own_error),
    ):
        console.print(f"{name:42} {_line(error)}")
    console.print(f"common overheads: {_overheads(found.common)}")
    for group in found.groups:
        if group.overheads:
            name = f"{group.model} {group.system} {group.backend} {group.mode}"
            console.print(f"  {name}: {_overheads(group.overheads)}")
    for reason, count in sorted(found.skipped.items()):
        console.print(f"left out: {count} points: {reason}")
    for sentence in conclusions(found):
        console.print(sentence)


def conclusions(found: Validation) -> list[str]:
    """Plain words on where predictions hold and where they do not."""
    bad_ttft, bad_tpot, good, torn = [], [], [], []
    for group in found.groups:
        best = group.own or group.common
        name = " ".join(
            (group.model.split("/")[-1], group.system.removesuffix("_sxm"), group.backend, group.mode)
        )
        if best.ttft_median > 0.25:
            bad_ttft.append(f"{name} ({best.ttft_median:.0%})")
        if best.tpot_median > 0.15:
            bad_tpot.append(f"{name} ({best.tpot_median:.0%})")
        if max(group.repeats_ttft, group.repeats_tpot) > 1.3:
            torn.append(f"{name} (TTFT {group.repeats_ttft:.1f}x, TPOT {group.repeats_tpot:.1f}x)")
        if best.ttft_median <= 0.25 and best.tpot_median <= 0.15:
            good.append(name)
    sentences = [
        f"The tables alone predict {found.bare.ttft_bias:.2f} of the measured TTFT and "
        f"{found.bare.tpot_bias:.2f} of TPOT (medians): use them with fitted overheads, or for ratios only."
    ]
    if good:
        sentences.append(f"Good to 25 % in TTFT and 15 % in TPOT: {', '.join(good)}.")
    if bad_ttft:
        sentences.append(f"TTFT is bad even when fitted: {', '.join(bad_ttft)}.")
    if bad_tpot:
        sentences.append(f"TPOT is bad even when fitted: {', '.join(bad_tpot)}.")
    if torn:
        sentences.append(
            "Repeated measurements of one configuration differ themselves, so nothing in it explains them "
            f"(speculative decoding, engine settings): {', '.join(torn)}."
        )
    return sentences


def _two_lines(median: float, p90: float, mark: str = "") -> str:
    if math.isnan(median):
        return f"none{mark}\nheld out"
    return f"{median:.0%}{mark}\n({p90:.0%})"


def _shown(median: float, p90: float) -> str:
    if math.isnan(median):
        return "none held out"
    return f"{median:.0%} ({p90:.0%})"


def _line(error: Error) -> str:
    return (
        f"TTFT {_shown(error.ttft_median, error.ttft_p90)}, bias {error.ttft_bias:.2f}; "
        f"TPOT {_shown(error.tpot_median, error.tpot_p90)}, bias {error.tpot_bias:.2f}; {error.points} points"
    )


def _overheads(values: Overheads) -> str:
    return (
        f"prefill_scale {values.prefill_scale:.2f}, decode_scale {values.decode_scale:.2f}, "
        f"step_overhead_s {values.step_overhead_s:.4f}, request_overhead_s {values.request_overhead_s:.3f}, "
        f"in step {values.in_step:.2f}"
    )

"""`prfaas simulate calibrate`: from a live router's log to a fleet file, and how well it replays the log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from prfaas.errors import ConfigError
from simulations.fidelity.calibrate import Calibration, calibrate
from simulations.fidelity.guess import GUESSED, guessed_recording
from simulations.fidelity.recording import Recording, read_decisions, read_recording, with_placements
from simulations.fidelity.replayed import replay_rows
from simulations.fidelity.terms import TermError, term_errors
from simulations.fleet_load import dump_fleet

_LEAST_TO_CHECK = 4
_REPLAYS = 9


@click.command()
@click.option(
    "--decisions", type=click.Path(path_type=Path), help="The router's decision log (`gateway.decision_log`)."
)
@click.option(
    "--journal",
    type=click.Path(path_type=Path),
    help="Its journal (`gateway.journal`): knows workers, pages and prefixes too; better.",
)
@click.option(
    "--use",
    type=click.FloatRange(0.1, 1.0),
    default=None,
    help="Share of the requests to learn from, by arrival [default: all; with --check the first half].",
)
@click.option(
    "--one-machine",
    is_flag=True,
    help="All workers ran on one machine: find out how much they slow each other.",
)
@click.option("--check", is_flag=True, help="Replay the log and report the prediction error per term.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the fleet here, for --fleet.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def command(
    decisions: Path | None,
    journal: Path | None,
    use: float | None,
    one_machine: bool,
    check: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Turn a live router's log into a fleet whose step times are what was measured.

    Give --decisions, or better --journal. Without --out the fleet is printed.
    """
    recording, notes = _read(decisions, journal)
    total = len(recording.rows)
    used = max(1, round(total * (use if use is not None else 0.5 if check else 1.0)))
    if check and total - used < _LEAST_TO_CHECK and used < total:
        raise ConfigError(
            f"{recording.source}: {total} requests leave {total - used} to check with; record more, "
            "or lower --use"
        )
    found = calibrate(recording, used, one_machine=one_machine)
    fleet = dump_fleet(found.fleet)
    if out is not None:
        try:
            out.write_text(fleet, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {out}: {error.strerror}") from error
    report = _report(recording, found, notes)
    if check:
        report["check"] = {
            name: {term: error.as_dict() for term, error in terms.items()}
            for name, terms in check_terms(recording, found).items()
        }
    if as_json:
        click.echo(json.dumps(report))
        return
    _print(Console(highlight=False), report)
    if out is None and not check:
        click.echo(fleet)


def check_terms(recording: Recording, found: Calibration) -> dict[str, dict[str, TermError]]:
    """Errors over the requests that were not learned from (all, where all were), of nine replays each with
    arrivals jittered by up to a decode step.

    Returns:
        `placed_as_recorded`: only times can differ; `placed_by_policy`: placements, too.
    """
    begin = found.used if found.used < len(recording.rows) else 0

    def errors(follow: bool) -> dict[str, TermError]:
        replays = (
            replay_rows(recording, found.fleet, follow=follow, jitter=seed)[begin:]
            for seed in range(_REPLAYS)
        )
        return term_errors(recording.rows[begin:], *replays)

    return {"placed_as_recorded": errors(follow=True), "placed_by_policy": errors(follow=False)}


def _read(decisions: Path | None, journal: Path | None) -> tuple[Recording, list[str]]:
    if journal is not None:
        recording = read_recording(journal)
        if decisions is not None:
            with_placements(recording, read_decisions(decisions))
        return recording, []
    if decisions is None:
        raise click.UsageError("give --decisions FILE (or --journal FILE, which knows more)")
    return guessed_recording(str(decisions), read_decisions(decisions)), [GUESSED]


def _report(recording: Recording, found: Calibration, notes: list[str]) -> dict[str, Any]:
    complete = sum(row.complete for row in recording.rows)
    return {
        "source": recording.source,
        "requests": len(recording.rows),
        "complete": complete,
        "used": found.used,
        "prefill_scale": found.prefill_scale,
        "decode_scale": found.decode_scale,
        "overhead_s": found.overhead_s,
        "machine": None if found.machine is None else msgspec.structs.asdict(found.machine),
        "notes": notes,
    }


def _print(console: Console, report: dict[str, Any]) -> None:
    console.print(
        f"{report['source']}: {report['requests']} requests ({report['complete']} complete), "
        f"learned from the first {report['used']}"
    )
    table = Table("worker", "prefill ÷ calibrated", "decode ÷ calibrated")
    for name, factor in report["prefill_scale"].items():
        table.add_row(name, f"{factor:.3f}", f"{report['decode_scale'][name]:.3f}")
    console.print(table)
    console.print(f"overhead per request {1e3 * report['overhead_s']:.0f} ms")
    if report["machine"] is not None:
        console.print(
            "on the shared machine a step takes "
            + " and ".join(
                f"{share:.0%} more {name.replace('_', ' ')}" for name, share in report["machine"].items()
            )
        )
    for note in report["notes"]:
        console.print(f"note: {note}", style="yellow")
    for name, terms in report.get("check", {}).items():
        console.print(term_table(name, terms))


def term_table(name: str, terms: dict[str, dict[str, float]]) -> Table:
    """Errors per term, as `TermError.as_dict` gives them."""
    table = Table(title=name.replace("_", " "), title_justify="left", box=None, padding=(0, 1, 0, 0))
    for heading in ("term", "n", "P50 s", "sim.", "error", "P90 s", "sim.", "error", "each", "P90"):
        table.add_column(heading, justify="left" if heading == "term" else "right", no_wrap=True)
    table.caption = "each, P90: median and 90th percentile of |simulated ÷ live - 1|, request by request"
    for term, e in terms.items():
        table.add_row(
            term,
            f"{e['rows']:.0f}",
            f"{e['live_median_s']:.3f}",
            f"{e['predicted_median_s']:.3f}",
            f"{e['error_of_median']:+.1%}",
            f"{e['live_p90_s']:.3f}",
            f"{e['predicted_p90_s']:.3f}",
            f"{e['error_of_p90']:+.1%}",
            f"{e['median_error']:.1%}",
            f"{e['p90_error']:.1%}",
        )
    return table

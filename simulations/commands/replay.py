"""`prfaas simulate replay`: one trace, one fleet, one policy."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console

from router.core.events import SchedulerInput
from router.core.journal import JournalHeader, JournalWriter
from simulations.commands.options import Given, check_parent, inputs
from simulations.commands.policy_spec import PolicySpec, fleet_policy, parse_policy
from simulations.commands.study import end_without_bound, study_of
from simulations.console import INTERRUPTED, note, progress
from simulations.engine.run import RunOptions, simulate
from simulations.fleet import Fleet
from simulations.fleet_load import convert_scheduler
from simulations.report.rows import check_rows_path, whole_file, write_rows
from simulations.report.summary import summarize
from simulations.report.terminal import print_run
from simulations.report.write import check_folder, write_report


@click.command()
@inputs
@click.option("--policy", "policy_text", metavar="SPEC", help="NAME[:param=value,…] [default: the fleet's].")
@click.option("--bound/--no-bound", default=False, help="Also say which rate no policy could exceed.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
@click.option("--out", type=click.Path(path_type=Path), help="Every request: FILE.parquet or FILE.jsonl.")
@click.option("--report", type=click.Path(path_type=Path), help="Folder for an HTML page, PNGs and data.")
@click.option("--journal", type=click.Path(path_type=Path), help="Every input of the scheduler, as live.")
def command(
    given: Given,
    policy_text: str | None,
    bound: bool,
    as_json: bool,
    out: Path | None,
    report: Path | None,
    journal: Path | None,
) -> None:
    """Replay one trace on one fleet under one policy.

    Ctrl-C ends the run; what is known by then is shown, marked as partial, with exit code 130.
    """
    check_parent("--journal", journal)
    check_parent("--out", out)
    if out:
        check_rows_path(out)
    if report:
        check_folder(report)
    trace, fleet = given.load()
    spec = fleet_policy(fleet) if policy_text is None else parse_policy(policy_text)
    policy = spec.make()
    with _journal(journal, spec, fleet, given.seed) as record, progress(spec.label) as show:
        options = RunOptions(
            seed=given.seed, causal=given.causal, journal=record, progress=show, drop_first=given.warm_up
        )
        run = spec.labelled(simulate(trace, fleet, policy, options))
    bound = (bound or report is not None) and run.complete
    study = study_of(trace, fleet, [run], bound=bound, warm_up=given.warm_up)
    summary = summarize(run, fleet, study.bound_rps)
    if as_json:
        click.echo(json.dumps(summary, indent=2))
    else:
        print_run(Console(), run, summary)
    if out:
        write_rows(out, run)
        note(f"every request: {out}")
    if report:
        note(f"report: {write_report(report, study)}")
    if not run.complete:
        note("prfaas: stopped before the end; the figures above are partial")
        sys.exit(INTERRUPTED)
    if bound and study.bound_rps is None:
        end_without_bound()


Record = Callable[[SchedulerInput], None] | None


@contextmanager
def _journal(path: Path | None, spec: PolicySpec, fleet: Fleet, seed: int) -> Iterator[Record]:
    """What records the scheduler's inputs; nothing where no journal was asked for."""
    if path is None:
        yield None
        return
    header = JournalHeader(
        seed=seed, policy=spec.name, parameters=spec.parameters, config=convert_scheduler(fleet)
    )
    with whole_file(path) as file:
        yield JournalWriter(file, header)

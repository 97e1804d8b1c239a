"""`prfaas simulate compare`: the same trace on the same fleet under several policies."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import msgspec
from rich.console import Console

from simulations.commands.options import Given, inputs
from simulations.commands.policy_spec import PolicySpec, parse_policies
from simulations.commands.study import end_without_bound, study_of
from simulations.console import INTERRUPTED, Report, note, progress
from simulations.engine.run import RunOptions, simulate
from simulations.experiments.context import Context
from simulations.experiments.sweep import run_all
from simulations.fleet import Fleet
from simulations.report.terminal import print_comparison
from simulations.report.write import best_first, check_folder, report_data, write_report
from simulations.result import RunResult
from simulations.workload.trace import Trace


@click.command()
@inputs
@click.option("--policies", required=True, metavar="SPEC,…", help="NAME[:param=value,…], joined by commas.")
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Processes [default: one per policy, up to all cores]."
)
@click.option("--ray", "ray_address", default="", metavar="ADDRESS", help="Run on this Ray cluster.")
@click.option("--bound/--no-bound", default=True, help="Also say which rate no policy could exceed.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
@click.option("--report", type=click.Path(path_type=Path), help="Folder for an HTML page, PNGs and data.")
def command(
    given: Given,
    policies: str,
    jobs: int | None,
    ray_address: str,
    bound: bool,
    as_json: bool,
    report: Path | None,
) -> None:
    """Replay the same trace under several policies, side by side.

    Ctrl-C shows the policies that ended, in one process also the running one as partial; exit code 130.
    """
    if report:
        check_folder(report)
    specs = parse_policies(policies)
    for spec in specs:
        spec.make()  # mistakes show before hours of work, not after
    trace, fleet = given.load()
    runs = replays(trace, fleet, specs, given, jobs, ray_address)
    if not runs:
        raise KeyboardInterrupt
    complete = len(runs) == len(specs) and all(run.complete for run in runs)
    bound = bound and complete
    study = study_of(trace, fleet, runs, bound=bound, warm_up=given.warm_up)
    study = best_first(study)
    data, summaries, findings = report_data(study)
    if as_json:
        shown = {key: data[key] for key in ("command", "bound", "findings")}
        shown |= {"complete": complete, "runs": summaries}
        click.echo(msgspec.json.format(msgspec.json.encode(shown)).decode())
    else:
        print_comparison(Console(), summaries, findings)
    if report:
        note(f"report: {write_report(report, study)}")
    if not complete:
        ended = {run.policy for run in runs}
        missing = ", ".join(spec.label for spec in specs if spec.label not in ended)
        note(f"prfaas: stopped before the end; partial{f', without {missing}' if missing else ''}")
        sys.exit(INTERRUPTED)
    if bound and study.bound_rps is None:
        end_without_bound()


# ---------------------------------------------------------------- the runs


@dataclass(frozen=True, slots=True)
class _Task:
    fleet: Fleet
    spec: PolicySpec
    given: Given


def replays(
    trace: Trace, fleet: Fleet, specs: Sequence[PolicySpec], given: Given, jobs: int | None, ray: str
) -> list[RunResult]:
    """A run of each policy, in their order; after Ctrl-C only those that are known."""
    tasks = [_Task(fleet, spec, given) for spec in specs]
    traces = {"trace": trace}
    jobs = jobs or min(len(specs), os.cpu_count() or 1)
    if jobs == 1 and not ray:
        with progress("replaying") as show:
            work = partial(_replay, show=_of_all(show, len(specs)))
            found, _ = run_all(work, tasks, traces, on_result=_end_where_stopped)
    else:
        with progress("replaying", unit="policies") as show:
            done: list[int] = []

            def ended(chain: int, _: RunResult) -> None:
                done.append(chain)
                show(len(done), len(specs))

            show(0, len(specs))
            found, _ = run_all(_replay, tasks, traces, jobs=jobs, ray=ray, on_result=ended)
    return [run for run in found if run is not None]


def _replay(context: Context, task: _Task, show: Report | None = None) -> RunResult:
    given = task.given
    options = RunOptions(
        seed=given.seed, causal=given.causal, drop_first=given.warm_up, progress=show, stop=context.stopped
    )
    return task.spec.labelled(simulate(context.trace("trace"), task.fleet, task.spec.make(), options))


def _of_all(show: Report, runs: int) -> Report:
    """Progress over all runs, told of one after the other."""
    before, last = 0, 0

    def report(done: int, total: int) -> None:
        nonlocal before, last
        before += total if done < last else 0
        last = done
        show(before + done, runs * total)

    return report


def _end_where_stopped(_: int, run: RunResult) -> None:
    """In one process, Ctrl-C ends a run with what is known: the runs after it must not begin."""
    if not run.complete:
        raise KeyboardInterrupt

"""`prfaas simulate paper`: the PrfaaS case study, by the paper's model and event by event."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from prfaas.errors import ConfigError
from simulations.console import INTERRUPTED, progress
from simulations.experiments.backends import make_backend
from simulations.experiments.context import Context
from simulations.experiments.sweep import run_round
from simulations.paper.case import Case, paper_case
from simulations.paper.event_driven import (
    Effort,
    Job,
    RunJobs,
    Sample,
    jobs_of,
    link_rtt_s,
    run_job,
    search,
    with_lines,
)
from simulations.paper.link_sweep import add_queues, sweep_link
from simulations.paper.load_sweep import jobs_of_loads, sweep_load
from simulations.paper.model import figures, paper_splits
from simulations.paper.plot import Picture, check_plot_path, link_picture, load_picture, write_picture
from simulations.paper.report import PaperReport, analytic_figures
from simulations.paper.sweep_range import SweepRange, parse_sweep
from simulations.paper.sweep_tables import print_link_sweep, print_loads
from simulations.paper.tables import print_report

DEFAULTS = Effort()
POINTS = {"link": 21, "load": 8}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
@click.option("--model-only", is_flag=True, help="Only the paper's model, without event-driven runs.")
@click.option(
    "--event-driven", is_flag=True, help="With --sweep link: also search every link event by event (minutes)."
)
@click.option("--sweep", metavar="RANGE", help="link=1..100Gbps (model) or load=0.1..0.95 (event-driven).")
@click.option("--points", type=click.IntRange(2, 1000), help="Of a sweep [default: 21 links, 8 loads].")
@click.option("--plot", type=click.Path(path_type=Path), help="Picture of the sweep, .png or .html.")
@click.option(
    "--requests",
    type=click.IntRange(min=50),
    default=DEFAULTS.requests,
    show_default=True,
    help="In each event-driven run.",
)
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    default=DEFAULTS.seeds,
    show_default=True,
    help="Runs at each rate.",
)
@click.option("--cores", type=click.IntRange(min=1), help="Processes for the runs [default: all cores].")
def command(
    as_json: bool,
    model_only: bool,
    event_driven: bool,
    sweep: str | None,
    points: int | None,
    plot: Path | None,
    requests: int,
    seeds: int,
    cores: int | None,
) -> None:
    """Reproduce the PrfaaS case study (arXiv 2604.15039).

    Three deployments by the paper's model and event by event with Poisson arrivals, beside the published
    figures. docs/paper.md says what is fitted and what is predicted.
    """
    asked = _check(sweep, points, plot, model_only, event_driven)
    output = Output(as_json, plot)
    work = Work(Effort(requests=requests, seeds=seeds), cores or os.cpu_count() or 1)
    case = paper_case()
    if asked is None:
        _study(case, None if model_only else work, output)
    elif asked.kind == "link":
        _links(case, asked, points or POINTS["link"], work if event_driven else None, output)
    else:
        _loads(case, asked.values(points or POINTS["load"]), work, output)


@dataclass(frozen=True, slots=True)
class Output:
    """Where results go."""

    as_json: bool
    plot: Path | None

    def show(self, value: dict[str, Any], table: Callable[[Console], None]) -> None:
        if self.as_json:
            click.echo(json.dumps(value, indent=2, allow_nan=False))
        else:
            table(Console())

    def draw(self, picture: Picture) -> None:
        if self.plot:
            write_picture(picture, self.plot)
            click.echo(f"wrote {self.plot}", err=True)


@dataclass(frozen=True, slots=True)
class Work:
    """How much to simulate, on how many cores."""

    effort: Effort
    cores: int

    @contextmanager
    def runner(self, total: int) -> Iterator[RunJobs]:
        """Does jobs, and shows how many of `total` are done."""
        with (
            progress("event-driven", unit="runs") as show,
            make_backend(_run_job, {}, jobs=self.cores, ray="") as backend,
        ):
            done = 0

            def count(_: int, __: Sample) -> None:
                nonlocal done
                done += 1
                show(done, total)

            show(0, total)
            yield lambda jobs: run_round(backend, jobs, count)


def _run_job(_: Context, job: Job) -> Sample:
    return run_job(job)


def _study(case: Case, work: Work | None, output: Output) -> None:
    analytic, splits = analytic_figures(case), paper_splits(case)
    queue_free = {name: figures(with_lines(case), split).lambda_max for name, split in splits.items()}
    if work is None:
        report = PaperReport(analytic, {}, queue_free)
    else:
        with work.runner(jobs_of(work.effort, len(splits))) as run_jobs:
            found = search(case, splits, queue_free, work.effort, run_jobs)
        report = PaperReport(analytic, found.figures, queue_free, found.complete)
    output.show(report.as_dict(), lambda console: print_report(console, report))
    _end_where_broken_off(report.complete)


def _links(case: Case, asked: SweepRange, points: int, work: Work | None, output: Output) -> None:
    links = sweep_link(case, asked.values(points), link_rtt_s())
    if work is not None:
        with work.runner(points * jobs_of(work.effort, 1)) as run_jobs:
            links = add_queues(case, links, work.effort, run_jobs)
    output.show(links.as_dict(), lambda console: print_link_sweep(console, links))
    _end_where_broken_off(links.complete)
    if output.plot:  # a smooth line needs more points than a table
        output.draw(link_picture(sweep_link(case, asked.values(max(points, 200)), link_rtt_s())))


def _loads(case: Case, values: Sequence[float], work: Work, output: Output) -> None:
    splits = paper_splits(case)
    rates = {name: figures(case, split).lambda_max for name, split in splits.items()}
    with work.runner(jobs_of_loads(work.effort, len(splits), len(values))) as run_jobs:
        loads = sweep_load(case, splits, rates, values, work.effort, link_rtt_s(), run_jobs)
    output.show(loads.as_dict(), lambda console: print_loads(console, loads))
    _end_where_broken_off(loads.complete)
    output.draw(load_picture(loads))


def _check(
    sweep: str | None, points: int | None, plot: Path | None, model_only: bool, event_driven: bool
) -> SweepRange | None:
    """
    Raises:
        ConfigError: options that contradict each other, or nonsense in one of them.
    """
    asked = parse_sweep(sweep) if sweep is not None else None
    if asked is None and (plot or points):
        raise ConfigError("--plot and --points are of a sweep: add --sweep link=1..100Gbps")
    if asked is not None and asked.kind == "load" and model_only:
        raise ConfigError("--sweep load=... is event-driven: leave out --model-only")
    if event_driven and (asked is None or asked.kind != "link"):
        raise ConfigError(
            "--event-driven is for --sweep link=...; without --sweep those runs are made anyway"
        )
    if plot:
        check_plot_path(plot)
    return asked


def _end_where_broken_off(complete: bool) -> None:
    """After what is known has been printed: say that it is not all."""
    if not complete:
        click.echo("prfaas: broken off; the event-driven figures above are what was known by then", err=True)
        sys.exit(INTERRUPTED)

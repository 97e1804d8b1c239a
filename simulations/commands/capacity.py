"""`prfaas simulate capacity`: the highest rate within the service levels; the cheapest fleet for a rate."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from prfaas.errors import ConfigError, PrfaasError
from simulations.bound import Bound
from simulations.commands.compare import replays
from simulations.commands.options import Given, inputs
from simulations.commands.policy_spec import PolicySpec, parse_policies
from simulations.commands.study import command_line
from simulations.console import INTERRUPTED, note, progress
from simulations.experiments.capacity import Capacity, CapacityStudy, Trial, capacity, counted
from simulations.experiments.cheapest import Cheapest, Option, cheapest_fleet
from simulations.experiments.levels import asked, parse_slo
from simulations.fleet import SLO, Fleet
from simulations.report.study import Study
from simulations.report.summary import duration, level_name, level_text
from simulations.report.terminal import plain_table
from simulations.report.write import check_folder, write_report
from simulations.workload.trace import Trace

USUAL_RUNS = 9
"""Of one bisection: what the progress bar reckons with."""
SHORT = 0.1
"""Overhang from which on a trace is called short."""


@click.command()
@inputs
@click.option("--policies", required=True, metavar="SPEC,…", help="NAME[:param=value,…], joined by commas.")
@click.option(
    "--slo", "slo_text", metavar="LEVEL=TIME,…", help="E.g. ttft_p90=2s,tpot_p90=50ms [fleet's own]."
)
@click.option(
    "--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="Runs; the median counts."
)
@click.option("--tolerance", type=click.FloatRange(0.001, 0.5), default=0.02, show_default=True)
@click.option("--free-roles", is_flag=True, help="A bound for policies that convert workers, too.")
@click.option("--cheapest", is_flag=True, help="Instead: the cheapest worker counts that serve --rate.")
@click.option("--most", type=click.IntRange(min=1), default=64, show_default=True, help="Workers in a group.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Processes.")
@click.option("--ray", default="", metavar="ADDRESS", help="Run on a Ray cluster; `local` starts one here.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
@click.option("--report", type=click.Path(path_type=Path), help="Folder for an HTML page, PNGs and data.")
def command(
    given: Given,
    policies: str,
    slo_text: str | None,
    seeds: int,
    tolerance: float,
    free_roles: bool,
    cheapest: bool,
    most: int,
    jobs: int,
    ray: str,
    as_json: bool,
    report: Path | None,
) -> None:
    """Highest arrival rate that meets the service levels, by policy, and its share of the bound.

    Arrivals are sped up or slowed down until the levels just hold for every percentile asked for and every
    request is served. A report compares the policies at the highest rate found. With --cheapest and --rate:
    the cheapest fleet for that rate, by `price_per_hour`.
    Ctrl-C shows what is known, with exit code 130.
    """
    specs = parse_policies(policies)
    for spec in specs:
        spec.make()  # mistakes show before hours of work, not after
    if cheapest and given.rate_rps is None:
        raise ConfigError("--cheapest needs --rate, the requests per second to serve")
    if not cheapest and (given.rate_rps is not None or given.rate_scale is not None):
        raise ConfigError(
            "--rate and --rate-scale are for --cheapest: capacity is the rate that is searched for"
        )
    if cheapest and report:
        raise ConfigError("--report is about capacities: leave it or --cheapest out")
    if report:
        check_folder(report)
    slo = parse_slo(slo_text) if slo_text else None
    trace, fleet = given.load()
    search = Search(trace, fleet, specs, slo if slo is not None else fleet.slo, given, jobs, ray, free_roles)
    if cheapest:
        _cheapest(search, most, as_json)
    else:
        _capacities(search, range(given.seed, given.seed + seeds), tolerance, as_json, report)


@dataclass(frozen=True, slots=True)
class Search:
    """What both searches need."""

    trace: Trace
    fleet: Fleet
    specs: Sequence[PolicySpec]
    slo: SLO
    given: Given
    jobs: int
    ray: str
    free_roles: bool


def _capacities(
    search: Search, seeds: Sequence[int], tolerance: float, as_json: bool, report: Path | None
) -> None:
    total = len(search.specs) * len(seeds) * USUAL_RUNS
    done = 0
    with progress("runs", unit="runs") as show:

        def count(chain: int, trial: Trial) -> None:
            nonlocal done
            done += 1
            show(done, max(total, done + 1))

        study = capacity(
            search.trace,
            search.fleet,
            search.specs,
            search.slo,
            seeds=seeds,
            tolerance=tolerance,
            drop_first=search.given.warm_up,
            causal=search.given.causal,
            free_roles=search.free_roles,
            jobs=search.jobs,
            ray=search.ray,
            on_trial=count,
        )
    if as_json:
        found = {
            "trace": search.trace.name,
            "fleet": search.fleet.name,
            "slo": asked(search.slo),
            "complete": not study.interrupted,
            "bound": bound_data(study.bound),
            "policies": [capacity_data(c, study.bound) for c in study.capacities],
        }
        click.echo(json.dumps(found, indent=2))
    else:
        _print(study, search)
    _warn_if_short(study)
    _end(study, search.slo)
    if report:
        note(f"report: {write_report(report, _at_best_rate(study, search))}")


def _at_best_rate(study: CapacityStudy, search: Search) -> Study:
    """All policies at the highest rate that any of them serves within the levels; beside it their capacities.

    Raises:
        KeyboardInterrupt: Ctrl-C during one of the runs.
    """
    rate_per_s = max(found.rate_per_s for found in study.capacities)
    given, fleet = search.given, msgspec.structs.replace(search.fleet, slo=search.slo)
    trace = search.trace.at_rate(rate_per_s / counted(search.trace, given.warm_up).rate_per_s)
    runs = replays(trace, fleet, search.specs, given, search.jobs, search.ray)
    if len(runs) < len(search.specs) or not all(run.complete for run in runs):
        raise KeyboardInterrupt
    return Study(
        fleet,
        tuple(runs),
        bound_rps=study.bound.rate_per_s,
        binding=", ".join(study.bound.binding[:2]),
        capacity_rps={found.policy: found.rate_per_s for found in study.capacities},
        command=command_line(),
    )


def _warn_if_short(study: CapacityStudy) -> None:
    most = max((c.best.overhang for c in study.capacities if c.best), default=0.0)
    if most > SHORT:
        note(
            f"the trace is short for these levels: its last answers end up to {most:.0%} of its length after "
            "the last arrival, and rates may exceed what can be sustained by as much; use more requests"
        )


def _end(study: CapacityStudy, slo: SLO) -> None:
    """Exit codes: 130 after Ctrl-C, 1 where no policy can meet the levels."""
    if study.interrupted:
        note("prfaas: stopped before the end; rates are what was known by then")
        sys.exit(INTERRUPTED)
    if not any(c.rate_per_s for c in study.capacities):
        raise PrfaasError(
            f"no policy meets {_levels(slo)} at any rate: even at "
            + "; ".join(f"{_slowest(c)} under `{c.policy}`" for c in study.capacities)
            + ". Loosen --slo, or use faster workers"
        )


def _slowest(found: Capacity) -> str:
    trials = [trial for trials in found.trials for trial in trials]
    if not trials:
        return "nothing tried"
    trial = min(trials, key=lambda trial: trial.rate_per_s)
    return f"{trial.rate_per_s:.3g} requests/s {_missed(trial)}"


# ---------------------------------------------------------------- JSON


def bound_data(bound: Bound) -> dict[str, Any]:
    return {
        "rate_per_s": bound.rate_per_s,
        "binding": list(bound.binding),
        "utilisation": bound.utilisation(),
        "shares": bound.shares,
        "prices": {
            "prefill_second": bound.prices.prefill_second,
            "link_byte": bound.prices.link_byte,
            "decode": {
                group: {name: getattr(prices, name) for name in prices.__slots__}
                for group, prices in bound.prices.decode.items()
            },
        },
    }


def capacity_data(found: Capacity, bound: Bound) -> dict[str, Any]:
    best, miss = found.best, found.first_miss
    return {
        "policy": found.policy,
        "rate_per_s": found.rate_per_s,
        "by_seed": list(found.by_seed),
        "over_bound": found.rate_per_s / bound.rate_per_s,
        "complete": found.complete,
        "figures": best.figures if best else None,
        "throughput_over_bound": best.throughput_per_s / bound.rate_per_s if best else None,
        "first_miss": {"rate_per_s": miss.rate_per_s, "missed": miss.missed} if miss else None,
        "runs": sum(len(trials) for trials in found.trials),
    }


# ---------------------------------------------------------------- tables


def _print(study: CapacityStudy, search: Search) -> None:
    console = Console()
    bound = study.bound
    console.print(f"{search.trace.name} on {search.fleet.name}; {_levels(search.slo)}, every request served")
    console.print(f"no policy can sustain more than {bound.rate_per_s:.4g} requests/s: {_binding(bound)}")
    table = policy_rows(console, "offered\nreq/s", "by\nbound", "served by\nbound", "TTFT\nP90", "TPOT\nP90")
    table.add_column("\nlimited by", min_width=len("TTFT P90 10.5 s"))
    for found in sorted(study.capacities, key=lambda c: -c.rate_per_s):
        best = found.best
        table.add_row(
            found.policy,
            f"{found.rate_per_s:.4g}" if best else "none",
            f"{found.rate_per_s / bound.rate_per_s:.1%}" if best else "",
            f"{best.throughput_per_s / bound.rate_per_s:.1%}" if best else "",
            duration(best.figures["ttft_p90_s"]) if best else "",
            duration(best.figures["tpot_p90_s"]) if best else "",
            _limit(found),
        )
    console.print(table)


def policy_rows(console: Console, *figures: str) -> Table:
    """A table with a policy's name and figures in each row, that fits 80 columns."""
    table = plain_table()
    table.add_column("\npolicy", max_width=max(16, console.width // 4), overflow="fold")
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _limit(found: Capacity) -> str:
    """Why no higher rate."""
    if found.best is None:
        return _slowest(found)
    if found.first_miss is not None:
        return _missed(found.first_miss)
    return "not reached" if found.complete else "not known"


def _binding(bound: Bound) -> str:
    return ", ".join(bound.binding[:3]) or "nothing"


def _levels(slo: SLO) -> str:
    return ", ".join(f"{level_name(level)} ≤ {level_text(value)}" for level, value in asked(slo).items())


def _missed(trial: Trial) -> str:
    return ", ".join(
        f"{value:.0f} not served" if level == "unserved" else f"{level_name(level)} {duration(value)}"
        for level, value in trial.missed.items()
    )


# ---------------------------------------------------------------- cheapest fleet


def _cheapest(search: Search, most: int, as_json: bool) -> None:
    rate_per_s = search.given.rate_rps
    assert rate_per_s is not None
    found = []
    for spec in search.specs:
        with progress(f"fleets under {spec.label}", unit="simulated") as show:
            tried = 0

            def count(option: Option) -> None:
                nonlocal tried
                tried += 1
                show(tried, tried + 1)

            one = cheapest_fleet(
                search.trace,
                search.fleet,
                spec,
                rate_per_s,
                search.slo,
                seed=search.given.seed,
                drop_first=search.given.warm_up,
                most_per_group=most,
                jobs=search.jobs,
                ray=search.ray,
                on_trial=count,
            )
        found.append(one)
        if one.interrupted:
            break
    complete = len(found) == len(search.specs) and not found[-1].interrupted
    if as_json:
        data = {
            "complete": complete,
            "slo": asked(search.slo),
            "policies": [_cheapest_data(c) for c in found],
        }
        click.echo(json.dumps(data, indent=2))
    else:
        _print_cheapest(found, search)
    if not complete:
        note("prfaas: stopped before the end; cheaper fleets than those tried are known not to do")
        sys.exit(INTERRUPTED)


def _option_data(option: Option) -> dict[str, Any]:
    return {
        "workers": option.counts,
        "price_per_hour": option.price_per_hour,
        "bound_per_s": option.bound_per_s,
        "met": option.trial.met,
        "missed": option.trial.missed,
        "figures": option.trial.figures,
    }


def _cheapest_data(found: Cheapest) -> dict[str, Any]:
    return {
        "policy": found.policy,
        "rate_per_s": found.rate_per_s,
        "cheapest": _option_data(found.found) if found.found else None,
        "tried": [_option_data(option) for option in found.tried],
        "ruled_out_by_bound": found.ruled_out,
    }


def _print_cheapest(found: Sequence[Cheapest], search: Search) -> None:
    console = Console()
    console.print(f"{search.trace.name}; {_levels(search.slo)}, every request served")
    table = policy_rows(
        console, "price\nper hour", "bound\nreq/s", "TTFT\nP90", "fleets\ntried", "ruled\nout"
    )
    table.add_column("\nworkers")
    for one in found:
        option = one.found
        table.add_row(
            one.policy,
            f"{option.price_per_hour:.2f}" if option else "not found",
            f"{option.bound_per_s:.3g}" if option else "",
            duration(option.trial.figures["ttft_p90_s"]) if option else "",
            str(len(one.tried)),
            str(one.ruled_out),
            ", ".join(f"{n} {group}" for group, n in option.counts.items() if n) if option else "",
        )
    console.print(table)

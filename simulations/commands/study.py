"""From runs to what a report is about: beside the runs, the rate that no policy can exceed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from simulations.bound import fluid_bound
from simulations.console import INTERRUPTED, note
from simulations.fleet import Fleet
from simulations.report.study import Study
from simulations.result import RunResult
from simulations.workload.trace import Trace


def study_of(
    trace: Trace, fleet: Fleet, runs: Sequence[RunResult], *, bound: bool, warm_up: float = 0.0
) -> Study:
    """`runs` of `trace` on `fleet`; with `bound`, the fluid bound of the counted requests is computed.

    Ctrl-C while it is computed leaves it out: the runs have ended and are worth showing.
    """
    without = Study(fleet, tuple(runs), command=command_line())
    if not bound:
        return without
    note("computing the rate that no policy can exceed …")
    try:
        found = fluid_bound(trace, fleet, first=int(warm_up * len(trace)))
    except KeyboardInterrupt:
        return without
    return Study(
        fleet,
        tuple(runs),
        bound_rps=found.rate_per_s,
        binding=", ".join(found.binding[:2]),
        command=command_line(),
    )


def end_without_bound() -> NoReturn:
    """After all else has been shown: say that Ctrl-C came before the bound."""
    note("prfaas: stopped before the rate that no policy can exceed was known; the runs are complete")
    sys.exit(INTERRUPTED)


def command_line() -> str:
    """What was typed, with the program's name alone in front."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])

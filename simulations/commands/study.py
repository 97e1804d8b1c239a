"""From runs to what a report is about: beside the runs, the rate that no policy can exceed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from simulations.bound import fluid_bound
from simulations.console import note
from simulations.fleet import Fleet
from simulations.report.study import Study
from simulations.result import RunResult
from simulations.workload.trace import Trace


def study_of(
    trace: Trace, fleet: Fleet, runs: Sequence[RunResult], *, bound: bool, warm_up: float = 0.0
) -> Study:
    """`runs` of `trace` on `fleet`; with `bound`, the fluid bound of the counted requests is computed."""
    if not bound:
        return Study(fleet, tuple(runs), command=command_line())
    note("computing the rate that no policy can exceed …")
    found = fluid_bound(trace, fleet, first=int(warm_up * len(trace)))
    return Study(
        fleet,
        tuple(runs),
        bound_rps=found.rate_per_s,
        binding=", ".join(found.binding[:2]),
        command=command_line(),
    )


def command_line() -> str:
    """What was typed, with the program's name alone in front."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])

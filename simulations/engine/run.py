"""`simulate`: one trace, one fleet, one policy, one seed → one result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from policies.types import Policy
from router.core.events import SchedulerInput
from simulations.fleet import Fleet
from simulations.result import RunResult
from simulations.workload.trace import Trace


@dataclass(frozen=True, slots=True)
class RunOptions:
    seed: int = 0
    causal: bool = False
    """Turn n+1 of a session waits for the answer to turn n plus its think time; else arrivals as recorded."""
    journal: Callable[[SchedulerInput], None] | None = None
    """Gets every scheduler input, as the live router's journal does."""
    progress: Callable[[int, int], None] | None = None
    """Called now and then with (requests ended, requests in all)."""
    stop: Callable[[], bool] | None = None
    """Asked now and then; True ends the run with what is known (`RunResult.complete` is False)."""
    drop_first: float = 0.0
    """Share of the requests, by arrival, that only warm the caches and do not appear in the result."""


def simulate(trace: Trace, fleet: Fleet, policy: Policy, options: RunOptions | None = None) -> RunResult:
    """Replay `trace` through the live scheduler against simulated workers and links.

    Raises:
        FleetError: the fleet cannot hold the trace's requests, or a profile is unknown.
    """
    raise NotImplementedError

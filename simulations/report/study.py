"""What a report is about: runs of one trace on one fleet, and what is known beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from simulations.fleet import Fleet
from simulations.result import RunResult


@dataclass(frozen=True, slots=True)
class Study:
    """Material of one report; every run is of the same fleet and requests."""

    fleet: Fleet
    runs: tuple[RunResult, ...]
    """At least one; `RunResult.policy` tells them apart."""
    bound_rps: float | None = None
    """Requests per second that no policy can exceed on this trace and fleet."""
    binding: str = ""
    """Which resource the bound runs out of first, in words."""
    capacity_rps: Mapping[str, float] = field(default_factory=dict)
    """By policy: highest rate that met the service levels, where it was searched for."""
    command: str = ""
    """Command line that made it, shown at the page's end."""

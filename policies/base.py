"""What most policies share: defaults for all but `choose`, and the least-value rule with fair ties."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from policies.types import Candidates, Command, FleetView, Floats, Ints, Outcome, RequestView


class BasePolicy(ABC):
    """A policy without memory; override `observe` and `control` to have one."""

    @abstractmethod
    def choose(
        self, request: RequestView, candidates: Candidates, view: FleetView, rng: np.random.Generator
    ) -> int:
        """Index of the chosen candidate, or `policies.types.REFUSE`."""

    def observe(self, outcome: Outcome) -> None:  # noqa: B027 - forgetting is a fine default
        """Ignore what became of a request."""

    def control(self, view: FleetView, now_s: float) -> list[Command]:
        """No slow-timescale orders."""
        return []


def least(
    values: Floats,
    candidates: Candidates,
    view: FleetView,
    rng: np.random.Generator,
    rows: Ints | None = None,
) -> int:
    """Index of the least of `values`, among `rows` where given.

    Exact ties go to the site with the least prefill booked, then to the decode worker with the fewest
    running, then to chance: equal workers must share the load, not all go to the first.
    """
    among = values if rows is None else values[rows]
    tied = np.flatnonzero(among == among.min())
    if rows is not None:
        tied = rows[tied]
    if len(tied) == 1:
        return int(tied[0])
    loads = [
        (view.queued_tokens[candidates.site[index]], view.running[candidates.decode[index]]) for index in tied
    ]
    idlest = [index for index, load in zip(tied, loads, strict=True) if load == min(loads)]
    return int(idlest[0] if len(idlest) == 1 else idlest[rng.integers(len(idlest))])

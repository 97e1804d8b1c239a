"""What most policies share: defaults for all but `choose`, and the least-value rule with fair ties."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from policies.types import Candidates, Command, FleetView, Floats, Ints, Outcome, RequestView


class BasePolicy(ABC):
    """A policy without memory; override `observe` and `control` to have one."""

    takes_cheapest = False
    """Whether `choose` takes the least of `cost_s` or much the same: in large fleets it is then shown a
    shortlist of pairs (`SchedulerConfig.shortlist`) instead of all."""

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
    # Much quicker than `among.min()` and `np.flatnonzero`, which matters: most policies end here.
    tied = (among == among[among.argmin()]).nonzero()[0]
    if rows is not None:
        tied = rows[tied]
    if len(tied) == 1:
        return int(tied[0])
    return pick(
        tied, rng, gather(view.queued_tokens, candidates.site), gather(view.running, candidates.decode)
    )


def pick(rows: Ints, rng: np.random.Generator, *keys: Floats) -> int:
    """The one of `rows` with the least first key, of equal ones the least second key and so on; equal in
    all, by chance. Keys have one value per candidate, not per row."""
    for key in keys:
        among = key[rows]
        rows = rows[among == among.min()]
        if len(rows) == 1:
            return int(rows[0])
    return int(rows[0] if len(rows) == 1 else rows[rng.integers(len(rows))])


def gather(values: Mapping[str, float], names: Sequence[str]) -> Floats:
    """`values` of each name, shape [len(names)]; read only. Live views answer from their table at once, and
    quickest for the same tuple of names again; plain mappings are asked one by one."""
    take = getattr(values, "take", None)
    if take is not None and isinstance(names, tuple):
        column: Floats = take(names)
        return column
    return np.array([values[name] for name in names], dtype=np.float64)

"""The slow timescale: which worker of a PD cluster changes sides, if any."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from policies.threshold_solver import ThresholdProblem
from policies.types import FleetView

REFILL_S = 30.0
"""How long prefixes of a converted worker are computed again elsewhere: a guess, as nobody measures it."""
LEAST_GAIN = 0.05
"""Of what is served now: less is within the noise of the measurements, and roles would swing."""
GIVE_UP_S = 600.0
"""A conversion that has not happened by then was not carried out."""


@dataclass(frozen=True, slots=True)
class Demand:
    rate: float
    """Requests per second that arrive."""
    reuse: float
    """Cached tokens per computed one: what a cache is worth."""
    answer_s: float
    """How long a sequence decodes: what draining a decode worker takes."""


class RoleController:
    """Orders one conversion at a time, when what it gains within the horizon exceeds what it costs.

    Gain: more requests per second, by the throughput model with one worker moved and the threshold solved
    again, as far as there is demand for them, times the horizon. Cost, in requests too: the worker serves
    nobody while it drains, and the prefixes that it held are computed again.

    Args:
        horizon_s: how long a gain is expected to last.
        cooldown_s: between two orders, so that the effect of one is seen before the next.
        headroom: demand is taken this much higher, so that roles change before queues grow.
    """

    def __init__(self, horizon_s: float = 300.0, cooldown_s: float = 60.0, headroom: float = 1.2) -> None:
        self._horizon_s, self._cooldown_s, self._headroom = horizon_s, cooldown_s, headroom
        self._ordered_s = -math.inf
        self._pending: tuple[str, str] | None = None

    def decide(
        self,
        problem: ThresholdProblem,
        prefills: Sequence[str],
        decodes: Sequence[str],
        demand: Demand,
        view: FleetView,
    ) -> tuple[str, str] | None:
        """(worker, new role), or None: leave everything as it is.

        Args:
            prefills: ready prefill workers of PD clusters.
            decodes: ready decode workers.
        """
        if self._waits(view):
            return None
        wanted = demand.rate * self._headroom
        now = _served(problem, len(prefills), len(decodes), wanted)
        best, best_net = None, 0.0
        for role in ("prefill", "decode"):
            worker = _spare(prefills if role == "decode" else decodes, view, role)
            if worker is None:
                continue
            step = 1 if role == "prefill" else -1
            gain = _served(problem, len(prefills) + step, len(decodes) - step, wanted) - now
            net = gain * self._horizon_s - _cost(problem, prefills, decodes, worker, role, demand, now, view)
            if gain > LEAST_GAIN * now and net > best_net:
                best, best_net = (worker, role), net
        if best is not None:
            self._ordered_s, self._pending = view.now_s, best
        return best

    def _waits(self, view: FleetView) -> bool:
        """Whether the last conversion is under way, or too recent."""
        since_s = view.now_s - self._ordered_s
        if self._pending is not None:
            worker, role = self._pending
            done = worker not in view.workers or (view.role[worker] == role and view.ready[worker])
            if done or since_s > GIVE_UP_S:
                self._pending = None
        return self._pending is not None or since_s < self._cooldown_s


def _served(problem: ThresholdProblem, prefills: int, decodes: int, wanted: float) -> float:
    return min(wanted, problem.solve(prefills, decodes).rate)


def _cost(
    problem: ThresholdProblem,
    prefills: Sequence[str],
    decodes: Sequence[str],
    worker: str,
    role: str,
    demand: Demand,
    now: float,
    view: FleetView,
) -> float:
    """Requests lost by the conversion."""
    wanted = demand.rate
    if role == "prefill":
        without = _served(problem, len(prefills), len(decodes) - 1, wanted)
        drain_s = demand.answer_s if view.running[worker] or view.waiting[worker] else 0.0
        peers = len(decodes)
    else:
        without = _served(problem, len(prefills) - 1, len(decodes), wanted)
        drain_s = max(0.0, view.prefill_ends_s[worker] - view.now_s)
        peers = len(prefills)
    lost_cache = min(now, wanted) / peers * demand.reuse * REFILL_S
    return max(0.0, min(now, wanted) - without) * drain_s + lost_cache


def _spare(workers: Sequence[str], view: FleetView, role: str) -> str | None:
    """The worker that is soonest free for the new role, of clusters that keep one of its kind."""
    clusters = [view.cluster[worker] for worker in workers]
    spare = [worker for worker, cluster in zip(workers, clusters, strict=True) if clusters.count(cluster) > 1]
    if not spare:
        return None
    if role == "decode":
        return min(spare, key=lambda worker: (max(view.now_s, view.prefill_ends_s[worker]), worker))
    return min(spare, key=lambda worker: (view.running[worker] + view.waiting[worker], worker))

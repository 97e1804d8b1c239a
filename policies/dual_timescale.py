"""The PrfaaS paper's scheduler: a threshold that is solved, not set, and roles that follow the load."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from policies.base import BasePolicy, least
from policies.congestion import CongestionFactor
from policies.length_window import LengthWindow
from policies.pairing import Grouping, Groups
from policies.role_controller import Demand, RoleController
from policies.stage_meter import StageMeter, Stages
from policies.threshold_solver import Solution, ThresholdProblem
from policies.types import Candidates, Command, FleetView, Ints, Outcome, PlacementKind, RequestView

FEWEST_SAMPLES = 32
"""Before so many requests the least predicted TTFT decides."""
SCARCE, ABUNDANT = 1.1, 0.9
"""Seconds of link over seconds of remote compute at which bandwidth becomes scarce, and abundant again."""


class DualTimescale(BasePolicy):
    """Dual-timescale scheduling of PrfaaS (arXiv 2604.15039, section 3), its open questions answered.

    Per request: lengths up to the threshold stay in the PD cluster, on a prefill worker, or on the decode
    worker where its cache leaves it less to do; longer ones go. Within either group the least predicted
    TTFT. While bandwidth is scarce, the length is what the PD cluster has not cached; while it is abundant,
    what neither has. Which of the two it is, is a test of cost: scarce when, at the solved threshold, a
    request that goes takes longer on the link than on the remote workers, each being shared by all.

    The threshold is solved every few seconds (`policies.threshold_solver`) from the last requests' costs in
    either place, whichever they took, and from measured capacity: prefill seconds and bytes as priced for
    each request, the links' estimated rates, workers that are ready. Between solutions, queues and link
    utilisation correct it, with hysteresis (`policies.congestion`).

    Slowly: one worker of the PD cluster changes between prefill and decode when that serves more requests
    within the horizon than the conversion costs (`policies.role_controller`).

    Not expressed: copying a longer prefix from the other cluster (nothing is fetched between workers yet).
    Where only the remote cluster holds a prefix, the request goes if its predicted TTFT is less there: its
    KV then comes with the remote prefill.

    Args:
        tokens: threshold until there is a solution; None = the least predicted TTFT until then.
        window: requests that the threshold is solved on.
        solve_every_s: between solutions.
        convert: whether to change roles.
        horizon_s, cooldown_s: of conversions, see `policies.role_controller`.
        tpot_s: decode steps may not be longer: decode workers count with batches that keep to it.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        tokens: int | None = None,
        window: int = 1024,
        solve_every_s: float = 5.0,
        convert: bool = True,
        horizon_s: float = 300.0,
        cooldown_s: float = 60.0,
        tpot_s: float | None = None,
    ) -> None:
        if tokens is not None and tokens < 0:
            raise ValueError(f"tokens must be 0 or more, is {tokens}")
        if window < FEWEST_SAMPLES:
            raise ValueError(f"window must be {FEWEST_SAMPLES} or more, is {window}")
        if min(solve_every_s, horizon_s, cooldown_s) < 0 or (tpot_s is not None and tpot_s <= 0):
            raise ValueError("solve_every_s, horizon_s and cooldown_s must be 0 or more, tpot_s positive")
        self._tokens = tokens
        self._grouping = Grouping()
        self._window = LengthWindow(window)
        self._meter = StageMeter(math.inf if tpot_s is None else tpot_s)
        self._congestion = CongestionFactor()
        self._roles = RoleController(horizon_s, cooldown_s) if convert else None
        self._solve_every_s, self._solved_s = solve_every_s, -math.inf
        self._controlled_s = -math.inf
        self._scarce = True
        self.solution: Solution | None = None
        """The last one, before congestion corrects its threshold."""

    @property
    def threshold_tokens(self) -> int | None:
        """The threshold that decides now; None while there is none."""
        if self.solution is None:
            return self._tokens
        return round(self.solution.threshold_tokens * self._congestion.value)

    @property
    def bandwidth_scarce(self) -> bool:
        return self._scarce

    # ------------------------------------------------------------ per request

    def choose(
        self, request: RequestView, candidates: Candidates, view: FleetView, rng: np.random.Generator
    ) -> int:
        self._meter.arrived()
        sides = _Sides.of(candidates, self._grouping.of(candidates))
        if sides is None:
            return least(candidates.ttft_s, candidates, view, rng)
        home = least(candidates.ttft_s + candidates.interference_s, candidates, view, rng, sides.home)
        away = least(candidates.ttft_s, candidates, view, rng, sides.away)
        self._remember(request, candidates, sides, home, away)
        threshold = self.threshold_tokens
        quicker = home if candidates.ttft_s[home] <= candidates.ttft_s[away] else away
        if threshold is None:
            return quicker
        length = sides.home_tokens if self._scarce else min(sides.home_tokens, sides.away_tokens)
        if length > threshold:
            return away
        return home if sides.home_tokens <= threshold else quicker

    def _remember(
        self, request: RequestView, candidates: Candidates, sides: _Sides, home: int, away: int
    ) -> None:
        # Where there are prefill workers, a prompt that its decode worker's cache all but covers takes
        # none of their time.
        on_pool = candidates.kind[home] == PlacementKind.POOL or not sides.pool
        self._window.add(
            home_tokens=sides.home_tokens,
            away_tokens=sides.away_tokens,
            home_s=float(candidates.prefill_s[home]) if on_pool else 0.0,
            away_s=float(candidates.prefill_s[away]),
            kv_bytes=float(candidates.kv_bytes[away]),
            cached_tokens=max(0, request.prompt_tokens - 1 - sides.home_tokens),
        )

    # ------------------------------------------------------------ every second

    def observe(self, outcome: Outcome) -> None:
        if outcome.ok:
            self._meter.finished()

    def control(self, view: FleetView, now_s: float) -> list[Command]:
        elapsed_s = now_s - self._controlled_s if math.isfinite(self._controlled_s) else 0.0
        self._controlled_s = now_s
        self._meter.tick(view, elapsed_s)
        if len(self._window) < FEWEST_SAMPLES:
            return []
        stages = self._meter.stages(view)
        if self.solution is not None:
            self._congestion.update(stages.pressure(view, _prefill_s(self.solution, stages)))
        if now_s - self._solved_s < self._solve_every_s:
            return []
        self._solved_s = now_s
        problem = ThresholdProblem(self._window.samples(self._scarce), stages.capacity)
        self.solution = problem.solve(stages.home_sites, len(stages.decodes))
        self._judge_bandwidth(self.solution)
        if self._roles is None or not stages.prefills or not self._meter.settled:
            return []
        demand = Demand(self._meter.arrival_rate, self._window.reuse(), self._meter.answer_s(view))
        order = self._roles.decide(problem, stages.prefills, stages.decodes, demand, view)
        return [] if order is None else [Command("set_role", {"worker": order[0], "role": order[1]})]

    def _judge_bandwidth(self, solution: Solution) -> None:
        """The cost test, with hysteresis: is the link or the compute across it the tighter?"""
        if solution.offload_share == 0:
            return
        self._scarce = solution.link_bound > (ABUNDANT if self._scarce else SCARCE)


def _prefill_s(solution: Solution, stages: Stages) -> float:
    """Prefill seconds of a mean request where the solution sends it."""
    home_s = stages.home_sites / solution.home_rate if solution.home_rate > 0 else 0.0
    away_s = stages.capacity.away_workers / solution.away_rate if solution.away_rate > 0 else 0.0
    return max(home_s + away_s, 1e-3)


@dataclass(frozen=True, slots=True)
class _Sides:
    """A request's candidates in the PD cluster and across the link."""

    home: Ints
    away: Ints
    home_tokens: int
    """The paper's l_total - l_pd."""
    away_tokens: int
    """l_total - l_prfaas."""
    pool: bool
    """Whether the PD cluster has prefill workers."""

    @classmethod
    def of(cls, candidates: Candidates, groups: Groups) -> _Sides | None:
        """None where there is only one side."""
        uncached = candidates.uncached_tokens
        local, pool, away = groups.local, groups.pool, groups.remote
        if not len(away) or len(away) == len(groups.all):
            return None
        away_tokens = int(uncached[away].min())
        if not len(pool):
            return cls(local, away, int(uncached[local].min()), away_tokens, pool=False)
        home, home_tokens = pool, int(uncached[pool].min())
        # A decode worker prefills only what its cache makes shorter than any prefill worker has it.
        shorter = local[uncached[local] < home_tokens]
        if len(shorter):
            home, home_tokens = np.concatenate((shorter, pool)), int(uncached[shorter].min())
        return cls(home, away, home_tokens, away_tokens, pool=True)

"""Runs a policy that may be faulty: no request fails because a policy does."""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable

import numpy as np

from policies.base import BasePolicy
from policies.types import REFUSE, Candidates, Command, FleetView, Outcome, Policy, RequestView
from router.core.config import SchedulerConfig

log = logging.getLogger(__name__)


class PolicyHost:
    """Guards a policy. A fault (exception, or an index that is none) is answered by the default policy;
    faults or overruns again and again replace the policy by the default for good.

    Args:
        timer: seconds of a clock to time `choose` with, or None (replay): overruns then come only from
            the journal.
    """

    def __init__(
        self,
        policy: Policy,
        name: str,
        default: Policy,
        default_name: str,
        config: SchedulerConfig,
        timer: Callable[[], float] | None = None,
    ) -> None:
        self._config = config
        self._install(policy, name)
        self._default, self._default_name = default, default_name
        self._timer = timer
        self._overruns: deque[float] = deque()
        self.faults_total = 0
        self.overruns_total = 0
        self.replaced_reason = ""
        """Why the policy was replaced; empty while it runs."""
        self.elapsed_s = 0.0
        """What the last `choose` took."""

    def _install(self, policy: Policy, name: str) -> None:
        self._policy, self.name = policy, name
        self.shortlist = self._config.shortlist if getattr(policy, "takes_cheapest", False) else 0
        """Length of the shortlists that the policy can do with in large fleets; 0 = it wants every pair."""
        self.learns = _overrides(policy, "observe")
        """Whether the policy looks at outcomes."""
        self.commands = _overrides(policy, "control")
        """Whether the policy may give slow-timescale orders."""

    def choose(
        self, request: RequestView, candidates: Candidates, view: FleetView, rng: np.random.Generator
    ) -> tuple[int, str]:
        """(index or `REFUSE`, name of the policy that chose)."""
        started_s = self._timer() if self._timer is not None else 0.0
        try:
            index = _valid(self._policy.choose(request, candidates, view, rng), len(candidates))
            name = self.name
        except Exception as error:
            self._fault("choose", error)
            index, name = self._default.choose(request, candidates, view, rng), self._default_name
        if self._timer is not None:
            self.elapsed_s = self._timer() - started_s
        return index, name

    def preview(
        self, request: RequestView, candidates: Candidates, view: FleetView, rng: np.random.Generator
    ) -> tuple[int, str]:
        """The same from copies of policy and generator, so that neither moves."""
        rng = copy.deepcopy(rng)
        try:
            policy = copy.deepcopy(self._policy)
            return _valid(policy.choose(request, candidates, view, rng), len(candidates)), self.name
        except Exception:
            log.warning("policy cannot preview policy=%s", self.name, exc_info=True)
            return self._default.choose(request, candidates, view, rng), self._default_name

    def observe(self, outcome: Outcome) -> None:
        try:
            self._policy.observe(outcome)
        except Exception as error:
            self._fault("observe", error)

    def control(self, view: FleetView, now_s: float) -> list[Command]:
        try:
            return list(self._policy.control(view, now_s))
        except Exception as error:
            self._fault("control", error)
            return []

    def overran(self, elapsed_s: float, now_s: float) -> None:
        """Count an overrun of the time budget at `now_s`."""
        self.overruns_total += 1
        self._overruns.append(now_s)
        while now_s - self._overruns[0] > self._config.policy_overrun_window_s:
            self._overruns.popleft()
        if len(self._overruns) >= self._config.policy_overruns:
            self._replace(f"{len(self._overruns)} overruns of its time budget, last {elapsed_s * 1e3:.1f} ms")

    def _fault(self, method: str, error: Exception) -> None:
        self.faults_total += 1
        if self.faults_total == 1:
            log.error("policy fault policy=%s method=%s", self.name, method, exc_info=error)
        if self.faults_total >= self._config.policy_faults:
            self._replace(f"{self.faults_total} faults, last in {method}: {error!r}")

    def _replace(self, reason: str) -> None:
        if self.replaced_reason or self._policy is self._default:
            return
        log.error("policy replaced policy=%s by=%s reason=%s", self.name, self._default_name, reason)
        self.replaced_reason = reason
        self._install(self._default, self._default_name)


def _overrides(policy: Policy, method: str) -> bool:
    """Whether the policy has a method of its own in place of `BasePolicy`'s, which does nothing."""
    return getattr(getattr(policy, method, None), "__func__", None) is not getattr(BasePolicy, method)


def _valid(index: int, candidates: int) -> int:
    if index != REFUSE and not 0 <= index < candidates:
        raise ValueError(f"chose candidate {index} of {candidates}")
    return int(index)

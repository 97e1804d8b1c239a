"""The same sweep in other processes, and on a Ray cluster of this machine, as in one process."""

from __future__ import annotations

import numpy as np
import pytest

from simulations.commands.policy_spec import parse_policies
from simulations.experiments.capacity import capacity
from simulations.fleet import SLO
from simulations.fleet_load import load_fleet
from simulations.workload.trace import Trace

pytestmark = pytest.mark.process


def search(**where):
    rng = np.random.default_rng(1)
    trace = Trace("t", np.arange(40) * 0.1, rng.integers(500, 8000, 40), rng.integers(2, 30, 40))
    policies = parse_policies("cost_model,round_robin")
    return capacity(trace, load_fleet("small"), policies, SLO(ttft_p90=1.0), tolerance=0.2, **where)


def test_capacity_is_the_same_on_two_processes_as_here():
    here = search()
    assert search(jobs=2) == here
    assert all(found.complete and found.rate_per_s > 0 for found in here.capacities)


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_capacity_is_the_same_on_ray_as_here():
    pytest.importorskip("ray", reason="the package `ray` is not installed")
    assert search(jobs=2, ray="local") == search()

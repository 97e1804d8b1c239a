"""No simulated run, whatever the policy, serves faster than the fluid bound says."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from bound_fleets import FAST, SLOW, make_fleet

from router.core.policy_loader import load_policy
from simulations.bound import fluid_bound
from simulations.bound.prefix import found_beyond
from simulations.engine.run import RunOptions, simulate
from simulations.fleet import SimWorkers
from simulations.result import SERVED
from simulations.workload.trace import Trace

POLICIES = ("cost_model", "round_robin", "always_local", "threshold", "dual_timescale")


def trace(seed: int, shared: bool, count: int = 100) -> Trace:
    """All requests at once, or nearly: the fleet is never idle until the end."""
    rng = np.random.default_rng(seed)
    prompts = np.clip(np.exp(rng.normal(6.0, 1.0, count)), 2, 6000).astype(np.int64)
    counts = (prompts + 63) // 64
    offsets = np.concatenate([[0], np.cumsum(counts)])
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
    family = np.repeat(rng.integers(0, 5, count), counts)
    common = np.repeat(rng.integers(0, 12, count), counts) if shared else 0
    own = 10_000 + np.arange(offsets[-1])
    blocks = np.where(within < common, family * 100 + within, own)
    return Trace("t", np.arange(count) * 1e-3, prompts, rng.integers(1, 40, count), 64, blocks, offsets)


FLEETS = {
    "pool": make_fleet(prefill=2, decode=2, max_running=8, local=SLOW),
    "remote": make_fleet(prefill=1, decode=3, remote=2, max_running=8, local=SLOW),
    "thin link": make_fleet(prefill=1, decode=2, remote=2, link="20Mbit", local=SLOW, state_bytes=50_000),
    "few pages": make_fleet(prefill=1, decode=2, remote=1, kv_tokens=8192, local=FAST),
    "colocated": make_fleet(prefill=0, decode=3, max_running=16),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fleet", FLEETS)
def test_a_saturated_run_stays_under_the_bound(fleet, policy):
    requests = trace(len(fleet), shared=True)
    parameters = {"tokens": 400, "without_remote": "stay"} if policy == "threshold" else {}
    result = simulate(requests, FLEETS[fleet], load_policy(policy, parameters), RunOptions(seed=1))
    bound = fluid_bound(requests, FLEETS[fleet], free_roles=policy == "dual_timescale")  # it converts workers
    assert (result.state == SERVED).all()
    achieved = result.summary()["requests_per_s"]
    assert achieved <= bound.rate_per_s
    assert achieved >= 0.1 * bound.rate_per_s  # the bound is about this fleet, not about any


def test_the_bound_is_close_where_one_resource_is_all_that_matters():
    """One prefill worker that is busy all the time, and decode workers that cannot prefill in time."""
    fleet = make_fleet(prefill=1, decode=2, max_running=64)
    slow = {name: v * (1e4 if name.startswith("prefill") else 1e-3) for name, v in FAST.items()}
    hardware = msgspec.structs.replace(fleet.hardware["near"], linear=slow)
    workers = {
        "p": fleet.clusters["pd"].workers["p"],
        "d": SimWorkers(role="decode", hardware="d", count=2, max_running=64),
    }
    pd = msgspec.structs.replace(fleet.clusters["pd"], workers=workers)
    fleet = msgspec.structs.replace(fleet, hardware={**fleet.hardware, "d": hardware}, clusters={"pd": pd})
    requests = trace(3, shared=False)
    result = simulate(requests, fleet, load_policy("threshold", {"tokens": 10_000}))
    achieved = result.summary()["requests_per_s"]
    bound = fluid_bound(requests, fleet)
    assert bound.binding[0] == "prefill seconds of pd/p"
    assert 0.97 * bound.rate_per_s <= achieved <= bound.rate_per_s


def test_no_request_finds_more_in_a_cache_than_came_before_it():
    """What the bound takes for granted of caches; arrivals are spaced so that nobody is overtaken."""
    requests = trace(7, shared=True, count=60)
    requests = Trace(
        "t", np.arange(60) * 5.0, requests.prompt_tokens, requests.output_tokens, 64, requests.blocks,
        requests.block_offsets,
    )  # fmt: skip
    result = simulate(requests, FLEETS["remote"], load_policy("cost_model"))
    found = np.maximum(result.decode_cached_tokens, result.site_cached_tokens)
    assert found_beyond(requests, found, 64) == 0
    assert found_beyond(requests, found + 64, 64) > 0
    assert found.sum() > 0

"""Random small fleets, traces and policies: whatever happens to them, a run ends and its books balance.

`python tests/unit/simulations/test_random_fleets.py FIRST LAST` tries as many seeds as one likes.
"""

from __future__ import annotations

import faulthandler
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from small_cases import small_fleet, small_trace

import simulations.engine.run as run_module
from router.core.policy_loader import load_policy
from simulations.bound import fluid_bound
from simulations.bound.prefix import found_beyond
from simulations.engine.run import RunOptions, simulate
from simulations.engine.world import World
from simulations.fleet import Fleet, ScheduledChange
from simulations.result import FAILED, REFUSED, SERVED, RunResult
from simulations.workload.trace import Trace

POLICIES = (
    *("cost_model", "threshold", "always_local", "always_remote", "round_robin", "dual_timescale", "lmetric"),
    *("netkv", "mooncake", "gorgo", "preble", "peer_pull", "conversation", "dynamo_kv", "isl_or_load"),
    *("prefix_threshold", "cache_aware", "consistent_hash", "power_of_two", "least_load", "random"),
)
PARAMETERS: dict[str, dict[str, Any]] = {
    "threshold": {"tokens": 60, "without_remote": "stay"},
    "dual_timescale": {"tokens": 60, "window": 32, "solve_every_s": 0.5, "horizon_s": 5.0, "cooldown_s": 1.0},
    "mooncake": {"ttft_slo_s": 0.5},
}
LONGEST_S = 20.0
"""A run that takes longer is stuck: the longest of these takes a fraction of a second."""


@dataclass(frozen=True)
class Case:
    fleet: Fleet
    trace: Trace
    policy: str
    causal: bool


def random_case(seed: int) -> Case:
    """Few workers, few slots, few pages, slow links, failures, conversations."""
    dice = np.random.default_rng(seed)

    def one_of(*values: Any) -> Any:
        return values[int(dice.integers(len(values)))]

    policy = POLICIES[seed % len(POLICIES)]
    page, prompt_pages, output = one_of(4, 16), one_of(2, 6, 12), one_of(1, 8, 40, 120)
    trace = small_trace(
        seed,
        requests=one_of(1, 12, 40),
        page=page,
        rate_per_s=one_of(2.0, 20.0, 400.0),
        prompt_pages=prompt_pages,
        output=output,
        shared=bool(dice.integers(2)),
    )
    if dice.integers(2):  # prompts that fill their pages but for the token that decode computes
        full = np.maximum((trace.prompt_tokens - 2) // page, 0) * page + 1
        trace = replace(trace, prompt_tokens=np.maximum(full, 2))
    if one_of(False, False, True):
        sessions = np.sort(dice.integers(0, 4, len(trace)))
        trace = replace(trace, session=sessions, think_s=dice.exponential(0.1, len(trace)))
    largest = int(np.max(-(-(trace.prompt_tokens + trace.output_tokens) // page)))
    decode, prefill, remote = one_of(1, 2, 3), one_of(0, 1, 3), one_of(0, 0, 1, 2)
    names = [
        name if count == 1 else f"{name}-{index}"
        for name, count in (("decode", decode), ("prefill", prefill), ("remote", remote))
        for index in range(count)
    ]
    schedule = []
    for _ in range(int(one_of(0, 0, 1, 3))):
        at, worker = float(dice.uniform(0, 2)), one_of(*names)
        schedule.append(ScheduledChange(at=at, worker=worker))
        schedule.append(ScheduledChange(at=at + float(one_of(0.01, 0.3, 3)), worker=worker, up=True))
    if remote and one_of(False, True):
        at = float(dice.uniform(0, 2))
        schedule.append(ScheduledChange(at=at, link="wan", capacity="0"))
        schedule.append(ScheduledChange(at=at + float(one_of(0.1, 4)), link="wan", capacity="5MB/s"))
    if one_of(False, False, False, True):
        schedule.append(ScheduledChange(at=0.2, router_lag=1.0))
        schedule.append(ScheduledChange(at=1.2, router_lag=0.0))
    fleet = small_fleet(
        decode=decode,
        prefill=prefill,
        remote=remote,
        kv_pages=largest + int(one_of(0, 1, 5, 200)),
        page=page,
        max_running=one_of(1, 2, 6),
        chunk_tokens=one_of(page, 7, 64),
        link=one_of("0.2MB/s", "5MB/s", "1GB/s"),
        local_rate=one_of("1MB/s", "1GB/s"),
        state_bytes=one_of(0, 50_000),
        schedule=schedule,
    )
    return Case(fleet, trace, policy, causal=len(trace.session) > 0 and bool(one_of(False, True)))


def run_case(case: Case) -> tuple[World, RunResult]:
    """The run, and the world that it leaves behind."""
    kept: list[World] = []
    build = run_module.build_world

    def keeping(*args: Any, **options: Any) -> World:
        kept.append(build(*args, **options))
        return kept[-1]

    run_module.build_world = keeping  # type: ignore[assignment]
    try:
        policy = load_policy(case.policy, PARAMETERS.get(case.policy, {}))
        found = simulate(case.trace, case.fleet, policy, RunOptions(seed=1, causal=case.causal))
    finally:
        run_module.build_world = build
    return kept[0], found


def check(case: Case) -> None:
    """Every request ended once; nothing is held; times make sense; no faster than the bound."""
    world, found = run_case(case)
    assert found.complete
    assert world.unfinished == 0
    assert world.recorder.ended == len(case.trace) == len(found.state)
    assert set(found.state.tolist()) <= {SERVED, REFUSED, FAILED}
    for worker in world.workers.values():
        if not worker.alive:
            continue
        assert not worker.live, worker.name
        assert worker.cache.available == worker.cache.total, worker.name
        worker.cache.check()
    for pipe in world.network.link_pipes.values():
        assert not pipe.streams
    served = found.state == SERVED
    assert (found.ttft_s[served] > 0).all()
    assert (found.end_s[served] >= found.arrival_s[served] + found.ttft_s[served] - 1e-9).all()
    assert not np.isnan(found.end_s).any()
    cached = np.maximum(found.decode_cached_tokens, found.site_cached_tokens)
    exact = found_beyond(case.trace, cached, case.fleet.page_size) == 0
    if served.all() and len(case.trace) > 1 and exact:
        bound = fluid_bound(case.trace, case.fleet, free_roles=case.policy == "dual_timescale")
        assert found.summary()["requests_per_s"] <= bound.rate_per_s * (1 + 1e-9)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_random_run_ends_and_its_books_balance(policy: str) -> None:
    for round_ in range(6):
        check(random_case(POLICIES.index(policy) + round_ * len(POLICIES)))


def main(first: int, last: int) -> None:
    check(random_case(first))  # compiles what is compiled
    for seed in range(first, last):
        print(f"seed {seed}", file=sys.stderr)
        faulthandler.dump_traceback_later(LONGEST_S, exit=True)
        try:
            check(random_case(seed))
        except Exception as error:
            print(f"seed {seed}, {random_case(seed).policy}: {type(error).__name__} {error}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

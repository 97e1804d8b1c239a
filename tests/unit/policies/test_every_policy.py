"""What holds for each policy that can be named in a configuration."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import entry_points

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placements import Chooser, Row, candidates, grid, request, view

from policies.types import REFUSE, Candidates
from router.core.policy_loader import GROUP

POLICIES = {point.name: point.load() for point in entry_points(group=GROUP)}
NAMES = sorted(POLICIES)
BASELINES = [
    "always_local", "always_remote", "cache_aware", "consistent_hash", "conversation", "cost_model",
    "dual_timescale", "dynamo_kv", "gorgo", "isl_or_load", "least_load", "lmetric", "mooncake", "netkv",
    "peer_pull", "power_of_two", "preble", "prefix_threshold", "random", "round_robin", "threshold",
]  # fmt: skip
MAY_REFUSE = {"always_local", "always_remote", "threshold"}
"""By default: they promise a place that may not be there."""


def test_every_documented_policy_is_registered() -> None:
    assert set(BASELINES) <= set(NAMES)


def some_rows(rng: np.random.Generator) -> Candidates:
    """Some of the pairs of three decode workers with themselves and four sites, in any state."""
    sites = ("p0", "p1", "r0", "r1")
    pairs = [pair for decode in ("d0", "d1", "d2") for pair in (decode, *(f"{decode} {s}" for s in sites))]
    rows = [
        Row(
            str(pair),
            cached=int(rng.integers(1000)),
            decode_cached=int(rng.integers(1000)),
            start_s=rng.choice([0.0, rng.exponential(10)]),
            prefill_s=rng.choice([0.0, rng.exponential(10)]),
            transfer_s=rng.choice([0.0, rng.exponential(10)]),
            interference_s=rng.exponential(1),
            kv_bytes=int(rng.integers(10**9)),
        )
        for pair in rng.permutation(pairs)[: rng.integers(1, 16)]
    ]
    return candidates(*rows)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_choice_is_always_a_candidate_or_a_refusal_that_the_policy_announces(
    name: str, seed: int
) -> None:
    policy, rng = POLICIES[name](), np.random.default_rng(seed)
    load = {worker: int(rng.integers(50)) for worker in ("d0", "d1", "d2", "p0", "p1", "r0", "r1")}
    queued = {worker: 100 * requests for worker, requests in load.items()}
    seen = view(waiting=load, running=load, queued_tokens=queued, free_pages=load)
    for number in range(3):
        rows = some_rows(rng)
        index = policy.choose(request(f"r{number}", session="s"), rows, seen, rng)
        assert 0 <= index < len(rows) or (index == REFUSE and name in MAY_REFUSE)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_calls_and_seed_give_the_same_choices(name: str) -> None:
    def run() -> list[str]:
        choose, rows = Chooser(POLICIES[name](), seed=5), grid(3, 2, 2)
        return [choose(rows, asked=request(f"r{i}", session=f"s{i % 7}")) for i in range(40)]

    assert run() == run()


@pytest.mark.parametrize("name", NAMES)
def test_equal_idle_workers_share_the_load(name: str) -> None:
    choose, rows = Chooser(POLICIES[name]()), grid(2, 2, 2)
    taken = [choose(rows, asked=request(f"r{i}", session=f"s{i}")).split() for i in range(300)]
    decodes = Counter(pair[0] for pair in taken)
    assert set(decodes) == {"d0", "d1"}
    assert min(decodes.values()) > 90
    sites = Counter(pair[-1] for pair in taken)
    for group in ("pr", "d"):
        used = [sites[site] for site in sites if site[0] in group]
        assert not used or min(used) > 0.1 * max(used)


@pytest.mark.parametrize("name", NAMES)
def test_a_lone_decode_worker_is_enough(name: str) -> None:
    assert Chooser(POLICIES[name]())(grid(1, 0, 0)) in ("d0", "refuse" if name in MAY_REFUSE else "d0")

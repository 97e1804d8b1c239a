"""In large fleets the policy sees the pairs of a few good workers; the best one must be among them."""

from __future__ import annotations

import numpy as np
import pytest
from brain_fleet import FAST, PAGE, PROFILE, fleet, info, join, request, status

from policies.base import BasePolicy
from policies.cost_model import CostModel
from policies.round_robin import RoundRobin
from prfaas.protocol.messages import KVSnapshot
from router.core.config import SchedulerConfig
from router.core.events import KVReceived
from router.core.scheduler import Scheduler

WORKERS = 30
"""Of each of three kinds: 30 · 61 pairs."""


def busy_fleet(seed: int, most: int, policy: BasePolicy | None = None) -> Scheduler:
    """Decode, pool and remote workers with random loads and caches; the same for the same seed."""
    rng = np.random.default_rng(seed)
    config = SchedulerConfig(shortlist=most)
    scheduler = fleet(WORKERS, WORKERS, WORKERS, config=config, policy=policy or CostModel())
    kinds = (("decode", "decode", "pd"), ("pool", "prefill", "pd"), ("remote", "prefill", "far"))
    for name, role, _ in kinds:
        for number in range(WORKERS):
            worker = f"{name}-{number}"
            running = int(rng.integers(0, 8)) if role == "decode" else 0
            scheduler.apply(
                status(
                    worker, role, 0.9, running=running, running_context_tokens=500 * running,
                    waiting_prefill_tokens=int(rng.integers(0, 2000)),
                    free_pages=int(rng.integers(100, 1000)),
                )
            )  # fmt: skip
            cached = tuple(range(2, 2 + int(rng.integers(0, 60) * rng.integers(0, 2))))
            snapshot = KVSnapshot(generation="1", sequence=0, page_size=PAGE, block_hashes=list(cached))
            scheduler.apply(KVReceived(now_s=0.9, worker=worker, event=snapshot))
    return scheduler


@pytest.mark.parametrize("tokens", [200, 1000, 4000])
def test_the_cheapest_of_all_pairs_is_on_the_shortlist_or_next_to_one_that_is(tokens: int) -> None:
    dearer = []
    for seed in range(12):
        asked = request(tokens=tokens, block_hashes=tuple(range(2, 2 + (tokens - 1) // PAGE)))
        short, everything = busy_fleet(seed, 12).place(asked), busy_fleet(seed, 0).place(asked)
        assert len(short.candidates) < len(everything.candidates) / 2
        dearer.append(short.term("cost_s") / everything.term("cost_s") - 1)
    assert min(dearer) >= -1e-9
    assert max(dearer) <= 0.05
    assert np.mean(np.array(dearer) <= 1e-9) >= 0.75


def test_what_is_priced_does_not_depend_on_the_shortlist() -> None:
    asked = request(tokens=1000)
    short, everything = busy_fleet(3, 12).place(asked).candidates, busy_fleet(3, 0).place(asked).candidates
    costs = dict(
        zip(zip(everything.decode, everything.site, strict=True), everything.cost_s.tolist(), strict=True)
    )
    for decode, site, cost_s in zip(short.decode, short.site, short.cost_s.tolist(), strict=True):
        assert costs[decode, site] == cost_s


def test_policies_that_do_not_take_the_cheapest_see_every_pair() -> None:
    found = busy_fleet(1, 12, RoundRobin()).place(request(tokens=200)).candidates
    assert len(found) == WORKERS * (1 + 2 * WORKERS)


def test_small_fleets_are_priced_in_full() -> None:
    scheduler = fleet(10, 10, 10, config=SchedulerConfig(shortlist=1))
    assert len(scheduler.place(request(tokens=200)).candidates) == 10 * 21


def test_a_shortlist_has_workers_of_every_cluster() -> None:
    scheduler = Scheduler(CostModel(), config=SchedulerConfig(shortlist=4))
    scheduler = fleet(WORKERS, WORKERS, 0, scheduler=scheduler)
    for number in range(WORKERS):
        join(scheduler, info(f"remote-{number}", "prefill", "far"), FAST if number % 2 else PROFILE)
    sites = set(scheduler.place(request(tokens=1000)).candidates.site)
    assert sum(site.startswith("pool") for site in sites) == 4
    assert sum(site.startswith("remote") for site in sites) == 4
    assert sum(site.startswith("decode") for site in sites) in range(4, 7)

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from policies.cost_model import CostModel
from policies.fixed import AlwaysLocal, AlwaysRemote
from policies.round_robin import RoundRobin
from policies.threshold import Threshold
from policies.types import REFUSE, Candidates, FleetView, PlacementKind, RequestView

REUSE, LOCAL, POOL, REMOTE = PlacementKind
REQUEST = RequestView("r", 0.0, 1000, 64)
RNG = np.random.default_rng(0)


def candidates(*rows: tuple[PlacementKind, float], uncached: int = 999, **terms: list[float]) -> Candidates:
    """One row per (kind, ttft)."""
    zeros = np.zeros(len(rows))
    ttft = np.array([ttft for _, ttft in rows])
    arrays = {name: np.array(values, dtype=float) for name, values in terms.items()}
    interference = arrays.get("interference_s", zeros)
    externality = arrays.get("externality_s", zeros)
    return Candidates(
        decode=tuple(f"d{i}" for i in range(len(rows))),
        site=tuple(f"s{i}" for i in range(len(rows))),
        kind=np.array([kind for kind, _ in rows], dtype=np.int64),
        uncached_tokens=np.full(len(rows), uncached),
        decode_cached_tokens=zeros.astype(np.int64),
        site_cached_tokens=zeros.astype(np.int64),
        kv_bytes=zeros.astype(np.int64),
        start_s=zeros, prefill_s=ttft, transfer_s=zeros, slot_s=zeros, step_s=zeros, overhead_s=zeros,
        ttft_s=ttft, interference_s=interference, externality_s=externality,
        cost_s=ttft + interference + externality,
    )  # fmt: skip


def view(queued: dict[str, int] | None = None, running: dict[str, int] | None = None) -> FleetView:
    names = [f"{letter}{i}" for letter in "ds" for i in range(8)]
    return FleetView(
        now_s=0.0,
        workers=tuple(names),
        queued_tokens={**dict.fromkeys(names, 0), **(queued or {})},
        running={**dict.fromkeys(names, 0), **(running or {})},
        link_bytes_per_s={},
        link_utilisation={},
    )


def choose(
    policy: object, rows: Candidates, seen: FleetView | None = None, request: RequestView = REQUEST
) -> int:
    return policy.choose(request, rows, seen or view(), RNG)


def test_cost_model_takes_the_least_cost_and_counts_the_delay_to_others() -> None:
    rows = candidates((LOCAL, 1.0), (REMOTE, 1.5), interference_s=[0.9, 0.0], externality_s=[0.0, 0.2])
    assert choose(CostModel(), rows) == 1
    assert choose(CostModel(interference_weight=0, externality_weight=0), rows) == 0
    assert choose(CostModel(interference_weight=1, externality_weight=5), rows) == 0


def test_exact_ties_go_to_the_least_queued_then_the_least_running() -> None:
    rows = candidates((REMOTE, 1.0), (REMOTE, 1.0), (REMOTE, 1.0))
    assert choose(CostModel(), rows, view(queued={"s0": 5, "s2": 5})) == 1
    assert choose(CostModel(), rows, view(running={"d0": 5, "d1": 5})) == 2


def test_full_ties_are_broken_by_the_generator_and_reach_every_candidate() -> None:
    rows = candidates((REMOTE, 1.0), (REMOTE, 1.0), (REMOTE, 1.0))
    assert {choose(CostModel(), rows) for _ in range(50)} == {0, 1, 2}
    first = [CostModel().choose(REQUEST, rows, view(), np.random.default_rng(3)) for _ in range(5)]
    assert len(set(first)) == 1


def test_negative_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="externality_weight"):
        CostModel(externality_weight=-1)


@pytest.mark.parametrize(
    ("uncached", "expected"),
    [(400, POOL), (401, REMOTE)],
)
def test_threshold_sends_only_longer_uncached_prompts_away(uncached: int, expected: PlacementKind) -> None:
    rows = candidates((LOCAL, 0.1), (POOL, 5.0), (REMOTE, 9.0), uncached=uncached)
    assert rows.kind[choose(Threshold(tokens=400), rows)] == expected


def test_threshold_measures_what_the_pd_cluster_has_not_cached() -> None:
    rows = candidates((LOCAL, 0.1), (POOL, 5.0), (REMOTE, 9.0))
    rows = replace(rows, uncached_tokens=np.array([100, 999, 50]))
    assert rows.kind[choose(Threshold(tokens=400), rows)] == POOL
    rows = replace(rows, uncached_tokens=np.array([900, 999, 50]))
    assert rows.kind[choose(Threshold(tokens=400), rows)] == REMOTE


def test_threshold_stays_on_the_decode_worker_where_there_is_no_pool() -> None:
    rows = candidates((REUSE, 2.0), (LOCAL, 1.0), (REMOTE, 0.1), uncached=10)
    assert choose(Threshold(tokens=400), rows) == 1


def test_threshold_without_remote_refuses_or_stays_as_told() -> None:
    rows = candidates((LOCAL, 2.0), (POOL, 1.0))
    assert choose(Threshold(tokens=400), rows) == REFUSE
    assert choose(Threshold(tokens=400, without_remote="stay"), rows) == 1
    with pytest.raises(ValueError, match="without_remote"):
        Threshold(without_remote="maybe")


def test_always_local_and_always_remote_keep_their_promise() -> None:
    rows = candidates((LOCAL, 5.0), (REUSE, 4.0), (POOL, 0.1), (REMOTE, 9.0), (REMOTE, 8.0))
    assert choose(AlwaysLocal(), rows) == 1
    assert choose(AlwaysRemote(), rows) == 4
    assert choose(AlwaysRemote(), candidates((LOCAL, 1.0), (POOL, 1.0))) == REFUSE


def test_always_remote_accepts_a_prompt_that_needs_no_prefill() -> None:
    assert choose(AlwaysRemote(), candidates((REUSE, 0.1), uncached=0)) == 0


def test_round_robin_gives_every_candidate_its_turn_also_when_some_come_and_go() -> None:
    policy, rows = RoundRobin(), candidates((LOCAL, 9.0), (POOL, 1.0), (REMOTE, 2.0))
    assert [choose(policy, rows) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    fewer = candidates((LOCAL, 9.0), (POOL, 1.0))
    assert [choose(policy, fewer) for _ in range(2)] == [0, 1]
    assert choose(policy, rows) == 2

"""Where each baseline differs from its neighbours, on candidates made by hand."""

from __future__ import annotations

from collections import Counter

import pytest
from placements import Chooser, Row, candidates, grid, request, view

from policies.cache_aware import CacheAware
from policies.conditional import IslOrLoad, PrefixThreshold
from policies.consistent_hash import ConsistentHash
from policies.conversation import Conversation
from policies.dynamo_kv import DynamoKV
from policies.gorgo import Gorgo
from policies.lmetric import LMetric
from policies.load_balancing import LeastLoad, PowerOfTwo, Random
from policies.mooncake import Mooncake
from policies.netkv import NetKV
from policies.peer_pull import PeerPull
from policies.preble import Preble

# ---------------------------------------------------------------- load


def test_least_load_takes_the_site_with_fewest_requests_then_the_least_busy_decode_worker() -> None:
    seen = view(waiting={"p0": 3, "p1": 1, "d0": 1}, running={"d0": 2, "d1": 2})
    assert Chooser(LeastLoad())(grid(2, 2), seen) == "d1 p1"


def test_least_load_by_tokens_may_differ_from_least_load_by_requests() -> None:
    seen = view(waiting={"p0": 1, "p1": 3}, queued_tokens={"p0": 9000, "p1": 300})
    assert Chooser(LeastLoad())(grid(1, 2), seen) == "d0 p0"
    assert Chooser(LeastLoad(by="tokens"))(grid(1, 2), seen) == "d0 p1"


def test_where_limits_the_sites_and_falls_back_to_all() -> None:
    seen = view(waiting={"p0": 9, "r0": 5})
    assert Chooser(LeastLoad(where="prefill"))(grid(1, 1, 1), seen) == "d0 r0"
    assert Chooser(LeastLoad(where="pool"))(grid(1, 1, 1), seen) == "d0 p0"
    assert Chooser(LeastLoad(where="all"))(grid(1, 1, 1), seen) == "d0"
    assert Chooser(LeastLoad(where="remote"))(grid(1, 1, 0), seen) == "d0"
    with pytest.raises(ValueError, match="where must be one of"):
        LeastLoad(where="elsewhere")
    with pytest.raises(ValueError, match="by must be one of"):
        LeastLoad(by="seconds")


def test_power_of_two_never_takes_the_most_loaded_and_reaches_all_others() -> None:
    seen = view(waiting={"p0": 3, "p1": 2, "p2": 1}, running={"d0": 1})
    choose = Chooser(PowerOfTwo())
    taken = Counter(choose(grid(2, 3), seen) for _ in range(300))
    assert set(taken) == {"d1 p1", "d1 p2"}
    # p2 wins both pairs that it is in; p1 only the one against p0: a third.
    assert 60 < taken["d1 p1"] < 140


def test_random_reaches_every_placement() -> None:
    choose = Chooser(Random())
    assert len({choose(grid(2, 1, 1)) for _ in range(200)}) == 6
    assert {choose(grid(2, 1, 1)) for choose in [Chooser(Random(where="remote"))] * 50} == {"d0 r0", "d1 r0"}


# ---------------------------------------------------------------- affinity


def test_consistent_hash_keeps_a_session_whatever_the_load_and_moves_few_when_a_worker_goes() -> None:
    choose = Chooser(ConsistentHash())
    sessions = [request(f"r{i}", session=f"s{i}") for i in range(200)]
    before = [choose(grid(4, 4), asked=asked) for asked in sessions]
    busy = view(waiting={"p0": 50, "d0": 50}, running={"d0": 50})
    assert [choose(grid(4, 4), busy, asked) for asked in sessions] == before
    after = [choose(grid(4, 3), asked=asked) for asked in sessions]
    moved = [was for was, now in zip(before, after, strict=True) if was != now]
    assert all(was.endswith("p3") for was in moved)
    assert len(moved) < 80


def test_cache_aware_follows_the_prefix_until_the_load_is_out_of_balance() -> None:
    policy = CacheAware(balance_abs_threshold=4, balance_rel_threshold=1.5)
    rows = candidates(Row("d0 p0", cached=600), Row("d0 p1"))
    assert Chooser(policy)(rows, view(waiting={"p0": 4})) == "d0 p0"
    assert Chooser(policy)(rows, view(waiting={"p0": 5})) == "d0 p1"
    # Four more, but not half as many again.
    assert Chooser(policy)(rows, view(waiting={"p0": 30, "p1": 25})) == "d0 p0"


def test_cache_aware_gives_an_unknown_prompt_to_the_site_with_most_room() -> None:
    rows = candidates(Row("d0 p0", cached=300), Row("d0 p1"))
    assert Chooser(CacheAware())(rows, view(free_pages={"p0": 10})) == "d0 p1"
    assert Chooser(CacheAware(cache_threshold=0.2))(rows, view(free_pages={"p0": 10})) == "d0 p0"


def test_preble_exploits_long_prefixes_explores_for_short_ones_and_rebalances() -> None:
    long = candidates(Row("d0 p0", cached=600, prefill_s=0.4), Row("d0 p1", prefill_s=1.0))
    short = candidates(Row("d0 p0", cached=400, prefill_s=0.6), Row("d0 p1", prefill_s=1.0))
    behind = {"p0": 0.5}
    assert Chooser(Preble())(long, view(prefill_ends_s=behind)) == "d0 p0"
    assert Chooser(Preble())(short, view(prefill_ends_s=behind)) == "d0 p1"
    assert Chooser(Preble())(short, view(prefill_ends_s={"p0": 0.3})) == "d0 p0"
    # The holder has over twice the least load, by more than a prefill: others take over.
    assert Chooser(Preble())(long, view(prefill_ends_s={"p0": 9.0, "p1": 1.0})) == "d0 p1"
    assert Chooser(Preble(balance_threshold=20))(long, view(prefill_ends_s={"p0": 9.0, "p1": 1.0})) == "d0 p0"


def test_peer_pull_follows_a_prefix_only_if_it_is_enough_longer_than_the_idlest_ones() -> None:
    seen = view(waiting={"p0": 1})
    rows = candidates(Row("d0 p0", cached=500), Row("d0 p1", cached=100))
    assert Chooser(PeerPull(400))(rows, seen) == "d0 p0"
    assert Chooser(PeerPull(401))(rows, seen) == "d0 p1"


def test_peer_pull_prefers_the_longer_prefix_among_equally_idle_workers() -> None:
    rows = candidates(Row("d0 p0", cached=16), Row("d0 p1", cached=32))
    assert {Chooser(PeerPull(1000), seed)(rows) for seed in range(5)} == {"d0 p1"}


def test_a_conversation_is_transferred_once_and_stays_on_its_decode_worker() -> None:
    choose, rows = Chooser(Conversation()), grid(2, 2)
    first = choose(rows, view(queued_tokens={"p0": 500}, free_pages={"d0": 10}), request(session="s"))
    assert first == "d1 p1"
    full = view(free_pages={"d1": 0}, waiting={"d1": 9})
    assert choose(rows, full, request("r2", session="s")) == "d1"
    assert choose(rows, full, request("r3", session="other")).startswith("d0 p")


def test_a_conversation_moves_when_its_worker_is_gone_and_the_new_one_is_kept() -> None:
    choose = Chooser(Conversation())
    choose(grid(2, 1), view(free_pages={"d0": 0}), request(session="s"))
    assert choose(grid(1, 1), asked=request(session="s")) == "d0 p0"
    assert choose(grid(2, 1), asked=request(session="s")) == "d0"


def test_requests_without_a_session_are_never_pinned_and_old_pins_are_forgotten() -> None:
    choose = Chooser(Conversation(max_sessions=2))
    assert {choose(grid(1, 1)) for _ in range(3)} == {"d0 p0"}
    for session in ("a", "b", "a", "c"):
        choose(grid(1, 1), asked=request(session=session))
    assert choose(grid(1, 1), asked=request(session="a")) == "d0"
    assert choose(grid(1, 1), asked=request(session="b")) == "d0 p0"


# ---------------------------------------------------------------- scores


def test_lmetric_multiplies_tokens_at_the_site_and_batch_at_the_decode_worker() -> None:
    rows = candidates(Row("d0", cached=899), Row("d1"), Row("d0 p0"), Row("d1 p0"))
    # d0: 100 tokens x 6, d1: 999 x 1, d0 p0: 999 x 6, d1 p0: 999 x 1.
    assert Chooser(LMetric())(rows, view(running={"d0": 5})) == "d0"
    # d0: 100 x 11 is more than d1's 999; p0 has a queue.
    assert Chooser(LMetric())(rows, view(running={"d0": 10}, queued_tokens={"p0": 1})) == "d1"


def test_netkv_takes_the_decode_worker_with_the_least_bytes_to_move_over_what_the_link_has_left() -> None:
    rows = candidates(Row("d0 p0", kv_bytes=10**9), Row("d1 p0", kv_bytes=10**8, transfer_s=5.0))
    assert Chooser(NetKV())(rows, view(running={"d1": 9})) == "d1 p0"
    # Over 1e9 bytes/s: 1.0 s against 0.1 + 1 s for the slot; with half of the link taken 2.0 s, 0.2 + 1 s.
    later = candidates(Row("d0 r0", kv_bytes=10**9), Row("d1 r0", kv_bytes=10**8, slot_s=1.0))
    assert Chooser(NetKV())(later) == "d0 r0"
    assert Chooser(NetKV())(later, view(link_utilisation={"far->pd": 0.5})) == "d1 r0"


def test_netkv_takes_the_site_that_is_done_first_and_equal_costs_by_load() -> None:
    rows = candidates(
        Row("d0 p0", start_s=2), Row("d1 p0", start_s=2), Row("d0 r0", start_s=1), Row("d1 r0", start_s=1)
    )
    assert Chooser(NetKV())(rows, view(running={"d0": 1})) == "d1 r0"


def test_mooncake_adds_queue_prefill_and_transfer_then_balances_decode() -> None:
    rows = candidates(
        Row("d0 p0", start_s=2, prefill_s=1), Row("d1 p0", start_s=2, prefill_s=1),
        Row("d0 r0", prefill_s=1, transfer_s=1.5), Row("d1 r0", prefill_s=1, transfer_s=1.5),
    )  # fmt: skip
    assert Chooser(Mooncake())(rows, view(running={"d0": 1})) == "d1 r0"


def test_mooncake_refuses_what_would_miss_its_slo() -> None:
    rows = candidates(Row("d0 p0", start_s=2, prefill_s=1, step_s=0.05))
    assert Chooser(Mooncake(ttft_slo_s=3.0))(rows) == "d0 p0"
    assert Chooser(Mooncake(ttft_slo_s=2.9))(rows) == "refuse"
    assert Chooser(Mooncake(tbt_slo_s=0.04))(rows) == "refuse"
    with pytest.raises(ValueError, match="SLO must be positive"):
        Mooncake(ttft_slo_s=0)


def test_gorgo_gives_whole_requests_to_one_worker_even_where_a_pool_would_be_quicker() -> None:
    rows = candidates(
        Row("d0", start_s=1.0, prefill_s=0.2), Row("d1", prefill_s=1.0), Row("d1 p0", prefill_s=0.1)
    )
    assert Chooser(Gorgo())(rows) == "d1"
    assert Chooser(Gorgo(queue_weight=0.5))(rows) == "d0"


def test_dynamo_kv_adds_blocks_to_compute_and_blocks_held() -> None:
    """Row costs in blocks of 16: prefill (queued + 1000 - cached)/16, decode (used pages x 16 + 1000)/16."""
    rows = grid(2, 2)
    seen = view(queued_tokens={"p0": 480}, free_pages={"d0": 990})
    assert Chooser(DynamoKV())(rows, seen) == "d1 p1"
    held = candidates(Row("d0 p0", cached=320), Row("d1 p0", cached=320), Row("d0 p1"), Row("d1 p1"))
    assert Chooser(DynamoKV())(held, view(queued_tokens={"p0": 300})) in ("d0 p0", "d1 p0")
    assert Chooser(DynamoKV())(held, view(queued_tokens={"p0": 330})) in ("d0 p1", "d1 p1")


def test_dynamo_kv_weighs_requests_and_prefill_as_told() -> None:
    rows = candidates(Row("d0 p0"), Row("d1 p0"))
    seen = view(free_pages={"d0": 995}, running={"d1": 3}, total_pages={})
    assert Chooser(DynamoKV())(rows, seen) == "d1 p0"
    assert Chooser(DynamoKV(request_weight=2.0))(rows, seen) == "d0 p0"
    sides = candidates(Row("d0 p0", cached=320), Row("d1 p1"))
    busy = view(free_pages={"d0": 985})
    assert Chooser(DynamoKV())(sides, busy) == "d0 p0"
    assert Chooser(DynamoKV(prefill_load_scale=0.5))(sides, busy) == "d1 p1"


def test_dynamo_kv_temperature_spreads_but_prefers_the_cheaper() -> None:
    choose = Chooser(DynamoKV(temperature=0.5))
    taken = Counter(choose(candidates(Row("d0 p0", cached=500), Row("d0 p1"))) for _ in range(400))
    # softmax of 0 and 1 at temperature 0.5: 1 : e^-2.
    assert 0.08 < taken["d0 p1"] / 400 < 0.16


# ---------------------------------------------------------------- local or not


def isl_rows(cached: int, prompt: int) -> object:
    return candidates(Row("d0", cached=cached), Row("d0 p0"), prompt=prompt)


@pytest.mark.parametrize(
    ("prompt", "cached", "place"),
    [
        (4000, 2000, "d0"),      # 1,999 new: under 2,048, and half
        (4100, 2000, "d0 p0"),   # 2,099 new
        (2000, 0, "d0 p0"),      # short, but all of it new
        (2000, 640, "d0"),       # 1,359 of 2,000 new: under 0.7
        (90_000, 80_000, "d0 p0"),
    ],
)  # fmt: skip
def test_isl_or_load_prefills_locally_what_is_short_and_mostly_cached(
    prompt: int, cached: int, place: str
) -> None:
    asked = request(prompt=prompt)
    assert Chooser(IslOrLoad())(isl_rows(cached, prompt), asked=asked) == place


def test_isl_or_load_prefills_anything_locally_while_the_prefill_worker_is_busy() -> None:
    asked, rows = request(prompt=90_000), isl_rows(0, 90_000)
    assert Chooser(IslOrLoad())(rows, view(queued_tokens={"p0": 32_768}), asked) == "d0 p0"
    assert Chooser(IslOrLoad())(rows, view(queued_tokens={"p0": 32_769}), asked) == "d0"
    assert (
        Chooser(IslOrLoad(prefill_busy_tokens=None))(rows, view(queued_tokens={"p0": 10**6}), asked)
        == "d0 p0"
    )
    full = view(queued_tokens={"p0": 10**6}, free_pages={"d0": 50})
    assert Chooser(IslOrLoad(decode_busy_share=0.9))(rows, full, asked) == "d0 p0"


def test_prefix_threshold_disaggregates_from_512_uncached_tokens_on() -> None:
    choose = Chooser(PrefixThreshold())
    assert choose(candidates(Row("d0", cached=488), Row("d0 p0"))) == "d0"
    assert choose(candidates(Row("d0", cached=487), Row("d0 p0"))) == "d0 p0"
    assert Chooser(PrefixThreshold(256))(candidates(Row("d0", cached=488), Row("d0 p0"))) == "d0 p0"


def test_prefix_threshold_scores_prefix_queue_and_free_kv() -> None:
    rows = candidates(Row("d0", cached=800), Row("d1"), Row("d0 p0"), Row("d1 p0"))
    assert Chooser(PrefixThreshold())(rows, view(running={"d0": 9})) == "d0"
    assert Chooser(PrefixThreshold(prefix_weight=1.0))(rows, view(running={"d0": 9})) == "d1 p0"
    pools = candidates(Row("d0"), Row("d0 p0", cached=400), Row("d0 p1"))
    assert Chooser(PrefixThreshold())(pools, view(waiting={"p0": 2})) == "d0 p1"
    assert Chooser(PrefixThreshold(prefix_weight=3.0))(pools, view(waiting={"p0": 2})) == "d0 p0"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: CacheAware(cache_threshold=2),
        lambda: Preble(balance_threshold=0.5),
        lambda: PeerPull(0),
        lambda: Conversation(max_sessions=0),
        lambda: Gorgo(queue_weight=-1),
        lambda: DynamoKV(temperature=-1),
        lambda: IslOrLoad(ratio=2),
        lambda: PrefixThreshold(-1),
    ],
)
def test_parameters_out_of_range_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="must be"):
        wrong()

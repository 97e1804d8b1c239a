"""The priced terms against plain reckonings of the formulas in docs/cost.md."""

from __future__ import annotations

import math

import pytest
from brain_fleet import FAST, PAGE, PAGE_BYTES, PROFILE, counters, fleet, info, join, request, status
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.fixed import AlwaysRemote
from policies.types import PlacementKind
from prfaas.protocol.messages import KVSnapshot
from router.core.decision import Decision
from router.core.events import FirstToken, KVReceived
from router.core.profiles import decode_seconds, prefill_seconds

LAYERS = 4
RTT_S = 0.04


def row(decision: Decision, site: str) -> dict[str, float]:
    (found,) = [r for r in decision.as_record(top=None)["candidates"] if r["site"] == site]
    return found


def cache(scheduler, worker: str, blocks: int) -> None:
    event = KVSnapshot(generation="g", sequence=0, page_size=PAGE, block_hashes=list(range(1, blocks + 1)))
    scheduler.apply(KVReceived(now_s=0.5, worker=worker, event=event))


def hashes(tokens: int) -> tuple[int, ...]:
    return tuple(range(1, tokens // PAGE + 1))


def brute_force_ready_s(
    n: int, s_cached: int, d_cached: int, page_bytes: float, state_bytes: int, rate: float
) -> float:
    """max over every (chunk, layer), and the fixed state with the last, of release + remaining bytes / rate,
    from the first chunk's start."""
    pieces = []
    position, end, at_s = s_cached, s_cached + n, 0.0
    sent_tokens = end - min(d_cached, s_cached) if s_cached > d_cached else end - d_cached
    hot = max(0, s_cached - d_cached) / PAGE * PAGE_BYTES
    per_token = (page_bytes - hot) / max(1, min(sent_tokens, end - max(s_cached, d_cached)))
    while position < end:
        size = min(FAST.chunk_tokens, end - position)
        took_s = prefill_seconds(FAST, size, position)
        sent = max(0, position + size - max(position, d_cached))
        pieces += [
            (at_s + took_s * (layer + 1) / LAYERS, sent * per_token / LAYERS)
            for layer in range(LAYERS)
            if sent
        ]
        position, at_s = position + size, at_s + took_s
    pieces.append((at_s, state_bytes))
    left, ready_s = 0.0, at_s
    for release_s, size in reversed(pieces):
        left += size
        ready_s = max(ready_s, release_s + left / rate)
    return ready_s


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.integers(2, 1500),
    s_blocks=st.integers(0, 90),
    d_blocks=st.integers(0, 90),
    rate=st.sampled_from([3e4, 3e5, 1e6, 25e6]),
    state_bytes=st.sampled_from([0, 100, 50_000]),
)
def test_the_closed_form_of_the_overlap_equals_the_maximum_over_all_pieces(
    tokens: int, s_blocks: int, d_blocks: int, rate: float, state_bytes: int
) -> None:
    scheduler = fleet(0, 0, 0, rate=rate, rtt_s=RTT_S)
    join(scheduler, info("decode-0", "decode", "pd", state_bytes=state_bytes))
    join(scheduler, info("remote-0", "prefill", "far", state_bytes=state_bytes), FAST)
    cache(scheduler, "remote-0", s_blocks)
    cache(scheduler, "decode-0", d_blocks)
    record = scheduler.preview(request(tokens=tokens, block_hashes=hashes(tokens))).as_record(top=None)
    remote = [r for r in record["candidates"] if r["site"] == "remote-0"]
    limit = (tokens - 1) // PAGE
    if min(d_blocks, limit) == math.ceil((tokens - 1) / PAGE):
        assert not remote, "decode has all pages: nothing to grant"
        return
    (r,) = remote
    s_cached, d_cached = min(s_blocks, limit) * PAGE, min(d_blocks, limit) * PAGE
    n = tokens - 1 - s_cached
    assert r["uncached_tokens"] == n
    page_bytes = (math.ceil((tokens - 1) / PAGE) - d_cached // PAGE) * PAGE_BYTES
    assert r["kv_bytes"] == page_bytes + state_bytes
    assert r["start_s"] == pytest.approx(RTT_S / 2)
    assert r["prefill_s"] == pytest.approx(prefill_seconds(FAST, n, s_cached))
    ready_s = brute_force_ready_s(n, s_cached, d_cached, page_bytes, state_bytes, rate)
    if s_cached > d_cached:
        ready_s = max(ready_s, r["kv_bytes"] / rate)
    assert r["prefill_s"] + r["transfer_s"] == pytest.approx(ready_s + 1.5 * RTT_S, rel=1e-6)


def test_local_prefill_carries_the_running_decodes_and_pays_for_delaying_them() -> None:
    scheduler = fleet(1, 0, 0)
    scheduler.apply(status("decode-0", "decode", 1.0, running=4, running_context_tokens=2000))
    r = row(scheduler.preview(request(tokens=641, now_s=1.0)), "decode-0")
    pure_s, step_s = prefill_seconds(PROFILE, 640, 0), decode_seconds(PROFILE, 4, 2000)
    shared_s = min(PROFILE.prefill_base_s, PROFILE.decode_base_s)
    assert shared_s > 0
    assert r["prefill_s"] == pytest.approx(pure_s + 10 * (step_s - shared_s))
    assert r["interference_s"] == pytest.approx(4 * (pure_s - 10 * shared_s))
    assert r["transfer_s"] == 0
    assert r["step_s"] == pytest.approx(decode_seconds(PROFILE, 5, 2000 + 641) + 0.5 * step_s)


def test_the_terms_add_up_to_ttft_and_cost() -> None:
    scheduler = fleet(2, 1, 2)
    for i in range(6):
        scheduler.place(request(f"r{i}", now_s=1 + i / 100))
    decision = scheduler.preview(request(now_s=1.1, arrival_s=1.0))
    for r in decision.as_record(top=None)["candidates"]:
        ready_s = r["start_s"] + r["prefill_s"] + r["transfer_s"]
        assert r["ttft_s"] == pytest.approx(max(ready_s, r["slot_s"]) + r["step_s"] + r["overhead_s"])
        assert r["cost_s"] == pytest.approx(r["ttft_s"] + r["interference_s"] + r["externality_s"])
        assert r["overhead_s"] == pytest.approx(0.1)


@pytest.mark.parametrize(("blocks", "kind"), [(0, "local"), (30, "local"), (32, "reuse"), (62, "reuse")])
def test_local_prefill_is_reuse_from_half_of_the_prompt_on(blocks: int, kind: str) -> None:
    scheduler = fleet(1, 0, 0)
    cache(scheduler, "decode-0", blocks)
    decision = scheduler.preview(request(tokens=1000, block_hashes=hashes(1000)))
    assert decision.kind.label == kind
    assert decision.count("uncached_tokens") == 999 - blocks * PAGE


def test_the_last_prompt_token_is_never_taken_from_a_cache() -> None:
    scheduler = fleet(1, 0, 0)
    cache(scheduler, "decode-0", 4)
    decision = scheduler.preview(request(tokens=4 * PAGE, block_hashes=hashes(4 * PAGE)))
    assert decision.count("decode_cached_tokens") == 3 * PAGE
    assert decision.count("uncached_tokens") == PAGE - 1


def test_a_second_transfer_gets_what_the_first_leaves_of_a_thin_link() -> None:
    scheduler = fleet(1, 0, 2, rate=2e5, policy=AlwaysRemote())
    alone = row(scheduler.preview(request("a", tokens=2000)), "remote-1")
    placed = scheduler.place(request("b", tokens=2000))
    other = "remote-1" if placed.site == "remote-0" else "remote-0"
    shared = row(scheduler.preview(request("c", tokens=2000)), other)
    assert shared["transfer_s"] > 1.3 * alone["transfer_s"]


def test_a_measured_thin_link_turns_remote_to_local() -> None:
    scheduler = fleet(1, 0, 1, rate=25e6)
    assert scheduler.preview(request(now_s=1.0)).kind == PlacementKind.REMOTE
    for i in range(6):
        moved = 2000 * i
        link = counters(moved, moved, 0.1 * i)
        scheduler.apply(status("remote-0", "prefill", 1 + i / 4, links=[link]))
    assert scheduler.preview(request(now_s=3.0)).kind == PlacementKind.LOCAL


def test_a_full_decode_worker_makes_later_requests_wait_for_a_slot() -> None:
    scheduler = fleet(1, 1, 0)
    for i in range(8):
        scheduler.place(request(f"r{i}", tokens=50, now_s=1.0))
        scheduler.apply(FirstToken(now_s=1.1, request_id=f"r{i}", ttft_s=0.1))
    assert scheduler.preview(request("late", tokens=50, now_s=1.2)).term("slot_s") > 0

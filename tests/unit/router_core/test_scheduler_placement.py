from __future__ import annotations

from collections import Counter

import pytest
from brain_fleet import FAST, PAGE, counters, fleet, info, join, reported, request, status

from policies.fixed import AlwaysLocal, AlwaysRemote
from policies.types import PlacementKind
from prfaas.protocol.messages import KVSnapshot
from router.core.config import SchedulerConfig
from router.core.decision import NoCapacity
from router.core.events import (
    Failed,
    Finished,
    FirstToken,
    KVReceived,
    Released,
    Tick,
    WorkerJoined,
    WorkerLost,
)
from router.core.scheduler import Scheduler


def views(scheduler: Scheduler) -> dict[str, object]:
    return {worker.name: worker for worker in scheduler.workers()}


def test_equal_requests_at_the_same_moment_spread_over_equal_workers() -> None:
    scheduler = fleet(1, 0, 4)
    sites = Counter(scheduler.place(request(f"r{i}")).site for i in range(8))
    assert set(sites) >= {f"remote-{i}" for i in range(4)}
    assert max(sites.values()) <= 2


def test_equal_decode_workers_share_local_prefill() -> None:
    scheduler = fleet(4, 0, 0)
    assert Counter(scheduler.place(request(f"r{i}")).decode for i in range(8)) == {
        f"decode-{i}": 2 for i in range(4)
    }


def test_the_chosen_candidate_has_the_least_cost_under_the_default_policy() -> None:
    scheduler = fleet(2, 2, 2)
    decisions = [scheduler.place(request(f"r{i}", tokens=50 + 90 * i, now_s=1 + i / 50)) for i in range(20)]
    assert all(decision.least_cost for decision in decisions)
    assert len({decision.kind for decision in decisions}) >= 2


def test_preview_books_nothing_and_agrees_with_place() -> None:
    scheduler = fleet(2, 1, 2)
    preview = scheduler.preview(request())
    assert scheduler.bookings == 0
    assert scheduler.preview(request()).as_record() == preview.as_record()
    assert scheduler.place(request()).as_record() == preview.as_record()


def test_a_status_from_before_the_booking_does_not_erase_it() -> None:
    scheduler = fleet(1, 0, 1, policy=AlwaysRemote())
    scheduler.place(request("a", now_s=1.0))
    scheduler.apply(status("remote-0", "prefill", 1.05, waiting_prefill_tokens=0))
    assert scheduler.preview(request("b", now_s=1.05)).term("start_s") > 0.1


def test_a_later_status_says_how_much_of_the_booking_is_left() -> None:
    scheduler = fleet(1, 0, 1, policy=AlwaysRemote())
    decision = scheduler.place(request("a", now_s=1.0))
    scheduler.apply(status("remote-0", "prefill", 2.0, waiting_prefill_tokens=999))
    start_s = scheduler.preview(request("b", now_s=2.0)).term("start_s")
    assert start_s == pytest.approx(decision.term("prefill_s"), rel=0.01)
    scheduler.apply(status("remote-0", "prefill", 3.0, waiting_prefill_tokens=0))
    assert scheduler.preview(request("b", now_s=3.0)).term("start_s") == pytest.approx(0.02)


def test_load_that_others_put_on_a_worker_counts() -> None:
    scheduler = fleet(1, 0, 2)
    scheduler.apply(status("remote-0", "prefill", 1.0, waiting_prefill_tokens=50_000))
    assert {scheduler.place(request(f"r{i}", now_s=1.0)).site for i in range(2)} == {"remote-1"}


def test_a_new_worker_without_profile_or_cache_gets_traffic() -> None:
    scheduler = fleet(1, 0, 1)
    for i in range(3):
        scheduler.place(request(f"r{i}"))
    scheduler.apply(WorkerJoined(now_s=1.0, info=info("remote-9", "prefill", "far"), ready=True))
    assert "remote-9" in {scheduler.place(request(f"n{i}")).site for i in range(4)}


def test_finished_requests_leave_no_booking_behind() -> None:
    scheduler = fleet(2, 1, 1)
    for i in range(6):
        decision = scheduler.place(request(f"r{i}"))
        scheduler.apply(reported(f"r{i}", decision.site, 2.0))
        scheduler.apply(FirstToken(now_s=2.1, request_id=f"r{i}", ttft_s=1.1))
        scheduler.apply(Finished(now_s=3.0, request_id=f"r{i}", completion_tokens=9))
    assert_idle(scheduler)


def assert_idle(scheduler: Scheduler) -> None:
    assert scheduler.bookings == 0
    for worker in scheduler.workers():
        assert (worker.booked_prefills, worker.booked_decodes) == (0, 0)
        assert (worker.queued_tokens, worker.running, worker.waiting) == (0, 0, 0)
    for link in scheduler.links():
        assert (link.booked_transfers, link.backlog_bytes) == (0, 0)


def test_a_failed_attempt_is_released_and_its_late_reports_are_ignored() -> None:
    scheduler = fleet(1, 1, 1)
    first = scheduler.place(request("r"))
    scheduler.apply(Failed(now_s=1.5, request_id="r", attempt=1, site=first.site, reason="peer_lost"))
    assert_idle(scheduler)
    second = scheduler.place(request("r", now_s=1.5, arrival_s=1.0, attempt=2, avoid=(first.site,)))
    assert second.site != first.site
    assert second.attempt == 2
    assert second.term("overhead_s") == pytest.approx(0.5)
    scheduler.apply(reported("r", first.site, 1.6, attempt=1))
    scheduler.apply(Failed(now_s=1.6, request_id="r", attempt=1))
    assert scheduler.bookings == 1
    scheduler.apply(Released(now_s=1.7, request_id="r"))
    assert_idle(scheduler)


def test_placing_again_gives_up_the_former_booking() -> None:
    scheduler = fleet(1, 0, 1)
    scheduler.place(request("r"))
    scheduler.place(request("r", attempt=2))
    assert scheduler.bookings == 1


def test_avoided_workers_are_used_only_where_nothing_else_is_feasible() -> None:
    scheduler = fleet(1, 0, 1)
    assert scheduler.preview(request(avoid=("remote-0",))).kind == PlacementKind.LOCAL
    assert scheduler.preview(request(avoid=("decode-0", "remote-0"))).decode == "decode-0"


def test_a_lost_prefill_worker_frees_its_queue_and_a_lost_decode_worker_everything() -> None:
    scheduler = fleet(2, 0, 1, policy=AlwaysRemote())
    for i in range(4):
        scheduler.place(request(f"r{i}"))
    scheduler.apply(WorkerLost(now_s=1.1, worker="remote-0"))
    assert all(link.booked_transfers == 0 for link in scheduler.links())
    assert scheduler.bookings == 4
    scheduler.apply(WorkerLost(now_s=1.2, worker="decode-0"))
    scheduler.apply(WorkerLost(now_s=1.2, worker="decode-1"))
    assert scheduler.bookings == 0
    with pytest.raises(NoCapacity, match="no decode worker"):
        scheduler.place(request("late"))


def test_a_freed_column_starts_clean_for_the_next_worker() -> None:
    scheduler = fleet(1, 0, 1, policy=AlwaysRemote())
    scheduler.place(request("r"))
    scheduler.apply(WorkerLost(now_s=1.1, worker="remote-0"))
    join(scheduler, info("remote-5", "prefill", "far"), FAST, now_s=1.2)
    scheduler.apply(Failed(now_s=1.3, request_id="r", attempt=1))
    decision = scheduler.preview(request("n", now_s=1.3))
    assert decision.site == "remote-5"
    assert decision.term("start_s") == pytest.approx(0.02)
    assert decision.count("site_cached_tokens") == 0


def test_a_restarted_worker_forgets_its_former_incarnation() -> None:
    scheduler = fleet(1, 0, 1, policy=AlwaysRemote())
    event = KVSnapshot(generation="g", sequence=0, page_size=PAGE, block_hashes=[1, 2])
    scheduler.apply(KVReceived(now_s=1.0, worker="remote-0", event=event))
    scheduler.place(request("r"))
    again = info("remote-0", "prefill", "far")
    scheduler.apply(WorkerJoined(now_s=1.1, info=type(again)(**{**_fields(again), "incarnation": "2"})))
    view = views(scheduler)["remote-0"]
    assert (view.cached_blocks, view.booked_prefills, view.ready) == (0, 0, False)


def _fields(message: object) -> dict[str, object]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


def test_statuses_of_another_incarnation_are_ignored() -> None:
    scheduler = fleet(1, 0, 1)
    event = status("remote-0", "prefill", 1.0, state="draining")
    stale = type(event.status)(**{**_fields(event.status), "incarnation": "old"})
    scheduler.apply(type(event)(now_s=1.0, status=stale))
    assert views(scheduler)["remote-0"].ready


def test_draining_workers_get_nothing_new() -> None:
    scheduler = fleet(1, 1, 1)
    scheduler.apply(status("remote-0", "prefill", 1.0, state="draining"))
    assert all(scheduler.place(request(f"r{i}", now_s=1.0)).site != "remote-0" for i in range(6))


def test_workers_whose_kv_differs_are_never_paired() -> None:
    scheduler = fleet(1, 0, 0)
    join(scheduler, info("odd", "prefill", "far", kv_dtype="bfloat16"), FAST)
    assert {r["site"] for r in scheduler.preview(request()).as_record(None)["candidates"]} == {"decode-0"}


def test_clusters_without_a_link_are_never_paired() -> None:
    scheduler = fleet(1, 0, 0)
    join(scheduler, info("island", "prefill", "elsewhere"), FAST)
    assert {r["site"] for r in scheduler.preview(request()).as_record(None)["candidates"]} == {"decode-0"}


def test_no_ready_decode_worker_is_503() -> None:
    with pytest.raises(NoCapacity) as refusal:
        fleet(0, 1, 1).place(request())
    assert (refusal.value.reason, refusal.value.http_status) == ("no_decode_worker", 503)
    assert refusal.value.retry_after_s > 0


def test_full_queues_are_429_and_empty_again_after_release() -> None:
    scheduler = Scheduler(AlwaysLocal())
    join(scheduler, info("decode-0", "decode", "pd", max_queue=2))
    scheduler.place(request("a"))
    scheduler.place(request("b"))
    with pytest.raises(NoCapacity) as refusal:
        scheduler.place(request("c"))
    assert (refusal.value.reason, refusal.value.http_status) == ("queues_full", 429)
    assert refusal.value.retry_after_s >= 1
    assert scheduler.counters().refused == {"queues_full": 1}
    scheduler.apply(Released(now_s=1.0, request_id="a"))
    scheduler.place(request("c"))


def test_a_prompt_that_fits_no_pool_is_400() -> None:
    scheduler = Scheduler(AlwaysLocal())
    join(scheduler, info("decode-0", "decode", "pd", pages=10))
    with pytest.raises(NoCapacity) as refusal:
        scheduler.place(request(tokens=10 * PAGE))
    assert (refusal.value.reason, refusal.value.http_status) == ("prompt_too_long", 400)


def test_waiting_for_pages_of_the_decode_worker_is_part_of_the_start() -> None:
    scheduler = Scheduler(AlwaysLocal())
    join(scheduler, info("decode-0", "decode", "pd", pages=70))
    first = scheduler.place(request("a", tokens=1000))
    second = scheduler.preview(request("b", tokens=1000))
    assert second.term("start_s") > first.term("prefill_s") + first.term("step_s")


def test_always_remote_without_remote_sites_is_refused_not_local() -> None:
    with pytest.raises(NoCapacity) as refusal:
        fleet(1, 1, 0, policy=AlwaysRemote()).place(request())
    assert (refusal.value.reason, refusal.value.http_status) == ("policy_refused", 503)


def test_siblings_count_a_prompt_as_cached_once_it_is_predicted_to_be_computed() -> None:
    blocks = tuple(range(1, 61))
    scheduler = fleet(1, 0, 1, policy=AlwaysRemote())
    first = scheduler.place(request("a", tokens=1000, block_hashes=blocks))
    assert scheduler.preview(request("b", tokens=1000, block_hashes=blocks)).count("site_cached_tokens") == 0
    later_s = 1.0 + first.ttft_s
    sibling = scheduler.preview(request("b", tokens=1000, now_s=later_s, block_hashes=blocks))
    assert sibling.count("site_cached_tokens") == 960
    expired = scheduler.preview(request("b", tokens=1000, now_s=later_s + 10, block_hashes=blocks))
    assert expired.count("site_cached_tokens") == 0


def test_siblings_count_a_prompt_as_cached_at_once_where_workers_match_late() -> None:
    blocks = tuple(range(1, 61))
    scheduler = fleet(1, 0, 1, config=SchedulerConfig(predicted_from="placed"), policy=AlwaysRemote())
    scheduler.place(request("a", tokens=1000, block_hashes=blocks))
    assert (
        scheduler.preview(request("b", tokens=1000, block_hashes=blocks)).count("site_cached_tokens") == 960
    )


def test_a_failed_placement_takes_its_prediction_back() -> None:
    blocks = tuple(range(1, 61))
    scheduler = fleet(1, 0, 1, policy=AlwaysRemote(), config=SchedulerConfig(predicted_from="placed"))
    scheduler.place(request("a", block_hashes=blocks))
    scheduler.apply(Failed(now_s=1.1, request_id="a", attempt=1))
    assert scheduler.preview(request("b", block_hashes=blocks)).count("site_cached_tokens") == 0


def test_leaked_bookings_are_swept_after_their_deadline_and_counted() -> None:
    scheduler = fleet(1, 0, 1, config=SchedulerConfig(booking_deadline_s=10.0))
    scheduler.place(request("leak", now_s=1.0))
    scheduler.apply(Tick(now_s=10.9))
    assert scheduler.bookings == 1
    scheduler.apply(Tick(now_s=11.1))
    assert_idle(scheduler)
    assert scheduler.counters().bookings_expired == 1


def test_a_site_slower_than_its_profile_is_predicted_slower() -> None:
    scheduler = fleet(1, 0, 1, policy=AlwaysRemote())
    before = scheduler.preview(request()).term("prefill_s")
    for i in range(3):
        scheduler.place(request(f"r{i}"))
        scheduler.apply(reported(f"r{i}", "remote-0", 2.0, prefill_s=2 * before))
        scheduler.apply(Released(now_s=2.0, request_id=f"r{i}"))
    after = scheduler.preview(request("late", now_s=60.0)).term("prefill_s")
    assert after == pytest.approx(2 * before, rel=0.01)


def test_what_no_term_explains_is_learned_as_the_paths_overhead() -> None:
    scheduler = fleet(1, 0, 1, policy=AlwaysRemote())
    for i in range(3):
        now_s = 10.0 * i
        plan = scheduler.place(request(f"r{i}", now_s=now_s))
        start_s, prefill_s = plan.term("start_s") - 0.02, plan.term("prefill_s")
        scheduler.apply(reported(f"r{i}", "remote-0", now_s + 1, queue_s=start_s, prefill_s=prefill_s))
        bare_s = plan.ttft_s - plan.term("overhead_s")
        scheduler.apply(FirstToken(now_s=now_s + 2, request_id=f"r{i}", ttft_s=bare_s + 0.3))
        scheduler.apply(Finished(now_s=now_s + 3, request_id=f"r{i}", completion_tokens=10))
    assert scheduler.preview(request("x", now_s=90.0)).term("overhead_s") == pytest.approx(0.3, abs=0.01)
    assert scheduler.path_overhead_s(PlacementKind.LOCAL) == 0.0


def test_outcomes_carry_predicted_and_actual_terms() -> None:
    outcomes = []
    scheduler = fleet(1, 0, 1, policy=AlwaysRemote(), on_outcome=outcomes.append)
    plan = scheduler.place(request("r"))
    scheduler.apply(reported("r", "remote-0", 2.0, queue_s=0.1, prefill_s=0.5, ready_s=0.9))
    scheduler.apply(FirstToken(now_s=2.0, request_id="r", ttft_s=1.0))
    scheduler.apply(Finished(now_s=3.0, request_id="r", completion_tokens=10))
    (outcome,) = outcomes
    assert outcome.terms["prefill_s"] == (plan.term("prefill_s"), 0.5)
    assert outcome.terms["start_s"][1] == pytest.approx(0.12)
    assert outcome.terms["transfer_s"][1] == pytest.approx(0.28)
    assert outcome.terms["ttft_s"] == (plan.ttft_s, 1.0)
    assert outcome.ok


def test_the_record_lists_the_cheapest_first_and_the_header_names_the_path() -> None:
    scheduler = fleet(2, 1, 2)
    decision = scheduler.place(request("r"))
    record = decision.as_record(top=3)
    costs = [row["cost_s"] for row in record["candidates"]]
    assert costs == sorted(costs)
    assert len(costs) == 3
    assert record["chosen"]["cost_s"] == costs[0]
    assert decision.header == f"remote {decision.decode}<-{decision.site} ttft={decision.ttft_s:.2f}s"


def test_views_show_links_by_direction_with_their_estimates() -> None:
    scheduler = fleet(1, 0, 1)
    for i in range(4):
        link = counters(10**6 * i, 10**6 * i, 0.1 * i, rtt_s=0.05)
        scheduler.apply(status("remote-0", "prefill", 1 + i / 4, links=[link]))
    by_direction = {(link.source, link.target): link for link in scheduler.links()}
    wan = by_direction["far", "pd"]
    assert wan.rate_bytes_per_s == pytest.approx(1e7, rel=0.1)
    assert (wan.rtt_s, wan.probe_due) == (0.05, False)
    assert by_direction["pd", "far"].rate_bytes_per_s == 25e6
    assert scheduler.view().link_bytes_per_s["far->pd"] == wan.rate_bytes_per_s


def test_events_about_unknown_workers_and_requests_change_nothing() -> None:
    scheduler = fleet(1, 0, 0)
    scheduler.apply(status("nobody", "decode", 1.0))
    scheduler.apply(WorkerLost(now_s=1.0, worker="nobody"))
    scheduler.apply(Finished(now_s=1.0, request_id="nobody", completion_tokens=1))
    scheduler.apply(reported("x", "y", 1.0))
    assert_idle(scheduler)

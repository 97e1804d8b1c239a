"""What the words say follows from the figures: winner, noise, what binds, what to change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from run_results import make_fleet, make_result

from simulations.report.conclude import Finding, conclude, ranking
from simulations.report.noise import good_share_difference, ttft_ratio
from simulations.report.study import Study
from simulations.report.summary import summarize
from simulations.result import ResourceUse, RunResult


def findings(*runs: RunResult, bound_rps: float | None = None) -> dict[str, Finding]:
    study = Study(make_fleet(), runs, bound_rps, "prefill seconds of pd" if bound_rps else "")
    found = conclude(study, [summarize(run, study.fleet, bound_rps) for run in runs])
    return {"first": found[0], **{finding.head: finding for finding in found[1:]}}


def with_use(run: RunResult, **fullness: float) -> RunResult:
    """`run` with one resource of each kind, as full as given all the time."""
    kinds = {"prefill": "utilisation", "decode": "pages", "link": "utilisation"}
    resources = tuple(
        ResourceUse(f"the-{kind}", kind, 1.0, {kinds[kind]: np.full(10, share)})
        for kind, share in fullness.items()
    )
    return replace(run, resources=resources, times_s=np.arange(10.0))


def test_a_clear_winner_is_named_with_its_lead() -> None:
    slow = make_result("slow", slowness=1.6)
    found = findings(slow, make_result("quick"))["first"]
    assert found.head.startswith("quick wins")
    good = [float(summarize(run, make_fleet())["good_share"]) for run in (make_result(), slow)]
    assert f"{100 * good[0]:.0f} % of requests" in found.text
    assert f"{100 * good[1]:.0f} % of requests" in found.text


def test_equal_runs_are_called_noise() -> None:
    found = findings(make_result("a"), make_result("b"))["first"]
    assert found.head == "No winner: a and b are within noise"


def test_other_draws_of_the_same_distribution_are_called_noise() -> None:
    for seed in range(1, 6):
        found = findings(make_result("a"), make_result("b", seed=seed))["first"]
        assert "wins" not in found.head, (seed, found)


def test_a_difference_in_latency_alone_is_said_to_be_one() -> None:
    run = make_result("slower")
    quick = replace(run, policy="quicker", ttft_s=run.ttft_s * 0.8)
    loose = [replace(item, ttft_s=item.ttft_s / 10) for item in (run, quick)]
    found = findings(*loose)["first"]
    assert found.head == "quicker answers sooner than slower, at equal service levels"
    assert "20 % to 20 % shorter" in found.text


def test_the_interval_of_the_good_share_holds_the_difference_found() -> None:
    quick, slow = make_result(), make_result(slowness=1.6)
    fleet = make_fleet()
    interval = good_share_difference(quick, slow, fleet.slo)
    assert interval is not None
    shares = [float(summarize(run, fleet)["good_share"]) for run in (quick, slow)]
    assert interval[0] < shares[0] - shares[1] < interval[1]


def test_a_scaled_run_has_exactly_that_ratio_of_ttft() -> None:
    run = make_result()
    interval = ttft_ratio(replace(run, ttft_s=run.ttft_s * 3), run)
    assert interval is not None
    assert np.allclose(interval, 3.0)


def test_too_few_requests_are_no_evidence() -> None:
    assert good_share_difference(make_result(requests=40), make_result(requests=40), make_fleet().slo) is None
    found = findings(make_result("a", requests=40), make_result("b", requests=40, seed=3))["first"]
    assert "wins" not in found.head


def test_ranking_is_by_good_requests_then_by_ttft() -> None:
    runs = [make_result("worst", slowness=3.0), make_result("best"), make_result("middle", slowness=1.5)]
    assert ranking([summarize(run, make_fleet()) for run in runs]) == [1, 2, 0]
    run = make_result("a")
    sooner = replace(run, policy="b", ttft_s=run.ttft_s * 0.999)
    assert ranking([summarize(item, make_fleet()) for item in (run, sooner)]) == [1, 0]


def test_a_full_link_is_what_binds_and_what_to_change() -> None:
    found = findings(with_use(make_result(), prefill=0.4, decode=0.3, link=0.97))
    assert "the link the-link is full: 97 %" in found["What binds"].text
    assert "wider link" in found["What to change"].text


def test_full_prefill_beside_empty_decode_asks_for_a_change_of_role() -> None:
    found = findings(with_use(make_result(), prefill=0.95, decode=0.2, link=0.1))
    assert "turn a decode worker into prefill" in found["What to change"].text


def test_full_decode_memory_asks_for_decode_workers() -> None:
    found = findings(with_use(make_result(), prefill=0.7, decode=0.93, link=0.1))
    assert "KV memory of the-decode is full" in found["What binds"].text
    assert "add decode workers" in found["What to change"].text


def test_missed_tpot_with_memory_to_spare_is_told_apart_from_full_memory() -> None:
    found = findings(with_use(make_result(slowness=1.6), prefill=0.5, decode=0.4, link=0.1))
    assert "TPOT is missed" in found["What to change"].text


def test_room_to_spare_is_called_that_only_where_levels_hold() -> None:
    kept = findings(with_use(make_result(), prefill=0.5, decode=0.4, link=0.1))
    assert "room for a higher rate" in kept["What to change"].text
    missed = findings(with_use(make_result(refused=0.02), prefill=0.5, decode=0.4, link=0.1))
    assert "room for a higher rate" not in missed["What to change"].text


def test_the_bound_is_said_with_what_runs_out_first() -> None:
    text = findings(make_result(), bound_rps=10.0)["What binds"].text
    assert "No policy could serve more than 10.00 requests/s" in text
    assert "prefill seconds of pd" in text


def test_a_stopped_run_is_called_partial() -> None:
    found = findings(make_result(complete=False))
    assert found["first"].head == "Stopped before the end"
    assert "Partial" in found["How far to trust this"].text

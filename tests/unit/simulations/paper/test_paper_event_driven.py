"""The event-driven side: the search by itself on invented runs, and small real runs against the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from math import inf

import numpy as np
import pytest

from policies.fixed import AlwaysRemote
from policies.threshold import Threshold
from simulations.paper.case import paper_case
from simulations.paper.event_driven import (
    Effort,
    Job,
    Sample,
    fleet_of,
    jobs_of,
    measured_figures,
    poisson_trace,
    policy_of,
    run_job,
    search,
    together,
    with_lines,
)
from simulations.paper.model import Split, figures, paper_splits
from simulations.paper.published import LENGTHS, DeploymentName

CASE = paper_case()
SPLITS = paper_splits(CASE)
RATES = {name: figures(CASE, split).lambda_max for name, split in SPLITS.items()}


def invented(ttft_s: float, placed: int = 100, remote: int = 50) -> Sample:
    work_s = {"remote": 4.0 * remote, "home": 4.0 * (placed - remote), "decode": 25.6 * placed}
    return Sample(np.full(placed, ttft_s), placed, remote, remote * 1e9, work_s)


def knee_at(shares: dict[DeploymentName, float]) -> tuple[list[Job], object]:
    """Runs whose TTFT triples beyond a share of the model's rate; and the jobs that were asked for."""
    asked: list[Job] = []

    def run_jobs(jobs: Sequence[Job]) -> list[Sample]:
        asked.extend(jobs)
        names = {id(split): name for name, split in SPLITS.items()}
        return [
            invented(
                3.0 if job.rate_per_s > shares[names[id(job.split)]] * RATES[names[id(job.split)]] else 1.0
            )
            for job in jobs
        ]

    return asked, run_jobs


def test_search_finds_where_the_p90_doubles() -> None:
    knees: dict[DeploymentName, float] = {"prfaas_pd": 0.8, "homogeneous": 0.93, "naive": 0.61}
    _, run_jobs = knee_at(knees)
    found = search(CASE, SPLITS, RATES, Effort(seeds=1, steps=9), run_jobs)  # type: ignore[arg-type]
    assert found.complete
    for name, share in knees.items():
        assert found.figures[name].lambda_max <= share * RATES[name]
        assert found.figures[name].lambda_max == pytest.approx(share * RATES[name], rel=0.003)


def test_search_asks_for_the_jobs_it_announced() -> None:
    asked, run_jobs = knee_at(dict.fromkeys(SPLITS, 0.7))
    effort = Effort(seeds=3, steps=4)
    search(CASE, SPLITS, RATES, effort, run_jobs)  # type: ignore[arg-type]
    assert len(asked) == jobs_of(effort, len(SPLITS)) == 3 * 3 * 5
    assert {job.seed for job in asked} == {0, 1, 2}
    assert sum(job.unloaded for job in asked) == 9


def test_interrupted_search_has_what_was_known_and_says_so() -> None:
    _, run_jobs = knee_at(dict.fromkeys(SPLITS, 0.8))
    calls = 0

    def interrupted(jobs: Sequence[Job]) -> list[Sample]:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return run_jobs(jobs)  # type: ignore[no-any-return, operator]

    found = search(CASE, SPLITS, RATES, Effort(seeds=1), interrupted)
    assert not found.complete
    assert found.figures["naive"].lambda_max == pytest.approx(0.75 * RATES["naive"])


def test_unserved_requests_break_the_limit() -> None:
    some_lost = Sample(
        np.array([1.0] * 85 + [inf] * 15), 85, 0, 0.0, {"remote": 0.0, "home": 1.0, "decode": 1.0}
    )
    assert some_lost.ttft_p90_s == inf


def test_figures_of_a_run_worked_out_by_hand() -> None:
    """100 placed, half remote: 4 s of prefill each, 1 GB each, 25.6 s in a slot."""
    found = measured_figures(CASE, Split(4, 3, 5, 19_400.0), 2.0, invented(1.5))
    assert found.theta_prfaas == pytest.approx(1.0)
    assert found.theta_pd_p == pytest.approx(0.75)
    assert found.theta_pd_d == pytest.approx(5 * 20 / 25.6)
    assert found.egress_gbps == pytest.approx(2.0 * 0.5 * 8)
    assert (found.offload_share, found.ttft_mean_s, found.lambda_max) == (0.5, 1.5, 2.0)


def test_runs_together_are_one_longer_run() -> None:
    both = together([invented(1.0, 10, 4), invented(2.0, 30, 6)])
    assert (len(both.ttft_s), both.placed, both.remote, both.remote_bytes) == (40, 40, 10, 10e9)
    assert both.work_s["remote"] == 40.0


def test_trace_has_the_cases_rate_and_lengths() -> None:
    trace = poisson_trace(CASE, 2000, seed=1)
    assert trace.rate_per_s == pytest.approx(1.0, rel=0.01)
    assert (trace.prompt_tokens > 19_400).mean() == pytest.approx(LENGTHS.share(above=19_400), abs=0.002)
    assert CASE.remote_ttft_s(trace.prompt_tokens.astype(float)).mean() == pytest.approx(
        LENGTHS.mean(CASE.remote_ttft_s), rel=0.005
    )
    gaps = np.diff(trace.arrival_s)
    assert gaps.std() == pytest.approx(1.0, rel=0.1)  # exponential: as wide as long
    for values in (gaps, trace.prompt_tokens):
        assert np.corrcoef(values[1:], values[:-1])[0, 1] == pytest.approx(0, abs=0.06)
    assert (trace.prompt_tokens != poisson_trace(CASE, 2000, seed=2).prompt_tokens).any()


def test_fleets_are_the_shipped_one_with_other_counts() -> None:
    mixed, plain, naive = (fleet_of(CASE, SPLITS[name]) for name in ("prfaas_pd", "homogeneous", "naive"))
    counts = {
        fleet_name: {group: w.count for c in fleet.clusters.values() for group, w in c.workers.items()}
        for fleet_name, fleet in (("mixed", mixed), ("plain", plain), ("naive", naive))
    }
    assert counts["mixed"] == {"prefill": 3, "decode": 5, "remote": 4}
    assert counts["plain"] == {"prefill": 9, "decode": 3}
    assert counts["naive"] == {"decode": 8, "remote": 4}
    assert not plain.links
    assert [float(link.capacity) for link in mixed.links.values()] == [CASE.link_bytes_per_s]


def test_the_shipped_fleet_runs_on_the_cases_profiles() -> None:
    from simulations.hardware.profiles import hardware_of, step_times

    fleet = fleet_of(CASE, SPLITS["prfaas_pd"])
    curves = {"pd": CASE.home_ttft_s, "prfaas": CASE.remote_ttft_s}
    for cluster, curve in curves.items():
        for workers in fleet.clusters[cluster].workers.values():
            times = step_times(hardware_of(fleet, workers), workers.hardware)
            for tokens in (1024, 5000, 30_000, 100_000):
                assert times.prefill_s(tokens, 0) == pytest.approx(float(curve(tokens)), rel=0.002)
    decode = fleet.clusters["pd"].workers["decode"]
    line = step_times(hardware_of(fleet, decode), decode.hardware).decode_line(decode.max_running, 500_000)
    slots = decode.max_running / ((line.base_s + 500_000 * line.slope_s) * CASE.output_tokens)
    assert slots == pytest.approx(CASE.decode_rate_per_s)
    kv_bytes = fleet.model.state_bytes + fleet.model.kv_bytes_per_token * 32_768
    assert kv_bytes == pytest.approx(float(CASE.kv_bytes(32_768)), rel=0.005)


def test_policies_are_the_papers_rule_and_its_end() -> None:
    assert isinstance(policy_of(SPLITS["prfaas_pd"]), Threshold)
    assert isinstance(policy_of(SPLITS["homogeneous"]), Threshold)
    assert isinstance(policy_of(SPLITS["naive"]), AlwaysRemote)


@pytest.mark.parametrize("name", list(SPLITS))
def test_lightly_loaded_runs_agree_with_the_model(name: DeploymentName) -> None:
    """No queues yet: TTFT is prefill, link and decode step; stage throughputs are the model's on lines."""
    found = measured_figures(
        CASE,
        SPLITS[name],
        0.2 * RATES[name],
        run_job(Job(CASE, SPLITS[name], 0.2 * RATES[name], 300, seed=3)),
    )
    expected = figures(with_lines(CASE), SPLITS[name])
    assert found.offload_share == pytest.approx(expected.offload_share, abs=0.01)
    for figure in ("theta_prfaas", "theta_pd_p", "theta_pd_d"):
        ours, models = asdict(found)[figure], asdict(expected)[figure]
        assert ours == (None if models is None else pytest.approx(models, rel=0.03))
    assert expected.ttft_mean_s < found.ttft_mean_s < expected.ttft_mean_s * 1.1


def test_queues_build_up_before_the_models_rate() -> None:
    split = SPLITS["naive"]
    quiet, busy = (run_job(Job(CASE, split, share * RATES["naive"], 400, seed=0)) for share in (0.2, 0.98))
    assert busy.ttft_p90_s > 2 * quiet.ttft_p90_s


def test_equal_seeds_give_equal_runs() -> None:
    job = Job(CASE, SPLITS["prfaas_pd"], 2.0, 60, seed=5)
    assert (run_job(job).ttft_s == run_job(job).ttft_s).all()

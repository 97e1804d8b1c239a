"""The closed-form engine and the token-stepping reference find the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from small_cases import Spread, small_fleet, small_trace
from token_stepping import Job, Reference

from prfaas.engine.interface import StepProfile
from prfaas.units import Rate
from simulations.engine.run import simulate
from simulations.fleet import Fleet
from simulations.result import RunResult
from simulations.workload.trace import Trace

UNLIMITED = 1e15
"""Bytes per second from which on a link takes no time."""


def reference_jobs(trace: Trace, fleet: Fleet, found: RunResult) -> list[Job]:
    """The reference's answer for the placements of `found`."""
    hardware = fleet.hardware["h"]
    page = fleet.page_size
    cluster_of = {
        name if workers.count == 1 else f"{name}-{n}": cluster
        for cluster, spec in fleet.clusters.items()
        for name, workers in spec.workers.items()
        for n in range(workers.count)
    }
    rate = float(Rate.parse(fleet.clusters["pd"].local_rate))
    wan = {link.between: float(link.capacity) for link in fleet.links.values()}
    reference = Reference(
        StepProfile(chunk_tokens=hardware.chunk_tokens, **hardware.linear),
        hardware.kv_tokens // page,
        page,
        fleet.clusters["pd"].workers["decode"].max_running,
        page_bytes=fleet.model.kv_bytes_per_token * page,
        state_bytes=fleet.model.state_bytes,
        layers=fleet.model.layers,
        nic_bytes_per_s=0.0 if rate >= UNLIMITED else rate,
        rtt_s=1e-3,
        wan={**wan, **{pair[::-1]: rate for pair, rate in wan.items()}},
        cluster_of=cluster_of,
        wan_rtt_s=float(next(iter(fleet.links.values())).rtt) if fleet.links else 0.0,
    )
    jobs = []
    for index in range(len(trace)):
        decode, site = found.workers[found.decode[index]], found.workers[found.site[index]]
        prompt = int(trace.prompt_tokens[index])
        tokens = [-block for block in trace.block_hashes(index) for _ in range(page)]
        tokens += [2_000_000_000 + index * page + n for n in range(prompt - len(tokens))]
        jobs.append(
            Job(
                index,
                float(trace.arrival_s[index]),
                prompt,
                int(trace.output_tokens[index]),
                [token % 2**32 for token in tokens],
                decode,
                None if site == decode else site,
            )
        )
    reference.run(jobs)
    return jobs


def compare(trace: Trace, fleet: Fleet, policy: Any, *, exact: bool) -> list[Job]:
    found = simulate(trace, fleet, policy)
    jobs = reference_jobs(trace, fleet, found)
    assert found.complete
    assert (found.state == 0).all()
    ttft_s = np.array([job.first_s - job.arrival_s for job in jobs])
    many = found.output_tokens > 1
    tpot_s = np.array([(job.end_s - job.first_s) / max(job.output - 1, 1) for job in jobs])
    end_s = np.array([job.end_s for job in jobs])
    if exact:
        np.testing.assert_allclose(found.ttft_s, ttft_s, rtol=1e-9, atol=1e-6)
        np.testing.assert_allclose(found.tpot_s[many], tpot_s[many], rtol=1e-9, atol=1e-6)
    assert np.mean(found.ttft_s) == pytest.approx(np.mean(ttft_s), rel=0.005)
    assert np.nanmean(found.tpot_s) == pytest.approx(np.mean(tpot_s[many]), rel=0.005)
    assert np.nanmax(found.end_s) == pytest.approx(np.max(end_s), rel=0.005)
    np.testing.assert_array_equal(found.decode_cached_tokens, [job.cached for job in jobs])
    return jobs


@pytest.mark.parametrize("seed", range(12))
def test_local_prefill_beside_decodes_is_exact(seed: int) -> None:
    compare(small_trace(seed), small_fleet(decode=1 + seed % 3), Spread(seed), exact=True)


@pytest.mark.parametrize("seed", range(6))
def test_decode_only_is_exact(seed: int) -> None:
    trace = small_trace(seed, prompt_pages=0, output=200)
    compare(trace, small_fleet(decode=2, max_running=4 + seed), Spread(seed), exact=True)


@pytest.mark.parametrize("seed", range(12))
def test_preemption_is_exact(seed: int) -> None:
    trace = small_trace(seed, requests=25, prompt_pages=8, output=150, rate_per_s=40)
    jobs = compare(trace, small_fleet(decode=1, kv_pages=24, max_running=12), Spread(seed), exact=True)
    assert sum(job.preempted for job in jobs) > 0


@pytest.mark.parametrize("seed", range(5))
def test_prefill_workers_over_fast_links_agree(seed: int) -> None:
    trace = small_trace(seed, rate_per_s=12)
    fleet = small_fleet(decode=2, prefill=2, state_bytes=(seed % 2) * 10_000)
    compare(trace, fleet, Spread(seed), exact=False)


@pytest.mark.parametrize("seed", range(5))
def test_slow_shared_links_agree(seed: int) -> None:
    trace = small_trace(seed, rate_per_s=12, prompt_pages=16)
    fleet = small_fleet(
        decode=2, prefill=1, remote=2, link="4MB/s", local_rate="8MB/s", state_bytes=(seed % 2) * 50_000
    )
    jobs = compare(trace, fleet, Spread(seed, only="elsewhere"), exact=False)
    assert any(job.site for job in jobs)


@pytest.mark.parametrize("seed", range(12))
def test_running_out_of_pages_with_grants_waiting_is_exact(seed: int) -> None:
    trace = small_trace(seed, requests=30, prompt_pages=10, output=120, rate_per_s=60)
    fleet = small_fleet(decode=1, prefill=2, kv_pages=30, max_running=8, local_rate="1000000GB/s")
    compare(trace, fleet, Spread(seed), exact=True)

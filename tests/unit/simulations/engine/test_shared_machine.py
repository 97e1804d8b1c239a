"""Workers of one machine slow each other by what the others do; without that, nothing changes."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from simulated_recordings import fleet, on_one_machine, trace
from small_cases import small_fleet, small_trace

from policies.cost_model import CostModel
from prfaas.config import LinkConfig
from prfaas.engine.interface import StepProfile
from prfaas.units import Rate, Seconds
from simulations.engine.machine import Machine, SharedStepTimes
from simulations.engine.run import simulate
from simulations.fidelity.recorded_policy import RecordedPolicy
from simulations.fleet import Fleet, MachineSpec
from simulations.hardware.step_times import LinearStepTimes
from simulations.result import RunResult
from simulations.workload.trace import Trace

SMALL = small_fleet(decode=2, prefill=1, remote=1, kv_pages=60, state_bytes=20_000)


@pytest.mark.parametrize(("described", "requests"), [(fleet(), trace(40)), (SMALL, small_trace(3))])
def test_workers_that_share_and_do_not_slow_each_other_run_as_alone(
    described: Fleet, requests: Trace
) -> None:
    """Steps planned one by one are the same as steps planned ahead."""
    alone = simulate(requests, described, CostModel())
    shared = simulate(requests, on_one_machine(described), CostModel())
    assert (shared.decode == alone.decode).all()
    assert (shared.site == alone.site).all()
    np.testing.assert_allclose(shared.ttft_s, alone.ttft_s, rtol=1e-6)
    np.testing.assert_allclose(shared.end_s, alone.end_s, rtol=1e-6)


def prompts(arrivals: list[float], outputs: int = 2) -> Trace:
    count = len(arrivals)
    return Trace(
        name="test",
        arrival_s=np.array(arrivals),
        prompt_tokens=np.full(count, 2049, dtype=np.int64),
        output_tokens=np.full(count, outputs, dtype=np.int64),
        block_tokens=64,
    )


def near_fleet() -> Fleet:
    """Its link holds nobody up."""
    link = LinkConfig(between=("pd", "far"), capacity=Rate.parse("100Gbit"), rtt=Seconds(0.001))
    return msgspec.structs.replace(fleet(), links={"wan": link})


def ttft_s(requests: Trace, described: Fleet, sites: list[str]) -> list[float]:
    pairs = {str(i): ("decode-0", site) for i, site in enumerate(sites)}
    result: RunResult = simulate(requests, described, RecordedPolicy(pairs))
    return [float(x) for x in result.ttft_s]


def test_a_prompt_beside_another_takes_longer_and_so_does_the_other() -> None:
    both, sites = prompts([0.0, 0.0]), ["prefill", "remote"]
    alone_s = ttft_s(both, near_fleet(), sites)
    slowed_s = ttft_s(both, on_one_machine(near_fleet(), beside_prefill=0.5), sites)
    # `remote` is twice as fast: all its chunks have company, and half of the other's.
    chunks, fast_s, slow_s = 4, 0.005 + 512e-4, 0.01 + 1024e-4
    context_s = 1e-8 * 2048**2 / 2
    step_s = 0.02 + 0.002 + 2049e-6  # its first token is decoded while the slow one is still computed
    assert slowed_s[1] - alone_s[1] == pytest.approx(0.5 * (chunks * fast_s + context_s + step_s), rel=0.02)
    # The slow one's second, or third, chunk may begin right before the fast one ends.
    company = (slowed_s[0] - alone_s[0]) / (0.5 * slow_s)
    assert 2 <= round(company, 1) <= 3.2


def test_decodes_beside_a_prompt_count_for_what_was_said() -> None:
    # A long answer is being written while one prompt, prefilled elsewhere, is computed.
    requests = prompts([0.0, 2.0], outputs=400)
    described = on_one_machine(near_fleet(), beside_decode=1.0)
    alone_s = ttft_s(requests, near_fleet(), ["remote", "remote"])
    slowed_s = ttft_s(requests, described, ["remote", "remote"])
    assert slowed_s[0] == pytest.approx(alone_s[0], rel=1e-6)
    whole_s = 4 * 0.005 + 2048e-4 + 1e-8 * 2048**2 / 2
    assert slowed_s[1] - alone_s[1] == pytest.approx(whole_s, rel=0.2)


def test_a_worker_that_is_gone_slows_nobody() -> None:
    machine = Machine(MachineSpec(beside_prefill=1.0), {})
    machine.names += ["a", "b"]
    assert machine.slowdown("a") == 1.0


def test_a_slowed_step_scales_everything_and_holds_for_itself_only() -> None:
    alone = LinearStepTimes(StepProfile(512, 0.01, 1e-4, 1e-8, 0.02, 0.002, 1e-6), 0.5)
    slowed = SharedStepTimes(alone, lambda: 1.5)
    line, its_line = slowed.decode_line(3, 1000.0), alone.decode_line(3, 1000.0)
    assert line.base_s == pytest.approx(1.5 * its_line.base_s)
    assert line.slope_s == pytest.approx(1.5 * its_line.slope_s)
    assert line.until_context == 1000.0
    assert slowed.prefill_s(600, 100) == pytest.approx(1.5 * alone.prefill_s(600, 100))
    assert slowed.chunk_s(60, 100) == pytest.approx(1.5 * alone.chunk_s(60, 100))
    assert slowed.shared_base_s() == pytest.approx(1.5 * alone.shared_base_s())
    # Seconds per request are no steps, and the router knows nothing of machines.
    assert slowed.request_overhead_s == 0.5
    assert slowed.router_profile() == alone.router_profile()

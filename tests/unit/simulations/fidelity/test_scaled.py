"""A fleet that is slowed down keeps its ratios, and live and simulated it is the same one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_recordings import fleet, trace

from policies.cost_model import CostModel
from prfaas.config_load import dump, loads
from prfaas.engine.paced import scaled_profile
from simulations.engine.run import simulate
from simulations.fidelity.compare import Outcomes, errors_by_request, relative_errors
from simulations.fidelity.scaled import KV_BYTES_PER_TOKEN, Scale, live_config, scaled_fleet
from simulations.fleet_load import dump_fleet, load_fleet, loads_fleet
from simulations.hardware.profiles import hardware_of, step_times

SHIPPED = Path(__file__).resolve().parents[4] / "simulations/fidelity/paced.yaml"


@given(st.floats(1.0, 50.0))
@settings(max_examples=20, deadline=None)
def test_ratios_of_compute_and_link_stay(factor: float) -> None:
    true, slow = fleet(), scaled_fleet(fleet(), Scale(factor))
    for cluster, other in zip(true.clusters.values(), slow.clusters.values(), strict=True):
        for workers, slowed in zip(cluster.workers.values(), other.workers.values(), strict=True):
            before = step_times(hardware_of(true, workers), "a").prefill_s(700, 128)
            after = step_times(hardware_of(slow, slowed), "b").prefill_s(700, 128)
            assert after == pytest.approx(factor * before)
            kv_before = 700 * true.model.kv_bytes_per_token / true.links["wan"].capacity
            kv_after = 700 * KV_BYTES_PER_TOKEN / slow.links["wan"].capacity
            assert kv_after / after == pytest.approx(kv_before / before)
    assert slow.links["wan"].rtt == pytest.approx(factor * true.links["wan"].rtt)


def test_live_and_simulated_fleet_have_the_same_workers_and_step_times() -> None:
    true, scale = load_fleet(SHIPPED), Scale(7.0)
    config, slow = live_config(true, scale, "model"), scaled_fleet(true, scale)
    result = simulate(trace(5), msgspec.structs.replace(slow, page_size=64), CostModel())
    live = [name for cluster in config.clusters.values() for name in cluster.workers]
    assert sorted(result.workers) == sorted(live)
    assert len(live) == 16
    worker = config.worker("remote-3")[1]
    hardware = slow.hardware["h200x4"]
    expected = step_times(hardware, "h200x4").router_profile()
    found = scaled_profile(worker.paced, worker.chunk_tokens)
    assert msgspec.structs.astuple(found) == pytest.approx(msgspec.structs.astuple(expected))
    assert worker.memory == hardware.kv_tokens * KV_BYTES_PER_TOKEN
    assert config.links["wan"].emulate
    assert config.links["wan"].capacity == slow.links["wan"].capacity


def test_both_can_be_written_and_read() -> None:
    scale = Scale(3.0)
    slow, config = scaled_fleet(fleet(), scale), live_config(fleet(), scale, "model")
    assert loads_fleet(dump_fleet(slow)) == slow
    assert loads(dump(config), {}) == config


def test_measures_by_hand() -> None:
    outcomes = Outcomes(
        arrival_s=np.array([0.0, 1.0, 2.0]),
        ttft_s=np.array([1.0, 3.0, np.nan]),
        tpot_s=np.array([0.5, np.nan, np.nan]),
        end_s=np.array([4.0, 8.0, np.nan]),
        output_tokens=np.array([10, 1, 0]),
    )
    found = outcomes.measures()
    assert (found["served"], found["ttft_p50_s"], found["tpot_p90_s"]) == (2.0, 2.0, 0.5)
    # Two requests and eleven tokens in the eight seconds from the first arrival to the last end.
    assert (found["requests_per_s"], found["output_tokens_per_s"]) == (0.25, 1.375)
    assert relative_errors({"a": 2.0, "b": 0.0, "c": 1.0}, {"a": 1.5, "b": 1.0}) == {"a": -0.25}
    assert errors_by_request(np.array([1.0, 2.0, np.nan]), np.array([1.5, np.nan, 1.0])).tolist() == [0.5]

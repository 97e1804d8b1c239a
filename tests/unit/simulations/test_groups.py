"""Dimensionless groups: equal for set-ups of any size in the same regime."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulations.fleet import ModelSpec
from simulations.groups import Traffic, groups, link_for_offered, mean_kv_bytes, offered_kv_over_link
from simulations.workload.trace import Trace

TRAFFIC = Traffic(
    rate_per_s=2.0, kv_bytes_all=50e6, remote_share=0.25, kv_bytes_remote=100e6, prefill_s_remote=0.5
)


def test_groups_worked_out_by_hand() -> None:
    """2 requests/s of 50 MB on 200 MB/s; a quarter remote, 100 MB in 0.5 s each."""
    found = groups(TRAFFIC, link_bytes_per_s=200e6, rtt_s=0.05, utilisation={"decode": 0.7})
    assert found.offered_kv_over_link == pytest.approx(0.5)
    assert found.kv_over_link == pytest.approx(0.25)
    assert found.rtt_over_prefill == pytest.approx(0.1)
    assert found.instance_kv_over_link == pytest.approx(1.0)
    assert found.utilisation == {"decode": 0.7}


@settings(deadline=None)
@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_other_units_of_time_and_size_change_no_group(time: float, size: float) -> None:
    scaled = Traffic(2.0 / time, 50e6 * size, 0.25, 100e6 * size, 0.5 * time)
    here = groups(TRAFFIC, 200e6, 0.05, {})
    there = groups(scaled, 200e6 * size / time, 0.05 * time, {})
    for name in ("offered_kv_over_link", "kv_over_link", "rtt_over_prefill", "instance_kv_over_link"):
        assert getattr(there, name) == pytest.approx(getattr(here, name))


@settings(deadline=None)
@given(st.floats(0.01, 100), st.floats(0.01, 100), st.floats(1, 1e10))
def test_link_for_a_wanted_group_has_that_group(group: float, rate: float, kv_bytes: float) -> None:
    assert offered_kv_over_link(rate, kv_bytes, link_for_offered(group, rate, kv_bytes)) == pytest.approx(
        group
    )


def test_without_remote_prefill_its_groups_are_absent() -> None:
    alone = Traffic(2.0, 50e6, 0.0, float("nan"), float("nan"))
    found = groups(alone, 200e6, 0.05, {}).as_dict()
    assert found["kv_over_link"] == 0.0
    assert found["rtt_over_prefill"] is None
    json.dumps(found, allow_nan=False)


def test_kv_of_a_trace_counts_all_but_the_last_token_and_the_fixed_state() -> None:
    trace = Trace("t", np.zeros(2), np.array([101, 301]), np.array([1, 1]))
    model = ModelSpec(name="m", layers=1, kv_bytes_per_token=10, state_bytes=7)
    assert mean_kv_bytes(trace, model) == pytest.approx(200 * 10 + 7)

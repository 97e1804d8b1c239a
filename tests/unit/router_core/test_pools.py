"""The delay that a placement imposes on later arrivals, by pools of servers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.types import Floats
from router.core.pools import close, imposed_s

HORIZON_S = 30.0


def pool(rate: float, load: float, wait_s: float, servers: int) -> Floats:
    made = np.array([rate, load, wait_s, float(servers), 0.0, 0.0])
    close(made)
    return made


def test_one_server_with_a_backlog_delays_those_who_come_until_it_has_drained() -> None:
    # 0.5 arrivals/s of 1 s each; 4 s of backlog drain in 8 s, while 4 come; each waits the 0.2 s longer, and
    # on top those within 0.2 / (1 - 0.5) s wait 0.1 s.
    assert imposed_s(0.2, pool(0.5, 0.5, 4.0, 1), HORIZON_S) == pytest.approx(0.5 * 0.2 * (4.0 + 0.1) / 0.5)


def test_a_pool_with_an_idle_server_and_little_load_makes_nobody_wait() -> None:
    assert imposed_s(5.0, pool(0.1, 0.1, 0.0, 4), HORIZON_S) < 0.001


def test_a_long_prompt_blocks_a_server_for_others_no_longer_than_their_mean_service_time() -> None:
    seen = pool(1.0, 0.5, 0.0, 2)
    assert imposed_s(20.0, seen, HORIZON_S) == pytest.approx(1.0 * 20.0 * (0.5 * 0.5) / 0.5)


def test_a_busy_period_counts_no_longer_than_the_horizon() -> None:
    assert imposed_s(1.0, pool(1.0, 0.8, 1000.0, 3), HORIZON_S) == pytest.approx(HORIZON_S)


@given(
    st.floats(0, 50), st.floats(0, 5), st.floats(0, 0.8), st.floats(0, 100), st.integers(1, 64),
    st.floats(0, 10),
)  # fmt: skip
def test_more_work_or_a_longer_wait_never_imposes_less(
    x_s: float, rate: float, load: float, wait_s: float, servers: int, more: float
) -> None:
    imposed = imposed_s(x_s, pool(rate, load, wait_s, servers), HORIZON_S)
    assert imposed >= 0
    assert imposed_s(x_s + more, pool(rate, load, wait_s, servers), HORIZON_S) >= imposed - 1e-9
    assert imposed_s(x_s, pool(rate, load, wait_s + more, servers), HORIZON_S) >= imposed - 1e-9

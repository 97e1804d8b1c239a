"""Runs that once had no end, or went wrong, as small as they could be made."""

from __future__ import annotations

import numpy as np
import pytest
from small_cases import Spread, small_fleet

from simulations.engine.run import simulate
from simulations.result import SERVED
from simulations.workload.trace import Trace

PAGE = 16


@pytest.mark.timeout(60)
@pytest.mark.parametrize("only", ["local", "elsewhere", ""])
@pytest.mark.parametrize("spare", [0, 1, 2])
def test_a_sequence_without_a_page_for_its_first_step_is_not_let_in_and_out_for_ever(
    only: str, spare: int
) -> None:
    """Prompts fill two pages each and decode's token needs a third. In a pool of five the younger of two has
    none for its first step: its pages are taken, found in the cache at once, and taken again."""
    requests = 6
    trace = Trace(
        name="full pages",
        arrival_s=np.arange(requests) * 1e-3,
        prompt_tokens=np.full(requests, 2 * PAGE + 1),
        output_tokens=np.full(requests, PAGE // 2),
        block_tokens=PAGE,
        blocks=np.arange(1, 2 * requests + 1 + requests),
        block_offsets=np.arange(requests + 1) * 3,
    )
    fleet = small_fleet(decode=1, prefill=1, kv_pages=4 + spare, page=PAGE)
    found = simulate(trace, fleet, Spread(1, only=only))
    assert (found.state == SERVED).all()

"""Answers are cached where they were written, under the ids that a later prompt knows them by."""

from __future__ import annotations

import numpy as np
from simulated_recordings import fleet

from simulations.engine.run import simulate
from simulations.fidelity.recorded_policy import RecordedPolicy
from simulations.workload.trace import Trace


def test_the_next_turn_finds_the_answer_cached_where_it_was_written_and_nowhere_else() -> None:
    first, answer = np.arange(1, 33), np.arange(33, 36)
    turn = np.concatenate([first, answer, [99]])
    requests = Trace(
        name="turns",
        arrival_s=np.array([0.0, 50.0, 100.0]),
        prompt_tokens=np.array([32 * 64 + 10, 36 * 64 + 10, 36 * 64 + 10]),
        output_tokens=np.array([3 * 64, 2, 2]),
        block_tokens=64,
        blocks=np.concatenate([first, turn, turn[:-1], [98]]),
        block_offsets=np.array([0, 32, 68, 104]),
        answers={0: answer},
    )
    places = {"0": ("decode-0", "prefill"), "1": ("decode-0", "prefill"), "2": ("decode-1", "prefill")}
    result = simulate(requests, fleet(), RecordedPolicy(places))
    # The decode worker wrote the answer; the prefill worker has the prompt, and then the whole turn.
    assert (result.decode_cached_tokens // 64).tolist() == [0, 35, 0]
    assert (result.site_cached_tokens // 64).tolist() == [0, 32, 35]

"""Pages of another size name the same prefixes, as far as the trace can tell."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.errors import ConfigError
from prfaas.kv.hashing import block_hashes
from simulations.workload.trace import Trace

PROMPTS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(2, 70)), min_size=1, max_size=12
)


def _trace(prompts: list[list[int]], block_tokens: int) -> Trace:
    hashes = [block_hashes(prompt, block_tokens) for prompt in prompts]
    ids = {value: index for index, value in enumerate(dict.fromkeys(h for row in hashes for h in row))}
    return Trace(
        name="t",
        arrival_s=np.arange(len(prompts), dtype=np.float64),
        prompt_tokens=np.array([len(prompt) for prompt in prompts]),
        output_tokens=np.ones(len(prompts), dtype=np.int64),
        block_tokens=block_tokens,
        blocks=np.array([ids[h] for row in hashes for h in row], dtype=np.int64),
        block_offsets=np.concatenate([[0], np.cumsum([len(row) for row in hashes])]).astype(np.int64),
    )


def _prompts(shapes: list[tuple[int, int, int]]) -> list[list[int]]:
    """Token ids that share beginnings: `a` for the first 24 tokens, `b` after them."""
    return [([100 + a] * 24 + [200 + b] * 70)[:length] for a, b, length in shapes]


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(first, second, strict=False)) if x != y),
        min(len(first), len(second)),
    )


@settings(max_examples=60, deadline=None)
@given(PROMPTS, st.sampled_from([2, 3]))
def test_larger_pages_share_exactly_what_hashing_at_that_size_shares(
    shapes: list[tuple[int, int, int]], times: int
) -> None:
    prompts = _prompts(shapes)
    coarse, direct = _trace(prompts, 8).repaged(8 * times), _trace(prompts, 8 * times)
    for i in range(len(prompts)):
        assert len(coarse.block_hashes(i)) == (len(prompts[i]) - 1) // (8 * times)
        for j in range(i):
            shared = _common(coarse.block_hashes(i), coarse.block_hashes(j))
            assert shared == _common(direct.block_hashes(i), direct.block_hashes(j))


@settings(max_examples=60, deadline=None)
@given(PROMPTS)
def test_smaller_pages_share_whole_blocks(shapes: list[tuple[int, int, int]]) -> None:
    prompts = _prompts(shapes)
    trace = _trace(prompts, 8)
    fine = trace.repaged(2)
    for i in range(len(prompts)):
        pages = fine.block_hashes(i)
        assert len(set(pages)) == len(pages)
        # Only full blocks have ids here, so pages of the last, partial block have none.
        assert len(pages) == min((len(prompts[i]) - 1) // 2, 4 * (len(prompts[i]) // 8))
        for j in range(i):
            blocks = _common(
                tuple(trace.blocks[trace.block_offsets[i] : trace.block_offsets[i + 1]].tolist()),
                tuple(trace.blocks[trace.block_offsets[j] : trace.block_offsets[j + 1]].tolist()),
            )
            assert _common(pages, fine.block_hashes(j)) == min(
                4 * blocks, len(pages), len(fine.block_hashes(j))
            )


def test_a_partial_last_block_has_pages_too_and_no_more_than_its_tokens() -> None:
    trace = Trace(
        name="t",
        arrival_s=np.zeros(1),
        prompt_tokens=np.array([700]),
        output_tokens=np.ones(1, dtype=np.int64),
        blocks=np.array([4, 9]),
        block_offsets=np.array([0, 2]),
    )
    assert len(trace.repaged(16).block_hashes(0)) == 699 // 16
    assert trace.repaged(512) is trace


def test_sizes_that_do_not_divide_are_refused_and_traces_without_blocks_take_any() -> None:
    trace = _trace([[1] * 40], 8)
    with pytest.raises(ConfigError, match="blocks of 8 tokens and the fleet pages of 12"):
        trace.repaged(12)
    empty = Trace("t", np.zeros(1), np.array([9]), np.array([1]))
    assert empty.repaged(12).block_hashes(0) == ()


def test_what_answers_fill_goes_with_its_request_and_is_unknown_at_other_sizes() -> None:
    trace = replace(_trace([[1] * 40, [2] * 40, [3] * 40], 8), answers={1: np.array([77, 78])})
    assert {row: answer.tolist() for row, answer in trace.part(1, 3).answers.items()} == {0: [77, 78]}
    assert not trace.part(2, 3).answers
    assert not trace.repaged(16).answers
    assert not trace.repaged(4).answers
    assert trace.repaged(8).answers

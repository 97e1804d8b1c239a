"""Generated workloads have the statistics that they were asked for, and the same bytes for the same seed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from prfaas.errors import ConfigError
from simulations.workload.load import load_trace
from simulations.workload.trace import Trace


def columns(trace: Trace) -> list[bytes]:
    return [
        getattr(trace, name).tobytes()
        for name in (
            "arrival_s",
            "prompt_tokens",
            "output_tokens",
            "blocks",
            "block_offsets",
            "session",
            "think_s",
        )
    ]


@pytest.mark.parametrize("family", ["lognormal", "burst", "prefix", "agentic"])
def test_the_same_seed_gives_the_same_bytes_and_columns_are_sound(family: str) -> None:
    trace = load_trace(f"generate:{family}?requests=700&rate=3&seed=5")
    assert columns(trace) == columns(load_trace(f"generate:{family}?requests=700&rate=3", seed=5))
    assert columns(trace) != columns(load_trace(f"generate:{family}?requests=700&rate=3&seed=6"))
    assert len(trace) == 700
    assert trace.arrival_s[0] == 0.0
    assert (np.diff(trace.arrival_s) >= 0).all()
    assert (trace.prompt_tokens >= 2).all()
    assert (trace.output_tokens >= 1).all()
    if len(trace.block_offsets) > 1:
        counts = np.diff(trace.block_offsets)
        assert (counts == trace.prompt_tokens // trace.block_tokens).all()


def test_the_case_studys_lengths() -> None:
    trace = load_trace("generate:lognormal?requests=200000&rate=2&seed=1")
    lengths = trace.prompt_tokens
    # Mean of the log-normal truncated to [128, 131072], by its closed form (published: about 27K).
    normal = lambda x: 0.5 * (1 + math.erf(x / math.sqrt(2)))  # noqa: E731
    low, high = (math.log(128) - 9.9), (math.log(131072) - 9.9)
    mean = math.exp(9.9 + 0.5) * (normal(high - 1) - normal(low - 1)) / (normal(high) - normal(low))
    assert lengths.mean() == pytest.approx(mean, rel=0.01)
    assert lengths.min() >= 128
    assert lengths.max() <= 131072
    assert (lengths > 19_400).mean() == pytest.approx(0.496, abs=0.005)  # the paper's offload share
    assert (trace.output_tokens == 1024).all()
    assert trace.rate_per_s == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_gaps_have_the_asked_variation(cv: float) -> None:
    trace = load_trace(f"generate:lognormal?requests=100000&rate=5&cv={cv}")
    gaps = np.diff(trace.arrival_s)
    assert gaps.mean() == pytest.approx(0.2, rel=0.04)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05, abs=1e-9)


def test_prefix_trees_share_paths_and_nothing_else() -> None:
    trace = load_trace("generate:prefix?requests=400&levels=3&fanout=4&level_tokens=1024&zipf=0&seed=2")
    rows = [
        trace.blocks[trace.block_offsets[i] : trace.block_offsets[i + 1]].tolist() for i in range(len(trace))
    ]
    assert len({tuple(row[:2]) for row in rows}) == 1
    assert len({tuple(row[:4]) for row in rows}) == 4
    assert len({tuple(row[:6]) for row in rows}) == 16
    tails = [block for row in rows for block in row[6:]]
    assert len(set(tails)) == len(tails)
    assert not set(tails) & {block for row in rows for block in row[:6]}
    parents: dict[int, int] = {}
    for row in rows:
        for parent, block in zip([-1, *row], row, strict=False):
            assert parents.setdefault(block, parent) == parent


def test_popularity_of_leaves_follows_zipf() -> None:
    trace = load_trace("generate:prefix?requests=50000&levels=2&fanout=10&level_tokens=512&zipf=1")
    leaves = trace.blocks[trace.block_offsets[:-1] + 1]
    shares = np.sort(np.unique(leaves, return_counts=True)[1])[::-1] / len(trace)
    expected = (1 / np.arange(1, 11)) / (1 / np.arange(1, 11)).sum()
    assert shares == pytest.approx(expected, rel=0.05)


def test_conversations_grow_by_their_answers_and_keep_their_blocks() -> None:
    trace = load_trace(
        "generate:agentic?requests=3000&rate=2&turns=6&prefix_tokens=2048&max_tokens=40000&seed=3"
    )
    assert trace.prompt_tokens.max() <= 40_000
    grown = 0
    for session in np.unique(trace.session):
        rows = np.flatnonzero(trace.session == session)
        hashes = [trace.block_hashes(int(row)) for row in rows]
        assert len({row[:3] for row in hashes if len(row) >= 3}) <= 1
        for before, after, former, later in zip(hashes, hashes[1:], rows, rows[1:], strict=False):
            assert after[: len(before)] == before
            assert trace.prompt_tokens[later] > trace.prompt_tokens[former] + trace.output_tokens[former]
            assert trace.arrival_s[later] >= trace.arrival_s[former] + trace.think_s[later]
            grown += 1
        assert trace.think_s[rows[0]] == 0.0
    assert grown > 1500
    others = [trace.block_hashes(int(np.flatnonzero(trace.session == s)[0]))[4:] for s in range(5)]
    assert len({block for row in others for block in row}) == sum(map(len, others))
    assert trace.think_s[trace.think_s > 0].mean() == pytest.approx(5.0, rel=0.1)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("generate:lognormel", "did you mean `lognormal`"),
        ("generate:lognormal?requests=0", "`requests` must be 1"),
        ("generate:lognormal?rate=-1", "`rate`"),
        ("generate:lognormal?rate=fast", "`rate`"),
        ("generate:lognormal?rate=.nan", "`rate`"),
        ("generate:lognormal?request=5", "did you mean `requests`"),
        ("generate:lognormal?min_tokens=500&max_tokens=400", "`min_tokens` is above"),
        ("generate:lognormal?mu=1&min_tokens=100000", "under 1 %"),
        ("generate:prefix?level_tokens=700", "multiple of `block_tokens`"),
        ("generate:prefix?levels=9&fanout=100", "leaves"),
        ("generate:agentic?prefix_tokens=8192&max_tokens=8000", "no room"),
        ("generate:agentic?requests=1&requests=2", "given once"),
    ],
)
def test_bad_options_are_refused(spec: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_trace(spec)

"""The recorded traces read as their description says (skipped without the data folder)."""

from __future__ import annotations

import numpy as np
import pytest
from simulation_data import data_path, needs_data

from simulations.workload.load import load_trace
from simulations.workload.trace import Trace

pytestmark = needs_data


def hit_share(trace: Trace) -> float:
    """Share of input tokens in the longest already seen run of leading blocks, infinite cache."""
    seen: set[int] = set()
    found = 0
    for row in range(len(trace)):
        blocks = trace.blocks[trace.block_offsets[row] : trace.block_offsets[row + 1]].tolist()
        length = next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
        seen.update(blocks)
        found += min(length * trace.block_tokens, int(trace.prompt_tokens[row]))
    return found / float(trace.prompt_tokens.sum())


def test_mooncake_conversation() -> None:
    trace = load_trace(data_path("traces/mooncake_conversation.jsonl.gz"))
    assert len(trace) == 12_031
    assert trace.duration_s == pytest.approx(3537, abs=6)
    assert np.percentile(trace.prompt_tokens, [50, 90, 99]) == pytest.approx([6909, 27_367, 85_401], rel=1e-3)
    assert hit_share(trace) == pytest.approx(0.374, abs=0.001)
    # Spread inside ticks of 3 s: no burst of 28 any more.
    assert np.bincount((trace.arrival_s * 10).astype(int)).max() < 12
    assert hit_share(trace.repaged(1024)) <= 0.374


def test_agent_conversations() -> None:
    trace = load_trace(data_path("traces/claude_code_200_conversations.jsonl.gz"))
    assert len(trace) == 7295
    assert trace.duration_s == pytest.approx(5682, abs=1)
    assert hit_share(trace) == pytest.approx(0.958, abs=0.001)
    assert len(np.unique(trace.session)) == 181


def test_azure_code() -> None:
    trace = load_trace(data_path("traces/azure_code_2023.csv.gz"))
    assert len(trace) == 8819
    assert np.percentile(trace.output_tokens, [50, 90, 99]) == pytest.approx([13, 55, 252], abs=1)
    gaps = np.diff(trace.arrival_s)
    assert gaps.std() / gaps.mean() == pytest.approx(13, abs=1)


@pytest.mark.parametrize(("part", "requests", "hit"), [("miniswe", 402, 0.93), ("magagent", 693, 0.83)])
def test_agent_text(part: str, requests: int, hit: float) -> None:
    trace = load_trace(f"{data_path('traces/lmcache_agent_text.tar.zst')}?select={part}")
    assert len(trace) == requests  # 53 of magagent's 746 have no input
    assert hit_share(trace) == pytest.approx(hit, abs=0.02)


def test_servegen_rates() -> None:
    trace = load_trace(f"{data_path('traces/servegen_deepseek_r1.tar.zst')}?start_s=0&duration_s=3600")
    assert 5 < trace.rate_per_s < 45
    assert np.percentile(trace.output_tokens, 50) > 300

"""Paged attention equals plain causal attention over the same keys and values, page for page."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from prfaas.engine.attention import TorchAttention
from prfaas.engine.step import SequenceStep

PAGE_SIZE, NUM_PAGES, KV_HEADS, HEADS, HEAD_DIM = 4, 64, 2, 6, 8
Lengths = list[tuple[int, int]]


def make_pool(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    # NaN everywhere: a slot that is read before it was written shows at once.
    return torch.full((2, NUM_PAGES, 2, KV_HEADS, PAGE_SIZE, HEAD_DIM), float("nan"), dtype=dtype)


def step(start: int, count: int, pages: list[int]) -> SequenceStep:
    return SequenceStep(token_ids=[0] * count, start=start, page_ids=pages, sampling=None)


def naive(q: torch.Tensor, kv: torch.Tensor, start: int) -> torch.Tensor:
    """q [T, heads, dim] at positions start …; kv [start + T, 2, kv_heads, dim]."""
    k, v = (kv[:, which].repeat_interleave(HEADS // KV_HEADS, dim=1).transpose(0, 1) for which in (0, 1))
    scores = q.transpose(0, 1) @ k.transpose(1, 2) / HEAD_DIM**0.5
    hidden = torch.ones(len(q), len(kv), dtype=torch.bool).triu(start + 1)
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 21), st.integers(1, 9)), min_size=1, max_size=6),
    layer=st.integers(0, 1),
    seed=st.integers(0, 2**16),
)
def test_any_mix_of_chunks_and_decodes_equals_naive_attention(
    lengths: Lengths, layer: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    free = torch.randperm(NUM_PAGES, generator=generator).tolist()
    pool = make_pool()
    attention = TorchAttention(pool, HEADS)
    kvs = [torch.randn(start + count, 2, KV_HEADS, HEAD_DIM, generator=generator) for start, count in lengths]
    tables = [[free.pop() for _ in range(-(-len(kv) // PAGE_SIZE))] for kv in kvs]
    for (start, _), kv, pages in zip(lengths, kvs, tables, strict=True):
        if start:
            attention.begin([step(0, start, pages)])
            attention.write(layer, kv[:start])
    queries = [torch.randn(count, HEADS, HEAD_DIM, generator=generator) for _, count in lengths]

    attention.begin(
        [step(start, count, pages) for (start, count), pages in zip(lengths, tables, strict=True)]
    )
    attention.write(layer, torch.cat([kv[start:] for (start, _), kv in zip(lengths, kvs, strict=True)]))
    attended = attention.attend(layer, torch.cat(queries))

    expected = [naive(q, kv, start) for q, kv, (start, _) in zip(queries, kvs, lengths, strict=True)]
    torch.testing.assert_close(attended, torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_write_touches_only_the_new_tokens_slots_of_its_layer() -> None:
    pool = make_pool()
    attention = TorchAttention(pool, HEADS)
    kv = torch.randn(3, 2, KV_HEADS, HEAD_DIM)
    attention.begin([step(3, 3, [7, 2])])
    attention.write(1, kv)
    written = pool.isfinite()
    assert written.sum() == kv.numel()
    # Position 3 is the last slot of page 7; 4 and 5 are the first two of page 2.
    torch.testing.assert_close(pool[1, 7, :, :, 3], kv[0])
    torch.testing.assert_close(pool[1, 2, :, :, :2], kv[1:].permute(1, 2, 0, 3))


def test_stale_values_after_a_sequences_end_are_never_attended() -> None:
    pool = make_pool()
    pool.fill_(1e30)
    attention = TorchAttention(pool, HEADS)
    kv = torch.randn(6, 2, KV_HEADS, HEAD_DIM)
    attention.begin([step(0, 6, [3, 9])])
    attention.write(0, kv)
    q = torch.randn(1, HEADS, HEAD_DIM)
    attention.begin([step(5, 1, [3, 9, 11])])  # page 11 is held in advance
    torch.testing.assert_close(attention.attend(0, q), naive(q, kv, 5), rtol=1e-4, atol=1e-5)


def test_not_a_number_after_a_sequences_end_does_not_leak_into_a_decode() -> None:
    pool = make_pool()
    attention = TorchAttention(pool, HEADS)
    kv = torch.randn(2, 2, KV_HEADS, HEAD_DIM)
    attention.begin([step(0, 2, [5])])
    attention.write(0, kv)
    q = torch.randn(1, HEADS, HEAD_DIM)
    attention.begin([step(1, 1, [5])])
    torch.testing.assert_close(attention.attend(0, q), naive(q, kv, 1), rtol=1e-4, atol=1e-5)


def test_large_scores_do_not_overflow() -> None:
    pool = make_pool()
    attention = TorchAttention(pool, HEADS)
    kv = torch.randn(9, 2, KV_HEADS, HEAD_DIM) * 100
    attention.begin([step(0, 9, [1, 2, 3])])
    attention.write(0, kv)
    q = torch.randn(1, HEADS, HEAD_DIM) * 100
    attention.begin([step(8, 1, [1, 2, 3])])
    torch.testing.assert_close(attention.attend(0, q), naive(q, kv, 8), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_pools_give_half_precision_results(dtype: torch.dtype) -> None:
    pool = make_pool(dtype)
    attention = TorchAttention(pool, HEADS)
    kv = torch.randn(10, 2, KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
    attention.begin([step(0, 10, [4, 8, 6])])
    attention.write(0, kv)
    q = torch.randn(1, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(2)).to(dtype)
    attention.begin([step(9, 1, [4, 8, 6])])
    attended = attention.attend(0, q)
    assert attended.dtype == dtype
    torch.testing.assert_close(attended.float(), naive(q.float(), kv.float(), 9), rtol=0.05, atol=0.02)


def test_the_naive_reference_agrees_with_torch() -> None:
    kv, q = torch.randn(5, 2, KV_HEADS, HEAD_DIM), torch.randn(5, HEADS, HEAD_DIM)
    k, v = (kv[:, which].transpose(0, 1).unsqueeze(0) for which in (0, 1))
    theirs = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0), k, v, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(naive(q, kv, 0), theirs[0].transpose(0, 1), rtol=1e-4, atol=1e-5)

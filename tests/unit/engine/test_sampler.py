"""Sampling: greedy, filters, draws that depend on (seed, position) alone, and honest log-probabilities."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.engine.sampler import probabilities, sample, uniform
from prfaas.protocol.messages import Sampling


def make_logits(rows: int = 1, vocabulary: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def drawn(logits: torch.Tensor, count: int, **how: float) -> Counter[int]:
    sampling = Sampling(max_tokens=1, seed=5, **{"temperature": 1.0, **how})  # type: ignore[arg-type]
    tokens, _ = sample(logits.expand(count, -1), [sampling] * count, list(range(count)))
    return Counter(tokens)


def test_temperature_zero_takes_the_likeliest_token_of_each_row() -> None:
    logits = make_logits(rows=4)
    tokens, logprobs = sample(logits, [Sampling(max_tokens=1)] * 4, [0] * 4)
    assert tokens == logits.argmax(-1).tolist()
    assert logprobs == [None] * 4


def test_nothing_to_sample_gives_nothing() -> None:
    assert sample(torch.empty(0, 50), [], []) == ([], [])


def test_draws_follow_the_softmax_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    counts = drawn(logits, 4000)
    for token, probability in enumerate(logits[0].softmax(-1).tolist()):
        assert counts[token] / 4000 == pytest.approx(probability, abs=0.03)


def test_a_draw_depends_on_seed_and_position_but_not_on_the_batch() -> None:
    logits = make_logits(rows=8)
    how = [Sampling(max_tokens=1, temperature=1.2, top_p=0.9, seed=seed) for seed in range(8)]
    together, _ = sample(logits, how, list(range(10, 18)))
    alone = [sample(logits[i : i + 1], [how[i]], [10 + i])[0][0] for i in range(8)]
    assert together == alone
    assert len({uniform(seed, position) for seed in range(30) for position in range(30)}) == 900


@pytest.mark.parametrize("seed", [-1, 2**63 - 1, -(2**63)])
def test_any_64_bit_seed_gives_a_uniform_number(seed: int) -> None:
    assert all(0.0 <= uniform(seed, position) < 1.0 for position in range(100))


def test_top_k_keeps_the_k_likeliest() -> None:
    logits = make_logits()
    assert set(drawn(logits, 500, temperature=5.0, top_k=3)) == set(logits[0].topk(3).indices.tolist())


def test_top_k_beyond_the_vocabulary_keeps_everything() -> None:
    logits = make_logits(vocabulary=5)
    assert len(drawn(logits, 800, temperature=20.0, top_k=100)) == 5


def test_top_k_one_is_greedy_at_any_temperature() -> None:
    logits = make_logits()
    assert set(drawn(logits, 50, temperature=50.0, top_k=1)) == {int(logits.argmax())}


def test_min_p_keeps_tokens_at_least_that_fraction_as_likely_as_the_likeliest() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.04, 0.01]]))
    assert set(drawn(logits, 500, min_p=0.25)) == {0, 1, 2}


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, {0}), (0.51, {0, 1}), (0.8, {0, 1}), (0.96, {0, 1, 2, 3})])
def test_top_p_keeps_the_smallest_set_that_holds_the_mass(top_p: float, kept: set[int]) -> None:
    logits = torch.log(torch.tensor([0.5, 0.31, 0.14, 0.04, 0.01]))
    weights = probabilities(logits, Sampling(max_tokens=1, temperature=1.0, top_p=top_p))
    assert set(weights.nonzero().flatten().tolist()) == kept


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**16), st.floats(0.01, 0.999), st.floats(0.1, 5.0), st.integers(0, 3000))
def test_top_p_equals_a_full_sort_also_when_the_likeliest_thousand_do_not_suffice(
    seed: int, top_p: float, temperature: float, top_k: int
) -> None:
    logits = make_logits(vocabulary=3000, seed=seed)[0]
    how = Sampling(max_tokens=1, temperature=temperature, top_p=top_p, top_k=top_k)
    expected = (logits.double() / temperature).softmax(-1)
    if 0 < top_k < 3000:
        expected = expected.where(expected >= expected.topk(top_k).values[-1], 0)
        expected /= expected.sum()
    order = expected.argsort(descending=True)
    before = expected[order].cumsum(0) - expected[order]
    sure = set(order[before < top_p - 1e-9].tolist())
    perhaps = set(order[before < top_p + 1e-9].tolist())
    kept = set(probabilities(logits, how).nonzero().flatten().tolist())
    assert sure <= kept <= perhaps


def test_logprobs_are_those_of_the_raw_logits_whatever_the_temperature() -> None:
    logits = make_logits()
    how = Sampling(max_tokens=1, temperature=0.3, top_k=5, seed=3, logprobs=4)
    (token,), (logprobs,) = sample(logits, [how], [0])
    expected = logits[0].log_softmax(-1)
    assert logprobs is not None
    assert logprobs.logprob == pytest.approx(float(expected[token]))
    assert [token_id for token_id, _ in logprobs.top] == expected.topk(4).indices.tolist()
    assert [value for _, value in logprobs.top] == pytest.approx(expected.topk(4).values.tolist())
    assert math.fsum(math.exp(value) for _, value in logprobs.top) < 1


def test_logprobs_zero_gives_the_chosen_token_alone() -> None:
    _, (logprobs,) = sample(make_logits(), [Sampling(max_tokens=1, logprobs=0)], [0])
    assert logprobs is not None
    assert logprobs.top == ()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_broken_logits_are_an_error_that_names_the_row(poison: float) -> None:
    logits = make_logits(rows=3)
    logits[1, 7] = poison
    with pytest.raises(ArithmeticError, match=r"rows \[1\]"):
        sample(logits, [Sampling(max_tokens=1)] * 3, [0] * 3)

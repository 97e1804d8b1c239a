"""Choose tokens from logits. Stateless: a draw depends on (seed, position) alone, never on the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from prfaas.protocol.messages import Sampling, TokenLogprobs

_LIKELY_TOKENS = 1024
"""Top-p is tried on this many of the likeliest tokens before the whole vocabulary is sorted."""


def sample(
    logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """One token per row.

    Args:
        logits: float32 [S, vocabulary].
        samplings: how to choose, one per row.
        positions: position that the new token will take in its sequence, one per row.

    Returns:
        Token ids, and log-probabilities where asked for: natural logarithms of the model's own
        distribution, before temperature and filters (as OpenAI and vLLM define them).

    Raises:
        ArithmeticError: a row has no finite maximum (NaN or infinite logits).
    """
    if not samplings:
        return [], []
    peaks, greedy = logits.max(dim=-1)
    broken = [row for row, fine in enumerate(peaks.isfinite().tolist()) if not fine]
    if broken:
        raise ArithmeticError(f"logits of rows {broken} (of {len(samplings)}) are NaN or infinite")
    token_ids = greedy.tolist()
    for row, (sampling, position) in enumerate(zip(samplings, positions, strict=True)):
        if sampling.temperature > 0:
            token_ids[row] = _draw(logits[row], sampling, position)
    logprobs = [_logprobs(logits[row], token_ids[row], how.logprobs) for row, how in enumerate(samplings)]
    return token_ids, logprobs


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) alone: 53 bits of their XXH3-64."""
    return (xxhash.xxh3_64_intdigest(f"{seed}:{position}".encode()) >> 11) / 2.0**53


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Distribution that a row is drawn from, float64 [vocabulary], not normalised.

    Temperature, then min-p, top-k and top-p in vLLM's order. A filter keeps every token as likely as the
    least likely one it must keep.
    """
    scaled = (logits.double() - logits.max()) / sampling.temperature
    weights = scaled.exp()
    if sampling.min_p > 0:  # the likeliest token has weight 1
        weights = weights.where(weights >= sampling.min_p, 0.0)
    if 0 < sampling.top_k < len(weights):
        weights = weights.where(weights >= weights.topk(sampling.top_k).values[-1], 0.0)
    if sampling.top_p < 1.0:
        weights = weights.where(weights >= _nucleus_floor(weights, sampling.top_p), 0.0)
    return weights


def _draw(logits: torch.Tensor, sampling: Sampling, position: int) -> int:
    cumulative = probabilities(logits, sampling).cumsum(0)
    target = uniform(sampling.seed, position) * cumulative[-1]
    # The first token whose cumulative weight exceeds the target; weightless tokens are never it.
    return int(torch.searchsorted(cumulative, target, right=True))


def _nucleus_floor(weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """Weight of the last token in the smallest set of likeliest tokens that holds `top_p` of the mass."""
    enough = weights.sum() * top_p
    for count in (min(_LIKELY_TOKENS, len(weights)), len(weights)):
        likeliest = weights.topk(count).values
        cumulative = likeliest.cumsum(0)
        if cumulative[-1] >= enough:
            break
    last = int(torch.searchsorted(cumulative, enough))
    return likeliest[min(last, count - 1)]


def _logprobs(logits: torch.Tensor, token_id: int, count: int) -> TokenLogprobs | None:
    if count < 0:
        return None
    all_logprobs = logits.log_softmax(dim=-1)
    values, ids = all_logprobs.topk(min(count, len(logits)))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(logprob=float(all_logprobs[token_id]), top=top)

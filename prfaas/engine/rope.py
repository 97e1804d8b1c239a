"""Rotary position embedding: frequencies (with the Llama 3 stretch) and their application in place."""

from __future__ import annotations

import math

import torch

from prfaas.engine.model_config import LlamaConfig, RopeScaling


def inverse_frequencies(config: LlamaConfig) -> torch.Tensor:
    """Radians per position of each pair of dimensions, shape [head_dim / 2], float32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    match config.rope_scaling.kind:
        case "linear":
            return frequencies / config.rope_scaling.factor
        case "llama3":
            return _llama3(frequencies, config.rope_scaling)
        case _:
            return frequencies


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Slow rotations are slowed by `factor`, fast ones kept, those between blended (Llama 3.1 report, HF)."""
    turns = scaling.original_context * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return frequencies * (keep + (1 - keep) / scaling.factor)


class Rope:
    """Cosines and sines of every position up to the context length."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype) -> None:
        positions = torch.arange(config.context_length, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(config))
        sin = angles.sin()
        # [context, 1, head_dim]; the minus of "rotate half" (-x2, x1) sits in the first half of the sines.
        self._cos = torch.cat((angles.cos(), angles.cos()), dim=-1).to(dtype).unsqueeze(1)
        self._signed_sin = torch.cat((-sin, sin), dim=-1).to(dtype).unsqueeze(1)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, signed sin) rows of `positions` [T], each [T, 1, head_dim]."""
        return self._cos[positions], self._signed_sin[positions]


def rotate_(heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> None:
    """Rotate `heads` [T, heads, head_dim] in place: x·cos + rotate_half(x)·sin."""
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    heads.mul_(cos).addcmul_(swapped, signed_sin)

"""Matrix times weights, in the layout that the CPU likes best."""

from __future__ import annotations

from typing import cast

import torch
from torch.nn import functional as F


class Linear:
    """y = x·Wᵀ + b for a weight [out, in] that never changes.

    On a CPU in float32 the weight is packed once into oneDNN's blocked layout, for two reasons. A row's
    result is then the same, bit for bit, whatever rows stand beside it, so that batching does not change a
    greedy answer. And torch's default packs anew in every call with more than one row: over all of
    SmolLM2's products 8 rows take 120 against 180 ms on one busy thread. The price: one row on one
    thread takes 78 against 62 ms; with two threads packed weights win there too.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias
        self._packed = weight.device.type == "cpu" and weight.dtype == torch.float32 and _can_pack()
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [T, in] → [T, out]."""
        if self._packed:
            packed = torch.ops.mkldnn._linear_pointwise
            return cast("torch.Tensor", packed(x, self._weight, self._bias, "none", [], ""))
        return F.linear(x, self._weight, self._bias)


def _can_pack() -> bool:
    return torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")

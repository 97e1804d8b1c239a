"""The engine that the fleet's answers are compared with: one instance, every core, no disaggregation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prfaas.engine.model_config import LlamaConfig
from prfaas.engine.native import NativeEngine
from prfaas.kv.layout import KVLayout

_POOL_BYTES = 2 * 2**30
_PAGE_TOKENS = 32
_DTYPE = "float32"
"""Rounding in narrower types changes greedy answers; parity needs this one."""


def reference_engine(model: Path, cores: Sequence[int], log_path: Path) -> NativeEngine:
    """An engine for `check_parity`; the caller starts and stops it."""
    layout = KVLayout.fit(LlamaConfig.load(model).cache_groups, _PAGE_TOKENS, _DTYPE, _POOL_BYTES)
    return NativeEngine(
        model, layout, dtype=_DTYPE, threads=len(cores), cpus=list(cores), chunk_tokens=512, log_path=log_path
    )

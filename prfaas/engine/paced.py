"""The paced engine: everything of the native one but the arithmetic, which it sleeps through.

Batch scheduler, page pool, layer counter and shared memory are the native engine's; only the runner is
another one, and it needs no process of its own, no weights and no torch. So many workers fit one process, and
a small machine can carry a large fleet on a scaled clock.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from prfaas.config import PacedConfig
from prfaas.engine.fingerprint import tokenizer_fingerprint
from prfaas.engine.interface import StepProfile
from prfaas.engine.model_config import LlamaConfig
from prfaas.engine.native import NativeEngine, Runner
from prfaas.engine.paced_runner import PacedRunner
from prfaas.kv.layout import CompatRecord, KVLayout
from prfaas.protocol.messages import PROTOCOL_VERSION

WEIGHTS = "paced"
"""Stands for weights in compatibility records: real workers and paced ones must not exchange KV."""


class PacedEngine(NativeEngine):
    """An engine whose steps take as long as `profile` says.

    Args:
        model_path: folder with config.json and tokenizer.json; weights are not read.
        layout: the KV pool's shape.
        profile: step times in seconds of this process's clock (`scaled_profile`).
        max_running: most sequences decoded together.
    """

    def __init__(
        self, model_path: Path, layout: KVLayout, profile: StepProfile, *, max_running: int = 16
    ) -> None:
        super().__init__(
            model_path,
            layout,
            chunk_tokens=profile.chunk_tokens,
            max_running=max_running,
            log_path=Path(os.devnull),
        )
        self._profile = profile
        self._model = LlamaConfig.load(model_path)

    async def calibrate(self, contexts: Sequence[int], batches: Sequence[int]) -> StepProfile:
        """The profile itself: it is what the steps take."""
        return self._profile

    async def _start_runner(self) -> Runner:
        return PacedRunner(
            self.layout,
            self.buffer.array,
            self.layer_counter,
            self._profile,
            vocab_size=self._model.vocab_size,
            never=frozenset(self._model.eos_token_ids),
        )


def scaled_profile(paced: PacedConfig, chunk_tokens: int) -> StepProfile:
    """The configured step times in seconds of the wall clock."""
    scale = paced.time_scale
    return StepProfile(
        chunk_tokens=chunk_tokens,
        prefill_base_s=paced.prefill_base * scale,
        prefill_token_s=paced.prefill_token * scale,
        prefill_context_s=paced.prefill_context * scale,
        decode_base_s=paced.decode_base * scale,
        decode_sequence_s=paced.decode_sequence * scale,
        decode_context_s=paced.decode_context * scale,
    )


def paced_compat(model_path: Path, layout: KVLayout) -> CompatRecord:
    """What a paced worker demands of its peers: the same tokenizer and pages, and that they are paced too."""
    return CompatRecord(
        protocol=PROTOCOL_VERSION,
        weights=WEIGHTS,
        tokenizer=tokenizer_fingerprint(model_path),
        attention="gqa",
        page_layout="HND",
        page_size=layout.page_size,
        kv_dtype=layout.dtype,
        groups=layout.groups,
    )

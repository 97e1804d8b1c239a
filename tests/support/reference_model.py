"""The same model in `transformers`, as the judge of our logits, and a runner over a private pool."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from prfaas.engine.model_config import LlamaConfig
from prfaas.engine.runner import ModelRunner
from prfaas.engine.step import SequenceStep, StepPlan, StepResult
from prfaas.kv.layout import KVLayout
from prfaas.protocol.messages import Sampling

GREEDY = Sampling(max_tokens=1)


def reference_logits(model_path: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """float32 logits [len(token_ids), vocabulary] of `transformers`."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([list(token_ids)])).logits[0]


class Harness:
    """A `ModelRunner` that also keeps the logits of its last step."""

    def __init__(
        self,
        model_path: Path,
        *,
        dtype: str = "float32",
        page_size: int = 16,
        num_pages: int = 40,
        threads: int = 1,
        on_layer: Callable[[], None] = lambda: None,
    ) -> None:
        groups = LlamaConfig.load(model_path).cache_groups
        self.layout = KVLayout(groups=groups, page_size=page_size, dtype=dtype, num_pages=num_pages)
        self.pool = bytearray(self.layout.pool_bytes)
        self.runner = ModelRunner(
            model_path, self.layout, self.pool, device="cpu", dtype=dtype, threads=threads, on_layer=on_layer
        )
        self.logits = torch.empty(0)
        forward = self.runner._model.forward

        def keeping(*args: object) -> torch.Tensor:
            self.logits = forward(*args)  # type: ignore[arg-type]
            return self.logits

        self.runner._model.forward = keeping  # type: ignore[method-assign]

    def step(self, *sequences: SequenceStep) -> StepResult:
        return self.runner.execute(StepPlan(step=0, sequences=list(sequences)))


def part(
    token_ids: Sequence[int], start: int, page_ids: Sequence[int], sampling: Sampling | None = GREEDY
) -> SequenceStep:
    """A step of one sequence, sampled greedily unless told otherwise."""
    return SequenceStep(token_ids=list(token_ids), start=start, page_ids=list(page_ids), sampling=sampling)

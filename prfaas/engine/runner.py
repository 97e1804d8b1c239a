"""What a runner process does with a `StepPlan`: one forward pass, then sampling."""

from __future__ import annotations

import time
from collections.abc import Callable
from mmap import mmap
from pathlib import Path

import torch

from prfaas.engine.attention import TorchAttention
from prfaas.engine.llama import Llama, optional_parameters, parameter_shapes
from prfaas.engine.model_config import LlamaConfig
from prfaas.engine.sampler import sample
from prfaas.engine.step import SequenceStep, StepPlan, StepResult
from prfaas.engine.weights import load_weights
from prfaas.errors import ConfigError
from prfaas.kv.layout import KVLayout
from prfaas.protocol.messages import TokenLogprobs

Buffer = memoryview | bytearray | mmap
"""What can lie under a pool."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelRunner:
    """One rank's model over one KV pool. It keeps nothing per sequence between steps.

    Args:
        model_path: HF folder.
        layout: shape of the pool; must be of this model.
        pool: writable buffer of `layout.pool_bytes` bytes, shared with the control process.
        device: `cpu`; the pool lies in host memory.
        dtype: of weights, activations and KV; must be the layout's.
        threads: torch threads of this process.
        on_layer: called once per layer and step, as soon as that layer's new K and V are in the pool.

    Raises:
        ConfigError: a device, dtype or layout that does not fit, or an unusable model folder.
    """

    vocab_size: int

    def __init__(
        self,
        model_path: Path,
        layout: KVLayout,
        pool: Buffer,
        *,
        device: str,
        dtype: str,
        threads: int,
        on_layer: Callable[[], None],
    ) -> None:
        if device != "cpu":
            raise ConfigError(f"device {device!r}: the native engine runs on cpu, where its pool lies")
        torch.set_num_threads(threads)
        config = LlamaConfig.load(model_path)
        _check_layout(layout, config, dtype)
        weights = load_weights(
            model_path, parameter_shapes(config), optional_parameters(config), DTYPES[dtype]
        )
        with torch.inference_mode():
            self._model = Llama(config, weights)
            self._attention = TorchAttention(pool_tensor(pool, layout), config.num_heads)
        self._layout = layout
        self._context_length = config.context_length
        self._on_layer = on_layer
        self.vocab_size = config.vocab_size

    def execute(self, plan: StepPlan) -> StepResult:
        """Write K and V of every planned token and sample where asked.

        Raises:
            ValueError: the plan names tokens, positions or pages that do not exist; nothing was written.
            ArithmeticError: the model computed NaN.
        """
        began_s = time.perf_counter()
        for sequence in plan.sequences:
            self._check(sequence)
        token_ids, logprobs = self._run(plan.sequences) if plan.sequences else ([], [])
        return StepResult(
            step=plan.step, token_ids=token_ids, logprobs=logprobs, elapsed_s=time.perf_counter() - began_s
        )

    @torch.inference_mode()
    def _run(self, sequences: list[SequenceStep]) -> tuple[list[int], list[TokenLogprobs | None]]:
        token_ids = [token for sequence in sequences for token in sequence.token_ids]
        ranges = [range(sequence.start, sequence.start + len(sequence.token_ids)) for sequence in sequences]
        ends = torch.tensor([len(positions) for positions in ranges]).cumsum(0).tolist()
        sampled = [
            (end - 1, step.sampling, step) for end, step in zip(ends, sequences, strict=True) if step.sampling
        ]
        self._attention.begin(sequences)
        logits = self._model.forward(
            torch.tensor(token_ids),
            torch.tensor([position for positions in ranges for position in positions]),
            self._attention,
            torch.tensor([row for row, _, _ in sampled], dtype=torch.long),
            self._on_layer,
        )
        positions = [step.start + len(step.token_ids) for _, _, step in sampled]
        return sample(logits, [sampling for _, sampling, _ in sampled], positions)

    def _check(self, sequence: SequenceStep) -> None:
        """A wrong page id would silently overwrite another sequence; refuse the plan instead."""
        count, end = len(sequence.token_ids), sequence.start + len(sequence.token_ids)
        if count == 0 or sequence.start < 0 or end > self._context_length:
            raise ValueError(f"positions [{sequence.start}, {end}) are not within 0 … {self._context_length}")
        if not 0 <= min(sequence.token_ids) <= max(sequence.token_ids) < self.vocab_size:
            raise ValueError(f"a token id is not within the vocabulary of {self.vocab_size}")
        if len(sequence.page_ids) < self._layout.pages_for(end):
            raise ValueError(f"{len(sequence.page_ids)} pages do not hold {end} tokens")
        if not 0 <= min(sequence.page_ids) <= max(sequence.page_ids) < self._layout.num_pages:
            raise ValueError(f"a page id is not within the pool of {self._layout.num_pages}")


def pool_tensor(pool: Buffer, layout: KVLayout) -> torch.Tensor:
    """The pool as a tensor [layers, pages, 2, kv_heads, page_size, head_dim] that shares its memory.

    Raises:
        ConfigError: the buffer has another size.
    """
    size_bytes = memoryview(pool).nbytes
    if size_bytes != layout.pool_bytes:
        raise ConfigError(f"the KV pool has {size_bytes} bytes, its layout needs {layout.pool_bytes}")
    group = layout.group
    flat = torch.frombuffer(pool, dtype=DTYPES[layout.dtype])
    return flat.view(layout.num_layers, layout.num_pages, 2, group.kv_heads, layout.page_size, group.head_dim)


def _check_layout(layout: KVLayout, config: LlamaConfig, dtype: str) -> None:
    if layout.groups != config.cache_groups:
        raise ConfigError(f"the KV layout's groups {layout.groups} are not the model's {config.cache_groups}")
    if layout.dtype != dtype:
        raise ConfigError(f"the engine computes in {dtype}, its KV pool holds {layout.dtype}")

"""The Llama forward pass over a flattened batch of tokens, with K and V in pages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

from prfaas.engine.attention import AttentionBackend
from prfaas.engine.linear import Linear
from prfaas.engine.model_config import LlamaConfig
from prfaas.engine.rope import Rope, rotate_

Weights = dict[str, torch.Tensor]


def parameter_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """HF name and shape of every tensor the model needs."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        for name, rows, columns, bias in (
            ("self_attn.q_proj", q_rows, hidden, config.qkv_bias),
            ("self_attn.k_proj", kv_rows, hidden, config.qkv_bias),
            ("self_attn.v_proj", kv_rows, hidden, config.qkv_bias),
            ("self_attn.o_proj", hidden, q_rows, config.output_bias),
            ("mlp.gate_proj", inner, hidden, config.mlp_bias),
            ("mlp.up_proj", inner, hidden, config.mlp_bias),
            ("mlp.down_proj", hidden, inner, config.mlp_bias),
        ):
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
    return shapes


def optional_parameters(config: LlamaConfig) -> frozenset[str]:
    """Tensors that some checkpoints carry although they follow from others."""
    frequencies = (f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(config.num_layers))
    return frozenset(frequencies) | ({"lm_head.weight"} if config.tie_embeddings else frozenset())


class Llama:
    """A model ready to run; its weights never change.

    Args:
        weights: tensors by HF name, as `parameter_shapes` lists them; emptied, so that each tensor can go
            as soon as its fused or packed form exists.
    """

    def __init__(self, config: LlamaConfig, weights: Weights) -> None:
        self._config = config
        self._embedding = weights.pop("model.embed_tokens.weight")
        self._rope = Rope(config, self._embedding.dtype)
        self._layers = [_Layer(config, _take_layer(weights, i)) for i in range(config.num_layers)]
        self._norm = weights.pop("model.norm.weight")
        self._head = Linear(self._embedding if config.tie_embeddings else weights.pop("lm_head.weight"))

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        sampled_rows: torch.Tensor,
        on_layer: Callable[[], None],
    ) -> torch.Tensor:
        """Compute K and V of all new tokens, and the logits of some.

        Args:
            token_ids: [T], the new tokens of all sequences, one after the other.
            positions: [T], each token's position in its sequence.
            attention: holds the pages; its `begin` has been called for this batch.
            sampled_rows: [S], the rows of `token_ids` whose logits are wanted.
            on_layer: called once per layer, as soon as K and V of all T tokens are in the pages.

        Returns:
            float32 logits [S, vocabulary].
        """
        hidden = F.embedding(token_ids, self._embedding)
        cos_sin = self._rope.at(positions)
        for i, layer in enumerate(self._layers):
            hidden = layer.forward(i, hidden, cos_sin, attention, on_layer)
        wanted = hidden[sampled_rows]
        if not len(wanted):
            return wanted.new_empty(0, self._config.vocab_size, dtype=torch.float32)
        normed = F.rms_norm(wanted, self._norm.shape, self._norm, self._config.rms_norm_eps)
        return self._head(normed).float()


class _Layer:
    """One block. Q, K, V and gate, up are fused: fewer, larger products."""

    def __init__(self, config: LlamaConfig, weights: Weights) -> None:
        self._q_heads, self._kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._inner = config.intermediate_size
        self._eps = config.rms_norm_eps
        self._attention_norm = weights.pop("input_layernorm.weight")
        self._mlp_norm = weights.pop("post_attention_layernorm.weight")
        self._qkv = _fuse(weights, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self._output = _fuse(weights, "self_attn.o_proj")
        self._gate_up = _fuse(weights, "mlp.gate_proj", "mlp.up_proj")
        self._down = _fuse(weights, "mlp.down_proj")

    def forward(
        self,
        index: int,
        hidden: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        attention: AttentionBackend,
        on_layer: Callable[[], None],
    ) -> torch.Tensor:
        rows, q_heads = len(hidden), self._q_heads
        normed = F.rms_norm(hidden, self._attention_norm.shape, self._attention_norm, self._eps)
        heads = self._qkv(normed).view(rows, q_heads + 2 * self._kv_heads, self._head_dim)
        rotate_(heads[:, : q_heads + self._kv_heads], *cos_sin)
        attention.write(index, heads[:, q_heads:].view(rows, 2, self._kv_heads, self._head_dim))
        on_layer()
        attended = attention.attend(index, heads[:, :q_heads])
        hidden = self._output(attended.reshape(rows, -1)).add_(hidden)
        normed = F.rms_norm(hidden, self._mlp_norm.shape, self._mlp_norm, self._eps)
        gate_up = self._gate_up(normed)
        inner = F.silu(gate_up[:, : self._inner]).mul_(gate_up[:, self._inner :])
        return self._down(inner).add_(hidden)


def _take_layer(weights: Weights, layer: int) -> Weights:
    """Move one layer's tensors out of `weights`, under their names within the layer."""
    prefix = f"model.layers.{layer}."
    names = [name for name in weights if name.startswith(prefix)]
    return {name.removeprefix(prefix): weights.pop(name) for name in names}


def _fuse(weights: Weights, *names: str) -> Linear:
    """One projection whose outputs are those of `names`, side by side."""
    weight = torch.cat([weights.pop(f"{name}.weight") for name in names])
    biases = [weights.pop(f"{name}.bias") for name in names if f"{name}.bias" in weights]
    return Linear(weight, torch.cat(biases) if biases else None)

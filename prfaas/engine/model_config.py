"""What a Llama-family `config.json` says, checked: everything the engine does not compute is refused here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from prfaas.errors import ConfigError
from prfaas.kv.layout import CacheGroup

_QKV_BIAS_ALWAYS = {"LlamaForCausalLM": False, "MistralForCausalLM": False, "Qwen2ForCausalLM": True}
"""Supported architectures, and whether q, k and v have biases without `attention_bias` saying so."""


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """How rotary frequencies are stretched for long contexts."""

    kind: str = "default"
    """`default` (none), `linear` or `llama3`."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0


class LlamaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of a decoder-only model with RMSNorm, rotary positions, (grouped-query) attention and SwiGLU."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    """Most positions that the model was made for."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]
    """Every id that ends an answer: those of config.json and of generation_config.json."""

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Every layer keeps the full context, in one shape: one group."""
        layers = tuple(range(self.num_layers))
        return (CacheGroup(kind="full", layers=layers, kv_heads=self.num_kv_heads, head_dim=self.head_dim),)

    @classmethod
    def load(cls, model_path: Path) -> LlamaConfig:
        """Read `config.json` and, where it exists, `generation_config.json`.

        Raises:
            ConfigError: a file or field is missing, or the model needs something that the engine lacks.
        """
        source = model_path / "config.json"
        raw = _read_json(source)
        generation_source = model_path / "generation_config.json"
        generation = _read_json(generation_source) if generation_source.exists() else {}
        eos = (raw.get("eos_token_id"), generation.get("eos_token_id"))
        try:
            return _parse(raw, _flatten_ids(eos), source)
        except KeyError as missing:
            raise ConfigError(f"{source} lacks the field {missing}") from None


def _parse(raw: dict[str, Any], eos_token_ids: tuple[int, ...], source: Path) -> LlamaConfig:
    architecture = _architecture(raw, source)
    _refuse_unsupported(raw, source)
    heads = raw["num_attention_heads"]
    kv_heads = raw.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ConfigError(f"{source}: {heads} attention heads cannot share {kv_heads} KV heads evenly")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    attention_bias = bool(raw.get("attention_bias", False))
    return LlamaConfig(
        architecture=architecture,
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        vocab_size=raw["vocab_size"],
        context_length=raw["max_position_embeddings"],
        rms_norm_eps=raw["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        rope_scaling=_rope_scaling(rope, source),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or _QKV_BIAS_ALWAYS[architecture],
        output_bias=attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        eos_token_ids=eos_token_ids,
    )


def _architecture(raw: dict[str, Any], source: Path) -> str:
    named = raw.get("architectures") or []
    if len(named) != 1 or named[0] not in _QKV_BIAS_ALWAYS:
        supported = ", ".join(_QKV_BIAS_ALWAYS)
        found = ", ".join(named) or "(none)"
        raise ConfigError(f"{source}: architecture {found} is not supported, only {supported}")
    return str(named[0])


def _refuse_unsupported(raw: dict[str, Any], source: Path) -> None:
    """A field with a value that would change the arithmetic must not be ignored."""
    sliding = raw.get("sliding_window") if raw.get("use_sliding_window", True) else None
    unsupported = {
        "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
        "sliding_window": (sliding, None),
        "partial_rotary_factor": (float(raw.get("partial_rotary_factor", 1.0)), 1.0),
        "quantization_config": (raw.get("quantization_config"), None),
    }
    for field, (value, supported) in unsupported.items():
        if value != supported:
            raise ConfigError(f"{source}: {field} = {value!r} is not supported, only {supported!r}")


def _rope_scaling(rope: dict[str, Any], source: Path) -> RopeScaling:
    match rope.get("rope_type") or rope.get("type") or "default":
        case "default":
            return RopeScaling()
        case "linear":
            return RopeScaling(kind="linear", factor=rope["factor"])
        case "llama3":
            return RopeScaling(
                kind="llama3",
                factor=rope["factor"],
                low_freq_factor=rope["low_freq_factor"],
                high_freq_factor=rope["high_freq_factor"],
                original_context=rope["original_max_position_embeddings"],
            )
        case other:
            raise ConfigError(f"{source}: rope type {other!r} is not supported (default, linear, llama3)")


def _flatten_ids(sources: tuple[int | list[int] | None, ...]) -> tuple[int, ...]:
    ids: set[int] = set()
    for source in sources:
        ids.update(source if isinstance(source, list) else [] if source is None else [source])
    return tuple(sorted(ids))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: model.path must name an HF model folder") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return content

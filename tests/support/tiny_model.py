"""A Llama of a few hundred kilobytes with random weights: a complete HF folder in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2
_PAIRS = """he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me
    de hi ri"""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(
    path: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 2048,
    tied: bool = True,
    seed: int = 0,
    shards: int = 1,
    **config: Any,
) -> Path:
    """Write a random Llama with a byte-level tokenizer and a chat template to `path`; returns `path`.

    Deterministic in its arguments. Every single byte is a token, so any token stream may split characters.

    Args:
        shards: more than one writes model-0000i-of-0000n.safetensors files with an index.
        config: further or overriding config.json entries (`attention_bias=True`, `rope_scaling={...}`, …);
            `qkv_bias=True` gives biases to q, k and v alone, as Qwen2 has them.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer()
    tokenizer.save(str(path / "tokenizer.json"))
    hf_config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": hidden * 2,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "vocab_size": tokenizer.get_vocab_size(),
        "bos_token_id": 0,
        "eos_token_id": EOS_TOKEN_ID,
        "torch_dtype": "float32",
        **config,
    }
    _write_json(path / "config.json", hf_config)
    _write_json(path / "generation_config.json", {"bos_token_id": 0, "eos_token_id": EOS_TOKEN_ID})
    names = {
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[EOS_TOKEN_ID],
        "pad_token": SPECIAL_TOKENS[0],
    }
    _write_json(
        path / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE, **names},
    )
    _save(path, random_weights(hf_config, seed), shards)
    return path


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE: three special tokens (ids 0 to 2), the 256 bytes, and a few dozen English pairs."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(pair[0], pair[1]) for pair in _PAIRS.split()] + [("Ġ", letter) for letter in "taoisw"]
    tokens = [*SPECIAL_TOKENS, *alphabet, *(first + second for first, second in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def random_weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """float32 tensors under their HF names, scaled so that logits differ clearly from token to token."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * (1.5 / shape[-1] ** 0.5)

    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q_rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]
    weights = {"model.embed_tokens.weight": torch.randn(vocab, hidden, generator=generator)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, rows, columns in (
            ("self_attn.q_proj", q_rows, hidden),
            ("self_attn.k_proj", kv_rows, hidden),
            ("self_attn.v_proj", kv_rows, hidden),
            ("self_attn.o_proj", hidden, q_rows),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            weights[f"{layer}.{name}.weight"] = normal(rows, columns)
            if _has_bias(config, name):
                weights[f"{layer}.{name}.bias"] = torch.randn(rows, generator=generator) * 0.3
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{norm}.weight"] = 1 + 0.1 * torch.randn(hidden, generator=generator)
    weights["model.norm.weight"] = 1 + 0.1 * torch.randn(hidden, generator=generator)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(vocab, hidden)
    return weights


def _has_bias(config: dict[str, Any], name: str) -> bool:
    if "mlp" in name:
        return bool(config["mlp_bias"])
    qkv_only = bool(config.get("qkv_bias")) and "o_proj" not in name
    return bool(config["attention_bias"]) or qkv_only


def _save(path: Path, weights: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(weights, str(path / "model.safetensors"), metadata={"format": "pt"})
        return
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    weight_map = {name: files[i % shards] for i, name in enumerate(weights)}
    for file in files:
        part = {name: weights[name] for name in weights if weight_map[name] == file}
        save_file(part, str(path / file), metadata={"format": "pt"})
    total_size = sum(weight.nbytes for weight in weights.values())
    _write_json(
        path / "model.safetensors.index.json",
        {"metadata": {"total_size": total_size}, "weight_map": weight_map},
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")

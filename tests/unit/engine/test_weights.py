"""Model folders: what does not fit is refused by name; fingerprints tell models apart, not files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_model import make_tiny_model

from prfaas.engine.fingerprint import compat_record, tokenizer_fingerprint, weights_fingerprint
from prfaas.engine.llama import optional_parameters, parameter_shapes
from prfaas.engine.model_config import LlamaConfig
from prfaas.engine.weights import load_weights
from prfaas.errors import ConfigError
from prfaas.kv.layout import KVLayout


@pytest.fixture
def model_path(tiny_model_path: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that the test may spoil."""
    return shutil.copytree(tiny_model_path, tmp_path / "copy")


def load(path: Path) -> dict[str, torch.Tensor]:
    config = LlamaConfig.load(path)
    return load_weights(path, parameter_shapes(config), optional_parameters(config), torch.float32)


def edit_weights(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(path / "model.safetensors")
    edit(weights)
    save_file(weights, path / "model.safetensors")


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def test_a_missing_tensor_is_refused_by_name(model_path: Path) -> None:
    edit_weights(model_path, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ConfigError, match=r"lacks .*layers\.1\.mlp\.up_proj\.weight"):
        load(model_path)


def test_an_unexpected_tensor_is_refused_by_name(model_path: Path) -> None:
    edit_weights(model_path, lambda weights: weights.update({"model.extra.weight": torch.ones(2)}))
    with pytest.raises(ConfigError, match=r"unexpected .*model\.extra\.weight"):
        load(model_path)


def test_a_tensor_of_another_shape_is_refused_by_name(model_path: Path) -> None:
    edit_weights(model_path, lambda weights: weights.update({"model.norm.weight": torch.ones(7)}))
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is \(7,\), not \(64,\)"):
        load(model_path)


def test_redundant_tensors_of_old_checkpoints_are_no_error(model_path: Path) -> None:
    redundant = {
        "lm_head.weight": torch.ones(2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    edit_weights(model_path, lambda weights: weights.update(redundant))
    assert redundant.keys().isdisjoint(load(model_path))


def test_weights_are_cast(model_path: Path) -> None:
    edit_weights(model_path, lambda weights: weights.update({k: v.half() for k, v in weights.items()}))
    assert {weight.dtype for weight in load(model_path).values()} == {torch.float32}


def test_a_shard_that_is_not_there_is_refused_by_path(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "model", shards=3)
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConfigError, match="model-00002-of-00003"):
        load(path)


@pytest.mark.parametrize("content", [b"", b"not safetensors at all"])
def test_a_broken_file_is_refused_by_path(model_path: Path, content: bytes) -> None:
    (model_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        load(model_path)


def test_a_folder_without_weights_or_config_is_refused(model_path: Path) -> None:
    (model_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="neither"):
        load(model_path)
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        load(model_path.parent)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"architectures": None}, "none"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"num_key_value_heads": 3}, "KV heads"),
    ],
)
def test_what_the_engine_does_not_compute_is_refused_by_name(
    model_path: Path, changes: dict[str, Any], named: str
) -> None:
    edit_config(model_path, **changes)
    with pytest.raises(ConfigError, match=named):
        LlamaConfig.load(model_path)


def test_a_missing_config_field_is_named(model_path: Path) -> None:
    config = json.loads((model_path / "config.json").read_text())
    del config["hidden_size"]
    (model_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="hidden_size"):
        LlamaConfig.load(model_path)


def test_a_sliding_window_that_is_switched_off_is_no_reason_to_refuse(model_path: Path) -> None:
    edit_config(model_path, sliding_window=4096, use_sliding_window=False)
    assert LlamaConfig.load(model_path).context_length == 2048


def test_answers_end_at_the_ids_of_both_configurations(model_path: Path) -> None:
    edit_config(model_path, eos_token_id=[7, 2])
    (model_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert LlamaConfig.load(model_path).eos_token_ids == (2, 7, 9)
    (model_path / "generation_config.json").unlink()
    assert LlamaConfig.load(model_path).eos_token_ids == (2, 7)


# ---------------------------------------------------------------- fingerprints


def test_the_fingerprint_does_not_depend_on_the_spread_over_files(
    tmp_path: Path, tiny_model_path: Path
) -> None:
    assert weights_fingerprint(make_tiny_model(tmp_path / "sharded", shards=3)) == weights_fingerprint(
        tiny_model_path
    )


def test_another_tensor_dtype_or_relevant_configuration_changes_the_fingerprint(model_path: Path) -> None:
    prints = {weights_fingerprint(model_path)}
    edit_weights(model_path, lambda weights: weights["model.norm.weight"].__setitem__(-1, 3.0))
    prints.add(weights_fingerprint(model_path))
    edit_weights(model_path, lambda weights: weights["model.layers.1.mlp.down_proj.weight"].mul_(1.5))
    prints.add(weights_fingerprint(model_path))
    edit_weights(model_path, lambda weights: weights.update({k: v.half() for k, v in weights.items()}))
    prints.add(weights_fingerprint(model_path))
    edit_config(model_path, rope_theta=5000.0)
    prints.add(weights_fingerprint(model_path))
    assert len(prints) == 5
    edit_config(model_path, max_position_embeddings=512, eos_token_id=5)
    assert weights_fingerprint(model_path) in prints


def test_compatibility_records_differ_in_exactly_what_differs(
    model_path: Path, tiny_model_path: Path
) -> None:
    groups = LlamaConfig.load(model_path).cache_groups
    layout = KVLayout(groups=groups, page_size=16, dtype="float32", num_pages=4)
    ours = compat_record(tiny_model_path, layout)
    assert ours.differences(compat_record(model_path, layout)) == []
    content = json.loads((model_path / "tokenizer.json").read_text())
    (model_path / "tokenizer.json").write_text(json.dumps(content, indent=7))
    assert [name for name, _, _ in ours.differences(compat_record(model_path, layout))] == ["tokenizer"]
    assert tokenizer_fingerprint(model_path) != tokenizer_fingerprint(tiny_model_path)

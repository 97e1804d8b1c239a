"""Read a model's tensors from safetensors files, one file or sharded, and check every name and shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from prfaas.errors import ConfigError

if TYPE_CHECKING:
    import torch  # only rank processes need it, and it takes seconds to import

Shape = tuple[int, ...]


def weight_files(model_path: Path) -> dict[str, Path]:
    """Tensor name → the safetensors file that holds it.

    Raises:
        ConfigError: no safetensors file, or an index that names a file which is not there.
    """
    index, single = model_path / "model.safetensors.index.json", model_path / "model.safetensors"
    if index.exists():
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {name: model_path / file for name, file in weight_map.items()}
        absent = sorted({str(path) for path in files.values() if not path.exists()})
        if absent:
            raise ConfigError(f"{index} names files that do not exist: {', '.join(absent)}")
        return files
    if not single.exists():
        raise ConfigError(f"{model_path} holds neither model.safetensors nor model.safetensors.index.json")
    with _open(single) as file:
        return dict.fromkeys(file.keys(), single)


def load_weights(
    model_path: Path, expected: Mapping[str, Shape], optional: frozenset[str], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The tensors named in `expected`, cast to `dtype`.

    Args:
        expected: shape of every tensor that the model needs.
        optional: names that a checkpoint may hold although the model computes without them.

    Raises:
        ConfigError: a tensor is missing, has another shape, or nobody would use it; the message names it.
    """
    files = weight_files(model_path)
    _check_names(model_path, expected.keys() - files.keys(), "lacks the tensors")
    _check_names(model_path, files.keys() - expected.keys() - optional, "holds unexpected tensors")
    weights: dict[str, torch.Tensor] = {}
    for path in sorted({files[name] for name in expected}):
        with _open(path) as file:
            present = set(file.keys())
            names = [name for name in expected if files[name] == path]
            _check_names(path, set(names) - present, "lacks the tensors")
            for name in names:
                shape = tuple(file.get_slice(name).get_shape())
                if shape != expected[name]:
                    raise ConfigError(f"{path}: tensor {name} is {shape}, not {expected[name]}")
                # A copy, so that no tensor keeps the mapped file alive.
                weights[name] = file.get_tensor(name).to(dtype, copy=True)
    return weights


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is not a readable safetensors file: {error}") from error


def _check_names(where: Path, wrong: set[str], what: str) -> None:
    if wrong:
        some = ", ".join(sorted(wrong)[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise ConfigError(f"{where} {what} {some}")

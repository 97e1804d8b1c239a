"""Names for what two workers must share before they may exchange KV: weights and tokenizer, as XXH3-64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import xxhash

from prfaas.engine.model_config import LlamaConfig
from prfaas.engine.weights import weight_files
from prfaas.errors import ConfigError
from prfaas.kv.layout import CompatRecord, KVLayout
from prfaas.protocol.messages import PROTOCOL_VERSION

_SAMPLES_PER_TENSOR = 8
_SAMPLE_BYTES = 256
_NOT_OF_KV = ("context_length", "eos_token_ids")
"""Configuration that does not change a single K or V."""


def compat_record(model_path: Path, layout: KVLayout) -> CompatRecord:
    """What a worker that serves this model with this layout demands of its peers."""
    return CompatRecord(
        protocol=PROTOCOL_VERSION,
        weights=weights_fingerprint(model_path),
        tokenizer=tokenizer_fingerprint(model_path),
        attention="gqa",
        page_layout="HND",
        page_size=layout.page_size,
        kv_dtype=layout.dtype,
        groups=layout.groups,
    )


def tokenizer_fingerprint(model_path: Path) -> str:
    """XXH3-64 of tokenizer.json, 16 hex digits."""
    return xxhash.xxh3_64_hexdigest((model_path / "tokenizer.json").read_bytes())


def weights_fingerprint(model_path: Path) -> str:
    """XXH3-64 over the configuration and every tensor's name, dtype, shape and sampled bytes, 16 hex digits.

    Independent of how tensors are spread over files. It reads some kilobytes per tensor, so that it takes
    milliseconds; it tells models, fine-tunes and revisions apart, but is no defence against forgery.

    Raises:
        ConfigError: the folder's files are missing or broken.
    """
    config = msgspec.to_builtins(LlamaConfig.load(model_path))
    essentials = {field: value for field, value in config.items() if field not in _NOT_OF_KV}
    digest = xxhash.xxh3_64(msgspec.json.encode(essentials, order="deterministic"))
    tensors: dict[str, bytes] = {}
    for path in sorted(set(weight_files(model_path).values())):
        with path.open("rb") as file:
            tensors |= _sampled_tensors(file, path)
    for name in sorted(tensors):
        digest.update(tensors[name])
    return digest.hexdigest()


def _sampled_tensors(file: BinaryIO, path: Path) -> dict[str, bytes]:
    """Tensor name → its header entry and samples. The format: 8-byte length, JSON header, data."""
    try:
        header_bytes = int.from_bytes(file.read(8), "little")
        header: dict[str, dict[str, Any]] = json.loads(file.read(header_bytes))
    except ValueError as error:
        raise ConfigError(f"{path} is not a readable safetensors file: {error}") from error
    header.pop("__metadata__", None)
    return {
        name: _describe(name, entry) + _samples(file, 8 + header_bytes, entry)
        for name, entry in header.items()
    }


def _describe(name: str, entry: dict[str, Any]) -> bytes:
    return f"{name} {entry['dtype']} {entry['shape']};".encode()


def _samples(file: BinaryIO, data_start: int, entry: dict[str, Any]) -> bytes:
    """Evenly spaced pieces from the first byte to the last; the whole tensor where it is small."""
    start, end = entry["data_offsets"]
    if end - start <= _SAMPLES_PER_TENSOR * _SAMPLE_BYTES:
        file.seek(data_start + start)
        return file.read(end - start)
    pieces = []
    for i in range(_SAMPLES_PER_TENSOR):
        offset = (end - start - _SAMPLE_BYTES) * i // (_SAMPLES_PER_TENSOR - 1)
        file.seek(data_start + start + offset)
        pieces.append(file.read(_SAMPLE_BYTES))
    return b"".join(pieces)

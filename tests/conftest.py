"""Fixtures for every test: where the models are. `tests/support` holds helpers, importable by their names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HF folder of a random two-layer Llama (vocabulary 300, context 2048); do not write to it."""
    from tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def real_model_path() -> Path:
    """HF folder of SmolLM2-135M-Instruct, fetched on first use; skips where it cannot be had."""
    from launcher.model import ModelFetchError, ensure_model

    try:
        return ensure_model()
    except ModelFetchError as error:
        pytest.skip(f"the real model cannot be fetched here: {error}")

"""For tests that need the recorded traces and cost tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulations.data_folder import VARIABLE, data_folder


def _is_there() -> bool:
    folder = data_folder()
    return folder is not None and all((folder / name).is_dir() for name in ("traces", "cost"))


needs_data = pytest.mark.skipif(
    not _is_there(), reason=f"no data folder with traces/ and cost/: set {VARIABLE}"
)


def data_path(name: str) -> Path:
    """`traces/…` or `cost/…` in the data folder."""
    folder = data_folder()
    assert folder is not None
    return folder / name

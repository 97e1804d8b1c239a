"""Every request of a run as a row of a file: Parquet or JSON lines by the file's name."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from prfaas.errors import ConfigError
from simulations.report.samples import STATES, request_row
from simulations.report.summary import KINDS
from simulations.result import RunResult

SUFFIXES = (".parquet", ".jsonl")


def check_rows_path(path: Path) -> None:
    """Before the work: could rows be written there?

    Raises:
        ConfigError: another ending, or Parquet without pyarrow.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--out: {path} should end in {' or '.join(SUFFIXES)}")
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as error:
            raise ConfigError("--out: Parquet needs the extra `parquet`; or name a .jsonl file") from error


def write_rows(path: Path, run: RunResult) -> None:
    """All requests in trace order; the file appears only once it is whole."""
    with whole_file(path) as file:
        if path.suffix == ".parquet":
            _parquet(file, run)
        else:
            encoder = msgspec.json.Encoder()
            for index in range(len(run.state)):
                file.write(encoder.encode(request_row(run, index)) + b"\n")


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file beside `path` that takes its place at the end; an error leaves what was there before."""
    with tempfile.NamedTemporaryFile(
        dir=path.absolute().parent, prefix=f".{path.name}-", delete=False
    ) as file:
        temporary = Path(file.name)
        try:
            yield file  # type: ignore[misc]
        except BaseException:
            temporary.unlink()
            raise
    temporary.chmod(0o644)
    temporary.replace(path)


def _parquet(file: Any, run: RunResult) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def named(names: tuple[str, ...], indices: Any) -> Any:
        return pa.DictionaryArray.from_arrays(
            pa.array(np.where(indices < 0, 0, indices).astype(np.int32), mask=indices < 0), list(names)
        )

    columns = {
        "request": pa.array(np.arange(len(run.state))),
        "state": named(STATES, run.state),
        "reason": pa.array(run.refusal),
        "prompt_tokens": pa.array(run.prompt_tokens),
        "output_tokens": pa.array(run.output_tokens),
        "kind": named(KINDS, run.kind),
        "decode": named(run.workers, run.decode),
        "site": named(run.workers, run.site),
    }
    for name in ("decode_cached_tokens", "site_cached_tokens", "kv_bytes", "attempts"):
        columns[name] = pa.array(getattr(run, name))
    for name in ("arrival_s", "predicted_ttft_s", "ttft_s", "tpot_s", "end_s", "regret_s"):
        columns[name] = pa.array(getattr(run, name), from_pandas=True)  # NaN becomes null
    pq.write_table(pa.table(columns), file)

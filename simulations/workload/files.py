"""Trace files as numbered lines, decompressed by content: plain, gzip or zstd."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from prfaas.errors import ConfigError

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_CHUNK_BYTES = 1 << 20
_WINDOW_BYTES = 1 << 31
"""Files packed with `--long` need more than the decoder's default window."""


def numbered_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, line without its end) of every line that is not blank.

    Raises:
        ConfigError: the file cannot be read, is damaged, or is cut off in its compressed form.
    """
    number, rest = 0, b""
    for chunk in chunks(path):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            number += 1
            if line.strip():
                yield number, line
    if rest.strip():
        yield number + 1, rest


def chunks(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """The decompressed contents of a file, a piece at a time.

    Raises:
        ConfigError: as `numbered_lines`.
    """
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
            file.seek(0)
            if magic.startswith(GZIP_MAGIC):
                with gzip.GzipFile(fileobj=file) as unpacked:
                    yield from _pieces(unpacked)
            elif magic == ZSTD_MAGIC:
                yield from _unzstd(file, path)
            else:
                yield from _pieces(file)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"{path} is damaged or cut off: {error}") from error
    except OSError as error:
        raise ConfigError(f"cannot read trace {path}: {error.strerror or error}") from error


def _pieces(file: IO[bytes] | gzip.GzipFile) -> Iterator[bytes]:
    while piece := file.read(_CHUNK_BYTES):
        yield piece


def _unzstd(file: IO[bytes], path: str | os.PathLike[str]) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError(
            f"{path} is packed with zstd: `pip install 'prfaas[simulate]'`, or unpack it by "
            f"`zstd -d --long=31`"
        ) from error
    # A decompression object, not a reader: only it tells a cut-off file from a whole one.
    unpack = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).decompressobj()
    try:
        for piece in _pieces(file):
            yield unpack.decompress(piece)
    except zstandard.ZstdError as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    if not unpack.eof:
        raise ConfigError(f"{path} is cut off: its zstd frame has no end")


def trace_name(path: str | os.PathLike[str]) -> str:
    """What a trace read from `path` is called: the file's name without its endings."""
    return Path(path).name.split(".", 1)[0] or str(path)

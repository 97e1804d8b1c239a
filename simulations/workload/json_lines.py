"""JSON lines as typed rows, with errors that name file, line and field."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from prfaas.errors import ConfigError
from simulations.workload.files import numbered_lines

Row = TypeVar("Row")


def decoded_lines(path: str | os.PathLike[str], kind: type[Row]) -> Iterator[tuple[int, Row]]:
    """(line number, row) of every line; fields that `kind` does not know are ignored.

    Raises:
        ConfigError: a line is no JSON object, or a field is missing or of a wrong type.
    """
    decoder = msgspec.json.Decoder(kind)
    for number, line in numbered_lines(path):
        try:
            yield number, decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}, line {number}: {plain(error)}") from error


def plain(error: Exception) -> str:
    """msgspec's words with the field in front: `` `input_length`: expected `int`, got `str` ``."""
    what, _, where = str(error).partition(" - at `$.")
    return f"`{where.rstrip('`')}`: {what[0].lower()}{what[1:]}" if where else what

"""Quantities as people write them: `200Mbit`, `40ms`, `1GiB`."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z/]*)\s*$")
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "m": 60.0, "min": 60.0, "h": 3600.0}
_BYTES = {
    "": 1.0, "B": 1.0,
    "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
    "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40,
}  # fmt: skip
_BITS_PER_S = {"bit": 1.0, "kbit": 1e3, "Kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9, "Tbit": 1e12}


def _parse(text: str | int | float, units: dict[str, float], example: str) -> float:
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        return float(text)
    match = _NUMBER.match(text) if isinstance(text, str) else None
    if match is None or match.group(2) not in units:
        known = ", ".join(unit for unit in units if unit)
        raise ValueError(f"`{text}` is not a quantity like {example} (units: {known})")
    return float(match.group(1)) * units[match.group(2)]


class Seconds(float):
    """A duration in seconds; parses `40ms`, `1.5s`, `2m`; a bare number is seconds."""

    @classmethod
    def parse(cls, text: str | int | float) -> Seconds:
        return cls(_parse(text, _SECONDS, "40ms"))


class Bytes(int):
    """A size in bytes; parses `1GiB`, `64MB`; a bare number is bytes."""

    @classmethod
    def parse(cls, text: str | int | float) -> Bytes:
        return cls(int(_parse(text, _BYTES, "1GiB")))


class Rate(float):
    """A data rate in **bytes per second**; parses `200Mbit` (per second is understood) or `25MB/s`.

    A bare number is refused: bits and bytes are mistaken too easily.
    """

    @classmethod
    def parse(cls, text: str | int | float) -> Rate:
        if not isinstance(text, str):
            raise ValueError(f"`{text}` needs a unit: write 200Mbit or 25MB/s")
        bare = text.strip().removesuffix("/s").removesuffix("ps")
        if bare.endswith("bit"):
            return cls(_parse(bare, _BITS_PER_S, "200Mbit") / 8)
        if not bare.endswith("B"):
            raise ValueError(f"`{text}` is not a data rate like 200Mbit or 25MB/s")
        return cls(_parse(bare, _BYTES, "25MB/s"))

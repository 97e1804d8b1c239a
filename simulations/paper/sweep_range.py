"""What `--sweep` takes: `link=1..100Gbps` or `load=0.1..0.95`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from prfaas.errors import ConfigError
from prfaas.units import Rate

EXAMPLES = {"link": "link=1..100Gbps", "load": "load=0.1..0.95"}
_UNIT = re.compile(r"[A-Za-z/]+$")


@dataclass(frozen=True, slots=True)
class SweepRange:
    kind: Literal["link", "load"]
    low: float
    """Gbit/s, or the offered rate as a share of the model's λ_max."""
    high: float

    def values(self, points: int) -> list[float]:
        """`points` values from `low` to `high`: equal ratios for links, equal steps for loads."""
        spaced = np.geomspace if self.kind == "link" else np.linspace
        return [float(value) for value in spaced(self.low, self.high, points)]


def parse_sweep(text: str) -> SweepRange:
    """
    Raises:
        ConfigError: not a known quantity with two ends, low below high; the message has an example.
    """
    name, equals, ends = text.partition("=")
    if name not in EXAMPLES or not equals:
        known = " or ".join(EXAMPLES.values())
        raise ConfigError(f"--sweep {text}: unknown quantity `{name}`; write {known}")
    low_text, dots, high_text = ends.partition("..")
    if not dots or not low_text or not high_text:
        raise ConfigError(f"--sweep {text}: a range needs two ends; write {EXAMPLES[name]}")
    low, high = (_link if name == "link" else _load)(text, low_text, high_text)
    if not 0 < low < high:
        raise ConfigError(f"--sweep {text}: the range must rise from above 0; write {EXAMPLES[name]}")
    return SweepRange("link" if name == "link" else "load", low, high)


def _link(text: str, low: str, high: str) -> tuple[float, float]:
    """Ends in Gbit/s; a lower end without a unit has the upper one's."""
    unit = _UNIT.search(high)
    if unit and not _UNIT.search(low):
        low += unit.group()
    return _gbps(text, low), _gbps(text, high)


def _gbps(text: str, rate: str) -> float:
    try:
        return Rate.parse(re.sub(r"bps$", "bit", rate.strip())) * 8e-9
    except ValueError as error:
        raise ConfigError(f"--sweep {text}: {error}; write {EXAMPLES['link']}") from None


def _load(text: str, low: str, high: str) -> tuple[float, float]:
    try:
        found = float(low), float(high)
    except ValueError:
        raise ConfigError(f"--sweep {text}: a load is a number; write {EXAMPLES['load']}") from None
    if found[1] > 2:
        raise ConfigError(
            f"--sweep {text}: a load is the offered rate over the model's λ_max, at most 2; "
            f"write {EXAMPLES['load']}"
        )
    return found

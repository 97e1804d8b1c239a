"""Service levels as text, and which of them a run misses."""

from __future__ import annotations

import msgspec

from prfaas.config_load import suggest
from prfaas.errors import ConfigError
from prfaas.units import Seconds
from simulations.fleet import SLO
from simulations.result import SERVED, RunResult


def parse_slo(text: str) -> SLO:
    """`ttft_p90=2s,tpot_p90=50ms`.

    Raises:
        ConfigError: an unknown level, given twice, or no duration above 0.
    """
    known = SLO.__struct_fields__
    levels: dict[str, Seconds] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name in levels:
            raise ConfigError(f"--slo: `{part.strip()}` should be level=duration, each given once")
        if name not in known:
            raise ConfigError(f"--slo: unknown level `{name}`{suggest(name, known)}")
        try:
            levels[name] = Seconds.parse(value)
        except ValueError as error:
            raise ConfigError(f"--slo: {name}: {error}") from error
        if levels[name] <= 0:
            raise ConfigError(f"--slo: {name} must be above 0 s")
    return SLO(**levels)


def asked(slo: SLO) -> dict[str, float]:
    """The levels that are asked for, in seconds."""
    return {name: float(level) for name, level in msgspec.structs.asdict(slo).items() if level is not None}


def missed(result: RunResult, slo: SLO) -> dict[str, float]:
    """What keeps `result` from meeting `slo`: the value found of each level missed, and `unserved` requests.

    As for `RunResult.meets`, one request without an answer misses. A level with nothing to measure (TPOT
    where every answer has one token) holds.
    """
    found = result.summary()
    wrong = {name: found[f"{name}_s"] for name, level in asked(slo).items() if found[f"{name}_s"] > level}
    unserved = int((result.state != SERVED).sum())
    return {**wrong, "unserved": float(unserved)} if unserved else wrong

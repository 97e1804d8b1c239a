"""From a fleet's description of hardware to step times.

A fleet names hardware of its own (`hardware:` in its file) or one of the files beside this module.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from prfaas.config_load import convert, parse_mapping, read_text, suggest
from prfaas.engine.interface import StepProfile
from prfaas.errors import ConfigError
from simulations.fleet import Fleet, HardwareSpec, SimWorkers
from simulations.hardware.points import PointsStepTimes
from simulations.hardware.step_times import LinearStepTimes, StepTimes
from simulations.hardware.table_times import TableStepTimes
from simulations.hardware.tables import load_table

_FOLDER = Path(__file__).resolve().parent
_DECODE_FIELDS = ("decode_base_s", "decode_sequence_s", "decode_context_s")
_PREFILL_FIELDS = ("prefill_base_s", "prefill_token_s", "prefill_context_s")


def shipped_hardware() -> list[str]:
    """Names of the profiles that come with the project."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def hardware_of(fleet: Fleet, workers: SimWorkers) -> HardwareSpec:
    """The hardware that `workers` run on: the fleet's own of that name, else a shipped one.

    Raises:
        ConfigError: there is none of that name.
    """
    if workers.hardware in fleet.hardware:
        return fleet.hardware[workers.hardware]
    known = [*fleet.hardware, *shipped_hardware()]
    if workers.hardware not in known:
        raise ConfigError(f"unknown hardware `{workers.hardware}`{suggest(workers.hardware, known)}")
    path = _FOLDER / f"{workers.hardware}.yaml"
    spec: HardwareSpec = convert(
        HardwareSpec, parse_mapping(read_text(path), str(path), "the hardware's fields")
    )
    return spec


def step_times(spec: HardwareSpec, name: str) -> StepTimes:
    """Step times of hardware `spec`; `name` says in errors which one is meant.

    Raises:
        ConfigError: the description is incomplete or contradictory, or its cost table is not there.
    """
    given = [kind for kind in ("linear", "points", "table") if getattr(spec, kind)]
    if not given or given not in (["linear"], ["linear", "points"], ["table"]):
        raise ConfigError(
            f"hardware `{name}` needs `linear`, or `points` with the decode fields in `linear`, or `table`; "
            f"it has {', '.join(given) or 'none of them'}"
        )
    if spec.prefill_read_s and given != ["linear"]:
        raise ConfigError(f"hardware `{name}`: `prefill_read_s` goes with `linear` alone; remove it")
    if spec.table:
        return TableStepTimes(load_table(spec.table), spec)
    if spec.points:
        return PointsStepTimes(_prefill_points(spec, name), _linear(spec, name, _DECODE_FIELDS), spec)
    fields = _linear(spec, name, _PREFILL_FIELDS + _DECODE_FIELDS)
    read_s = spec.prefill_read_s * spec.prefill_scale
    return LinearStepTimes(_scaled(fields, spec), spec.request_overhead_s, read_s)


def _linear(spec: HardwareSpec, name: str, wanted: tuple[str, ...]) -> dict[str, float]:
    for field in spec.linear:
        if field not in wanted:
            raise ConfigError(f"hardware `{name}`: unknown field `linear.{field}`{suggest(field, wanted)}")
    for field in wanted:
        value = spec.linear.get(field)
        if value is None:
            raise ConfigError(f"hardware `{name}`: `linear.{field}` is missing")
        if not 0.0 <= value < 3600.0:
            raise ConfigError(f"hardware `{name}`: `linear.{field}` must be 0 s … 1 h, got {value}")
    return dict(spec.linear)


def _scaled(linear: dict[str, float], spec: HardwareSpec) -> StepProfile:
    fields = {
        field: value * (spec.prefill_scale if field in _PREFILL_FIELDS else spec.decode_scale)
        for field, value in linear.items()
    }
    fields["prefill_base_s"] += spec.step_overhead_s
    fields["decode_base_s"] += spec.step_overhead_s
    return StepProfile(chunk_tokens=spec.chunk_tokens, **fields)


def _prefill_points(spec: HardwareSpec, name: str) -> list[tuple[float, float]]:
    if set(spec.points) != {"prefill"}:
        raise ConfigError(
            f"hardware `{name}`: `points` must hold `prefill` alone, has {', '.join(spec.points)}"
        )
    points = spec.points["prefill"]
    path = f"hardware `{name}`: `points.prefill`"
    if len(points) < 2 or any(len(point) != 2 for point in points):
        raise ConfigError(f"{path} must be two or more pairs [tokens, seconds]")
    for (tokens, seconds), (next_tokens, next_seconds) in itertools.pairwise(points):
        if not (0.0 <= tokens < next_tokens < 1e9 and 0.0 <= seconds <= next_seconds < 1e6):
            raise ConfigError(
                f"{path} must rise in tokens and not fall in seconds, see [{tokens}, {seconds}]"
            )
    return [(point[0], point[1]) for point in points]

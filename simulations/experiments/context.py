"""What a task of a sweep finds where it runs: the traces, and whether to stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from simulations.workload.trace import Trace


@dataclass(frozen=True, slots=True)
class Context:
    traces: Mapping[str, Trace]
    stopped: Callable[[], bool]
    """True after Ctrl-C: give up soon."""

    def trace(self, name: str) -> Trace:
        return self.traces[name]


def store_traces(traces: Mapping[str, Trace], folder: Path) -> None:
    """Write every column to a file of its own, so that many processes can map one copy."""
    for index, trace in enumerate(traces.values()):
        for name in _columns(trace):
            np.save(folder / f"{index}-{name}.npy", getattr(trace, name))


def map_traces(plain: Mapping[str, Trace], folder: Path) -> dict[str, Trace]:
    """Traces that `store_traces` wrote, mapped rather than read; `plain` are `without_columns` of them."""
    mapped = {}
    for index, (key, trace) in enumerate(plain.items()):
        columns = {name: np.load(folder / f"{index}-{name}.npy", mmap_mode="r") for name in _columns(trace)}
        kept = {
            field.name: getattr(trace, field.name) for field in fields(trace) if field.name not in columns
        }
        mapped[key] = Trace(**kept, **columns)
    return mapped


def without_columns(traces: Mapping[str, Trace]) -> dict[str, Trace]:
    """The traces' small facts only; what must travel beside the files."""
    nothing = np.zeros(0)
    found = {}
    for key, trace in traces.items():
        kept = {field.name: getattr(trace, field.name) for field in fields(trace)}
        found[key] = Trace(**{**kept, **dict.fromkeys(_columns(trace), nothing)})
    return found


def _columns(trace: Trace) -> list[str]:
    return [field.name for field in fields(trace) if isinstance(getattr(trace, field.name), np.ndarray)]

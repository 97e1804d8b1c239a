"""From what a live router measured to a fleet that the simulator replays like it.

The step times that the router measured at its start are the beginning. What they leave unexplained in a
recording is put into decode steps fitted to the answers (`decode_fit`), and then into three kinds of
numbers: a factor on each worker's prefill, a factor on each decode worker's steps, and seconds per request
(HTTP, tokenizer, placement). Those are found by replaying the requests where they were placed live and
comparing, a few times over: so waiting, chunks among decodes and growing batches are accounted for by the
simulator itself, not by a formula beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from simulations.fidelity.fleet_fit import fit_fleet
from simulations.fidelity.recorded_fleet import recorded_fleet
from simulations.fidelity.recording import Recording, Row
from simulations.fidelity.replayed import replay_rows
from simulations.fidelity.terms import TERMS
from simulations.fleet import Fleet, HardwareSpec, MachineSpec

_ROUNDS = 16
_DAMPING = 0.5
"""Exponent of each correction: queues answer to step times more than proportionally."""
_FACTOR_RANGE = (0.05, 20.0)
_LEAST_ROWS = 3
"""A factor from fewer rows is taken from all workers of the role."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fleet fitted to the first `used` requests of a recording."""

    fleet: Fleet
    used: int
    prefill_scale: dict[str, float]
    decode_scale: dict[str, float]
    overhead_s: float
    machine: MachineSpec | None = None
    """How workers slow each other, where they were said to share one machine."""


def calibrate(recording: Recording, used: int | None = None, *, one_machine: bool = False) -> Calibration:
    """Fit a fleet to the first `used` requests (None = all): nothing later is looked at.

    Args:
        one_machine: all workers ran on one machine; find out how much they slow each other.
    """
    count = len(recording.rows) if used is None else used
    live = recording.rows[:count]
    fleet = fit_fleet(recorded_fleet(recording), live, one_machine=one_machine)
    for _ in range(_ROUNDS):
        simulated = replay_rows(recording, fleet, follow=True, first=count)
        fleet = _corrected(fleet, live, simulated)
    hardware = fleet.hardware
    return Calibration(
        fleet=fleet,
        used=count,
        prefill_scale={name: spec.prefill_scale for name, spec in hardware.items()},
        decode_scale={name: spec.decode_scale for name, spec in hardware.items()},
        overhead_s=next(iter(hardware.values())).request_overhead_s,
        machine=next(iter(fleet.machines.values()), None),
    )


def _corrected(fleet: Fleet, live: Sequence[Row], simulated: Sequence[Row]) -> Fleet:
    """One step towards what was measured."""
    pairs = [(a, b) for a, b in zip(live, simulated, strict=True) if a.complete and not b.failed]
    prefill = _ratios(pairs, TERMS["prefill_s"], lambda row: row.site, fleet)
    decode = _ratios(pairs, TERMS["tpot_s"], lambda row: row.decode, fleet)
    late = [a.ttft_s - b.ttft_s for a, b in pairs if a.report is not None and a.report.queue_s < _idle_s(a)]
    delta_s = statistics.median(late) if late else 0.0

    def improve(name: str, spec: HardwareSpec) -> HardwareSpec:
        return msgspec.structs.replace(
            spec,
            prefill_scale=_clamp(spec.prefill_scale * prefill[name] ** _DAMPING),
            decode_scale=_clamp(spec.decode_scale * decode[name] ** _DAMPING),
            request_overhead_s=max(0.0, spec.request_overhead_s + _DAMPING * delta_s),
        )

    hardware = {name: improve(name, spec) for name, spec in fleet.hardware.items()}
    return msgspec.structs.replace(fleet, hardware=hardware)


def _idle_s(row: Row) -> float:
    """Waiting up to this does not count as a queue."""
    return 0.05 * row.ttft_s


def _ratios(
    pairs: Sequence[tuple[Row, Row]],
    term: Callable[[Row], float],
    worker: Callable[[Row], str],
    fleet: Fleet,
) -> dict[str, float]:
    """measured ÷ simulated by worker, medians weighted by the simulated seconds; 1 where nothing is known."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in fleet.hardware}
    for live, simulated in pairs:
        a, b = term(live), term(simulated)
        if a > 0 and b > 0 and worker(live) == worker(simulated) and worker(live) in samples:
            samples[worker(live)].append((a / b, b**0.5))
    everything = [sample for rows in samples.values() for sample in rows]
    common = _weighted_median(everything) if everything else 1.0
    return {
        name: _weighted_median(rows) if len(rows) >= _LEAST_ROWS else common for name, rows in samples.items()
    }


def _weighted_median(samples: Sequence[tuple[float, float]]) -> float:
    """Of (value, weight) pairs."""
    ordered = sorted(samples)
    half, seen = sum(weight for _, weight in ordered) / 2, 0.0
    for value, weight in ordered:
        seen += weight
        if seen >= half:
            return value
    return ordered[-1][0]


def _clamp(factor: float) -> float:
    low, high = _FACTOR_RANGE
    return min(high, max(low, factor))

"""Step times of a fleet's workers as recorded seconds show them, before anything is replayed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import msgspec
import numpy as np

from prfaas.engine.interface import StepProfile
from simulations.fidelity.decode_fit import decode_samples, fit_decode
from simulations.fidelity.prefill_fit import Prefill, fit_prefills, prefill_prior, prefills, without_decodes
from simulations.fidelity.recording import Row
from simulations.fidelity.step_fit import Coefficients, Sample, alone, misfit
from simulations.fleet import Fleet, HardwareSpec, MachineSpec

MACHINE = "shared"
_GRID = tuple(round(0.05 * step, 2) for step in range(11))
"""Slowdowns that are tried: a few dozen requests do not tell them more finely, and what took longer than the
last one was not held up by its neighbours alone."""


def fit_fleet(fleet: Fleet, live: Sequence[Row], *, one_machine: bool) -> Fleet:
    """`fleet` with decode steps and prefills fitted to rows, and the workers' slowdown on one machine."""
    measured = {
        name: (decode_samples(name, live, spec.chunk_tokens), prefills(name, live, spec.chunk_tokens))
        for name, spec in fleet.hardware.items()
    }
    if not one_machine:
        return _fitted(fleet, measured, None)[0]
    grid = [MachineSpec(beside_prefill=a, beside_decode=b) for a, b in product(_GRID, _GRID)]
    best, _ = min((_fitted(fleet, measured, machine) for machine in grid), key=lambda found: found[1])
    return best


def _fitted(
    fleet: Fleet,
    measured: dict[str, tuple[list[Sample], list[Prefill]]],
    machine: MachineSpec | None,
) -> tuple[Fleet, float]:
    """(fleet, how much is left unexplained) if this is how the workers slow each other."""
    profiles = [
        StepProfile(chunk_tokens=spec.chunk_tokens, **spec.linear) for spec in fleet.hardware.values()
    ]
    answers = [alone(measured[name][0], machine) for name in fleet.hardware]
    decodes = [fit_decode(profile, rows) for profile, rows in zip(profiles, answers, strict=True)]
    prompts = [
        alone(without_decodes(measured[name][1], profile, decode), machine)
        for name, profile, decode in zip(fleet.hardware, profiles, decodes, strict=True)
    ]
    priors = [prefill_prior(profile) for profile in profiles]
    fitted = fit_prefills(priors, [profile.chunk_tokens for profile in profiles], prompts)
    hardware = {
        name: _with_steps(spec, prior, prefill, decode, rows)
        for (name, spec), prior, prefill, decode, rows in zip(
            fleet.hardware.items(), priors, fitted, decodes, prompts, strict=True
        )
    }
    error = sum(map(misfit, answers, decodes)) + sum(map(misfit, prompts, fitted))
    return _on_machine(msgspec.structs.replace(fleet, hardware=hardware), machine), error


def _with_steps(
    spec: HardwareSpec,
    prior: Coefficients,
    prefill: Coefficients,
    decode: Coefficients,
    samples: Sequence[Sample],
) -> HardwareSpec:
    """Fitted steps; the level of prefill against the profile goes to `prefill_scale`."""
    scale = 1.0
    if samples:
        terms = np.array([sample.terms for sample in samples])
        scale = float(np.median(terms @ np.array(prefill) / (terms @ np.array(prior))))
    base_s, token_s, context_s, read_s = (value / scale for value in prefill)
    linear = {"prefill_base_s": base_s, "prefill_token_s": token_s, "prefill_context_s": context_s}
    linear |= dict(zip(("decode_base_s", "decode_sequence_s", "decode_context_s"), decode, strict=True))
    return msgspec.structs.replace(spec, linear=linear, prefill_read_s=read_s, prefill_scale=scale)


def _on_machine(fleet: Fleet, machine: MachineSpec | None) -> Fleet:
    """All workers on one machine."""
    if machine is None:
        return fleet
    clusters = {
        name: msgspec.structs.replace(
            cluster,
            workers={
                group: msgspec.structs.replace(workers, machine=MACHINE)
                for group, workers in cluster.workers.items()
            },
        )
        for name, cluster in fleet.clusters.items()
    }
    return msgspec.structs.replace(fleet, clusters=clusters, machines={MACHINE: machine})

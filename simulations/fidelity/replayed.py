"""A recording's requests replayed in the simulator, told in the same words as the recording."""

from __future__ import annotations

import dataclasses

import numpy as np

from policies.types import PlacementKind, Policy
from router.core.events import Finished, FirstToken, PrefillReported, SchedulerInput
from router.core.policy_loader import load_policy
from simulations.engine.run import RunOptions, simulate
from simulations.fidelity.recorded_policy import RecordedPolicy
from simulations.fidelity.recording import Recording, Row
from simulations.fleet import Fleet
from simulations.result import SERVED
from simulations.workload.trace import Floats


def replay_rows(
    recording: Recording,
    fleet: Fleet,
    *,
    follow: bool,
    first: int | None = None,
    jitter: int | None = None,
) -> list[Row]:
    """What the simulator makes of the recording's requests, row by row.

    Args:
        follow: place every request where it was placed live; else the fleet's policy decides.
        first: replay so many requests only.
        jitter: seed of arrivals that are late by up to a decode step. Whether a request just catches a step
            or has to wait for the next one is chance; replays with several seeds show what it is worth.
    """
    trace = recording.trace()
    if jitter is not None:
        trace = dataclasses.replace(trace, arrival_s=_jittered(recording, trace.arrival_s, jitter))
    trace = trace if first is None else trace.part(0, first)
    reports: dict[int, PrefillReported] = {}
    first_tokens: dict[int, FirstToken] = {}
    ends: dict[int, Finished] = {}

    def listen(item: SchedulerInput) -> None:
        match item:
            case PrefillReported(request_id=name):
                reports[int(name)] = item
            case FirstToken(request_id=name):
                first_tokens[int(name)] = item
            case Finished(request_id=name):
                ends[int(name)] = item
            case _:
                pass

    policy = _recorded(recording) if follow else load_policy(fleet.policy.name, fleet.policy.parameters)
    result = simulate(trace, fleet, policy, RunOptions(seed=recording.seed, causal=True, journal=listen))
    rows = []
    for index, live in enumerate(recording.rows[: len(trace)]):
        placed = result.kind[index] >= 0
        report = reports.get(index)
        rows.append(
            Row(
                request_id=live.request_id,
                arrival_s=float(result.arrival_s[index]),
                prompt_tokens=live.prompt_tokens,
                max_tokens=live.max_tokens,
                decode=result.workers[result.decode[index]] if placed else "",
                site=result.workers[result.site[index]] if placed else "",
                kind=PlacementKind(int(result.kind[index])).label if placed else "",
                predicted_ttft_s=float(result.predicted_ttft_s[index]),
                report=report.report if report is not None else None,
                ttft_s=float(result.ttft_s[index]),
                end_s=float(result.end_s[index] - result.arrival_s[index]),
                completion_tokens=int(result.output_tokens[index]),
                failed=int(result.state[index]) != SERVED,
            )
        )
    return rows


def _jittered(recording: Recording, arrival_s: Floats, seed: int) -> Floats:
    """Arrivals in the same order, each up to a step later."""
    steps = [row.tpot_s for row in recording.rows if row.complete and row.completion_tokens > 1]
    late_s = np.random.default_rng(seed).uniform(0.0, np.median(steps) if steps else 0.0, len(arrival_s))
    jittered: Floats = np.maximum.accumulate(arrival_s + late_s)
    return jittered


def _recorded(recording: Recording) -> Policy:
    """Simulated requests are called by their number in the trace."""
    return RecordedPolicy({str(index): (row.decode, row.site) for index, row in enumerate(recording.rows)})

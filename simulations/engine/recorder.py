"""Columns of what became of each request, and samples of the workers and links."""

from __future__ import annotations

from array import array
from math import nan
from typing import TYPE_CHECKING

import numpy as np

from simulations.result import FAILED, REFUSED, SERVED, UNFINISHED, ResourceUse, RunResult
from simulations.workload.trace import Floats, Ints

if TYPE_CHECKING:
    from router.core.decision import Decision
    from simulations.engine.request import Request
    from simulations.engine.world import World

MOST_SAMPLES = 512
"""Of each resource; when there are more, every other one is dropped."""


class Recorder:
    """Rows in trace order."""

    def __init__(self, requests: int, prompt_tokens: Ints, output_tokens: Ints) -> None:
        self.requests = requests
        self.ended = 0
        self._prompt_tokens = prompt_tokens
        self._output_tokens = output_tokens
        # Compact columns: a million requests must not become tens of millions of Python numbers.
        self.state = array("q", [UNFINISHED]) * requests
        self.refusal = [""] * requests
        self.arrival_s = array("d", [nan]) * requests
        self.ttft_s = array("d", [nan]) * requests
        self.tpot_s = array("d", [nan]) * requests
        self.end_s = array("d", [nan]) * requests
        self.kind = array("q", [-1]) * requests
        self.decode = array("q", [-1]) * requests
        self.site = array("q", [-1]) * requests
        self.decode_cached = array("q", [0]) * requests
        self.site_cached = array("q", [0]) * requests
        self.kv_bytes = array("q", [0]) * requests
        self.attempts = array("q", [0]) * requests
        self.predicted_s = array("d", [nan]) * requests
        self.regret_s = array("d", [nan]) * requests

    def placed(self, request: Request, decision: Decision, decode: int, site: int) -> None:
        row, chosen = request.index, decision.chosen
        candidates = decision.candidates
        self.attempts[row] = request.attempt
        self.kind[row] = candidates.kind.item(chosen)
        self.decode[row] = decode
        self.site[row] = site
        self.predicted_s[row] = candidates.ttft_s.item(chosen)
        self.regret_s[row] = 0.0
        if not decision.least_cost:
            cost_s = candidates.cost_s
            self.regret_s[row] = cost_s.item(chosen) - cost_s.min()

    def served(self, request: Request, end_s: float) -> None:
        row = request.index
        self.state[row] = SERVED
        self.ttft_s[row] = request.first_token_s - request.arrival_s
        if request.output > 1:
            self.tpot_s[row] = (end_s - request.first_token_s) / (request.output - 1)
        self._ended(row, end_s)

    def refused(self, request: Request, reason: str, now_s: float) -> None:
        self.state[request.index] = REFUSED
        self.refusal[request.index] = reason
        self._ended(request.index, now_s)

    def failed(self, request: Request, reason: str, now_s: float) -> None:
        row = request.index
        self.state[row] = FAILED
        self.refusal[row] = reason
        if 0 <= request.first_token_s <= now_s:
            self.ttft_s[row] = request.first_token_s - request.arrival_s
        self._ended(row, now_s)

    def _ended(self, row: int, now_s: float) -> None:
        self.end_s[row] = now_s
        self.ended += 1


class Sampler:
    """Looks at every worker and link on a time grid that grows coarser when the run is long."""

    def __init__(self, world: World, interval_s: float) -> None:
        self._world = world
        self._interval_s = interval_s
        self.times_s: list[float] = []
        self._rows: dict[str, tuple[str, dict[str, list[float]]]] = {}

    def start(self) -> None:
        self._world.loop.at(self._world.loop.now_s, self._sample)

    def _sample(self, _: object) -> None:
        world = self._world
        now_s = world.loop.now_s
        self.times_s.append(now_s)
        for name, worker in world.workers.items():
            cache = worker.cache
            self._add(name, worker.role, "busy_s", world.busy_s(worker, now_s))
            self._add(name, worker.role, "queue", float(worker.waiting_requests))
            self._add(name, worker.role, "running", float(worker.running_requests))
            self._add(name, worker.role, "pages", 1 - (cache.free + cache.idle_pages) / cache.total)
        for name, pipe in world.network.link_pipes.items():
            self._add(name, "link", "busy_s", pipe.moved / pipe.nominal)
            self._add(name, "link", "running", float(len(pipe.streams)))
        if len(self.times_s) >= MOST_SAMPLES:
            self._thin()
        if world.unfinished:
            world.loop.at(now_s + self._interval_s, self._sample)

    def _add(self, name: str, kind: str, quantity: str, value: float) -> None:
        _, columns = self._rows.setdefault(name, (kind, {}))
        column = columns.setdefault(quantity, [])
        # A worker that changed its role has gaps in the former role's quantities only.
        column.append(value)

    def _thin(self) -> None:
        self._interval_s *= 2
        self.times_s = self.times_s[::2]
        for _, columns in self._rows.values():
            for name in columns:
                columns[name] = columns[name][::2]

    def uses(self) -> tuple[ResourceUse, ...]:
        times_s = np.array(self.times_s)
        found = []
        for name, (kind, columns) in self._rows.items():
            busy_s = np.array(columns["busy_s"])
            samples: dict[str, Floats] = {"utilisation": _rate(times_s, busy_s)}
            for quantity, column in columns.items():
                if quantity != "busy_s":
                    samples[quantity] = np.array(column)
            found.append(ResourceUse(name, kind, self._world.total_busy_s(name), samples))
        return tuple(found)


def _rate(times_s: Floats, totals: Floats) -> Floats:
    """Growth per second over the interval that ends at each time; 0 at the first."""
    if len(times_s) < 2:
        return np.zeros(len(times_s))
    rate: Floats = np.concatenate([[0.0], np.diff(totals) / np.maximum(np.diff(times_s), 1e-9)])
    return rate


def result(
    recorder: Recorder,
    sampler: Sampler,
    *,
    policy: str,
    fleet: str,
    trace: str,
    seed: int,
    complete: bool,
    workers: tuple[str, ...],
    first: int,
    cpu_s: float,
) -> RunResult:
    """The run's result without its first `first` requests."""

    def floats(values: array[float]) -> Floats:
        return np.array(values[first:], dtype=np.float64)

    def ints(values: array[int]) -> Ints:
        return np.array(values[first:], dtype=np.int64)

    r = recorder
    return RunResult(
        policy=policy,
        fleet=fleet,
        trace=trace,
        seed=seed,
        complete=complete,
        state=ints(r.state),
        refusal=tuple(r.refusal[first:]),
        arrival_s=floats(r.arrival_s),
        ttft_s=floats(r.ttft_s),
        tpot_s=floats(r.tpot_s),
        end_s=floats(r.end_s),
        prompt_tokens=r._prompt_tokens[first:],
        output_tokens=r._output_tokens[first:],
        kind=ints(r.kind),
        decode=ints(r.decode),
        site=ints(r.site),
        decode_cached_tokens=ints(r.decode_cached),
        site_cached_tokens=ints(r.site_cached),
        kv_bytes=ints(r.kv_bytes),
        attempts=ints(r.attempts),
        predicted_ttft_s=floats(r.predicted_s),
        regret_s=floats(r.regret_s),
        workers=workers,
        times_s=np.array(sampler.times_s),
        resources=sampler.uses(),
        cpu_s=cpu_s,
    )

"""`simulate`: one trace, one fleet, one policy, one seed → one result."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from policies.types import Policy
from router.core.events import SchedulerInput
from simulations.engine.arrivals import Arrivals
from simulations.engine.build import build_world
from simulations.engine.recorder import Sampler, result
from simulations.engine.request import Request
from simulations.engine.worker_spec import FleetError as FleetError
from simulations.fleet import Fleet
from simulations.result import RunResult
from simulations.workload.trace import Trace

_SAMPLES = 256
_SHORTEST_SAMPLE_S = 0.05
_OBJECTS_BETWEEN_COLLECTIONS = 100_000
_LOOK_EVERY = 256
"""Requests between two looks at `progress` and `stop`."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    seed: int = 0
    causal: bool = False
    """Turn n+1 of a session waits for the answer to turn n plus its think time; else arrivals as recorded."""
    journal: Callable[[SchedulerInput], None] | None = None
    """Gets every scheduler input, as the live router's journal does."""
    progress: Callable[[int, int], None] | None = None
    """Called now and then with (requests ended, requests in all)."""
    stop: Callable[[], bool] | None = None
    """Asked now and then; True ends the run with what is known (`RunResult.complete` is False)."""
    drop_first: float = 0.0
    """Share of the requests, by arrival, that only warm the caches and do not appear in the result."""


def simulate(trace: Trace, fleet: Fleet, policy: Policy, options: RunOptions | None = None) -> RunResult:
    """Replay `trace` through the live scheduler against simulated workers and links.

    Ctrl-C ends the run as `RunOptions.stop` does: with what is known.

    Raises:
        FleetError: the fleet cannot hold the trace's requests, or a profile is unknown.
    """
    options = options or RunOptions()
    began_s = time.process_time()
    world = build_world(trace, fleet, policy, seed=options.seed, journal=options.journal)
    arrivals = Arrivals(world, trace, fleet.page_size, causal=options.causal)
    sampler = Sampler(world, max(trace.duration_s / _SAMPLES, _SHORTEST_SAMPLE_S))
    watch = _Watch(options, world.recorder.requests, world.loop.stop)
    world.on_ended = [arrivals.ended, watch.ended]
    sampler.start()
    arrivals.start()
    try:
        with _few_collections():
            world.loop.run()
            world.router.finish()
    except KeyboardInterrupt:
        world.loop.stop()
    return result(
        world.recorder,
        sampler,
        policy=world.router.scheduler.policy,
        fleet=fleet.name,
        trace=trace.name,
        seed=options.seed,
        complete=world.unfinished == 0,
        workers=world.worker_names,
        first=int(options.drop_first * len(trace)),
        cpu_s=time.process_time() - began_s,
    )


@contextmanager
def _few_collections() -> Iterator[None]:
    """Look for cyclic garbage rarely: a run makes next to none, and each look goes through what is alive."""
    former = gc.get_threshold()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS, *former[1:])
    try:
        yield
    finally:
        gc.set_threshold(*former)


class _Watch:
    """Shows progress and asks whether to stop."""

    def __init__(self, options: RunOptions, requests: int, stop: Callable[[], None]) -> None:
        self._options = options
        self._requests = requests
        self._stop = stop
        self._ended = 0

    def ended(self, _: Request) -> None:
        self._ended += 1
        if self._ended % _LOOK_EVERY and self._ended != self._requests:
            return
        if self._options.progress is not None:
            self._options.progress(self._ended, self._requests)
        if self._options.stop is not None and self._options.stop():
            self._stop()

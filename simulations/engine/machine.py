"""Workers that share a machine slow each other: a step's time depends on what the others do meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from prfaas.engine.interface import StepProfile
from simulations.fleet import MachineSpec
from simulations.hardware.step_times import StepLine, StepTimes

if TYPE_CHECKING:
    from simulations.engine.router_side import Worker


class Machine:
    """The workers of one machine; `workers` are those of the world, by name, as they come and go."""

    def __init__(self, spec: MachineSpec, workers: dict[str, Worker]) -> None:
        self._spec = spec
        self._workers = workers
        self.names: list[str] = []

    def slowdown(self, name: str) -> float:
        """Factor on the steps of worker `name` that begin now."""
        computing = decoding = 0
        for other in self.names:
            worker = self._workers.get(other)
            if other == name or worker is None or not worker.alive:
                continue
            if worker.computes_prompt:
                computing += 1
            elif worker.running_requests:
                decoding += 1
        return self._spec.slowdown(computing, decoding)


class SharedStepTimes:
    """Step times that `slowdown` multiplies. It is looked up as each chunk or step begins and holds for its
    whole length: others that come or go meanwhile count from the next one on."""

    chunks_ahead = 1

    def __init__(self, alone: StepTimes, slowdown: Callable[[], float]) -> None:
        self._alone = alone
        self._slowdown = slowdown
        self.chunk_tokens = alone.chunk_tokens
        self.request_overhead_s = alone.request_overhead_s

    def prefill_s(self, new_tokens: int, cached_tokens: int) -> float:
        return self._slowdown() * self._alone.prefill_s(new_tokens, cached_tokens)

    def chunk_s(self, new_tokens: int, cached_tokens: int) -> float:
        return self._slowdown() * self._alone.chunk_s(new_tokens, cached_tokens)

    def decode_line(self, batch: int, context_tokens: float) -> StepLine:
        """Holds for a single step."""
        factor, line = self._slowdown(), self._alone.decode_line(batch, context_tokens)
        return StepLine(factor * line.base_s, factor * line.slope_s, context_tokens)

    def shared_base_s(self) -> float:
        return self._slowdown() * self._alone.shared_base_s()

    def router_profile(self) -> StepProfile:
        return self._alone.router_profile()

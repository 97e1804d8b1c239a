"""Workers that come, go, and change their role."""

from __future__ import annotations

import logging

from policies.types import Command
from simulations.engine.decode_worker import DecodeWorker
from simulations.engine.prefill_worker import PrefillWorker
from simulations.engine.router_side import Worker
from simulations.engine.worker_spec import WorkerSpec
from simulations.engine.world import World

log = logging.getLogger(__name__)
NOTICED_S = 0.25
"""Until the router notices a dead worker: its event stream breaks, and nobody answers the next call."""


class Membership:
    """Makes incarnations and ends them. A role changes as live: the worker takes nothing new, finishes what
    it has, and joins again as another incarnation with an empty cache."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._incarnations: dict[str, int] = {}
        self._phases: dict[str, float] = {}
        self._next_role: dict[str, str] = {}
        world.on_idle = self._on_idle

    def join(self, spec: WorkerSpec, role: str, phase: float | None = None) -> None:
        """A new incarnation of `spec`, with an empty cache.

        Args:
            phase: where in the period its statuses are sent; that of the former incarnation where None.
        """
        number = self._incarnations[spec.name] = self._incarnations.get(spec.name, -1) + 1
        self._phases.setdefault(spec.name, phase or 0.0)
        worker = make_worker(self._world, spec, role, f"{spec.name}#{number}")
        self._world.add_worker(worker)
        self._world.router.joined(worker, self._phases[spec.name])

    def kill(self, name: str) -> None:
        """The worker's process dies with everything on it."""
        world = self._world
        worker = world.workers[name]
        if not worker.alive:
            return
        lost = worker.die()
        world.router.lost(worker, world.router.due_s(world.loop.now_s + NOTICED_S))
        for request in lost:
            if isinstance(worker, DecodeWorker):
                world.end_sending(request)
                world.attempt_failed(request, name, "peer_lost")
            elif request.stream is None or not request.stream.done:
                world.prefill_failed(request, "peer_lost")

    def restart(self, name: str) -> None:
        """A dead worker comes back; one that lives is left alone."""
        worker = self._world.workers[name]
        if not worker.alive:
            self.join(worker.spec, self._next_role.pop(name, worker.role))

    def carry_out(self, command: Command) -> None:
        """An order of the policy: `set_role` with `worker` and `role`; others belong to the policy itself."""
        if command.name != "set_role":
            return
        name, role = command.arguments.get("worker"), command.arguments.get("role")
        worker = self._world.workers.get(str(name))
        if worker is None or role not in ("prefill", "decode"):
            log.warning("event=order_refused order=set_role worker=%s role=%s", name, role)
            return
        if worker.alive and worker.ready and worker.role != role and not self._is_last_decode(worker):
            self._next_role[worker.name] = str(role)
            worker.ready = False
            self._world.router.tell_now(worker)
            if not worker.live:
                self._on_idle(worker)

    def _is_last_decode(self, worker: Worker) -> bool:
        """Without a decode worker nothing is served: such an order is not carried out."""
        others = [w for w in self._world.workers.values() if w is not worker and w.ready]
        return worker.role == "decode" and not any(w.role == "decode" for w in others)

    def _on_idle(self, worker: Worker) -> None:
        role = self._next_role.pop(worker.name, None)
        if role is not None:
            world = self._world
            worker.die()
            world.router.lost(worker, world.router.due_s(world.loop.now_s))
            self.join(worker.spec, role)


def make_worker(world: World, spec: WorkerSpec, role: str, incarnation: str) -> Worker:
    """An incarnation with an empty cache."""
    if role == "decode":
        return DecodeWorker(world, spec, incarnation)
    # The rest must always be able to hold the longest prompt, or waiting ones could block each other.
    longest = -(-spec.model.context_length // spec.page_size)
    return PrefillWorker(world, spec, incarnation, max(0, spec.num_pages - longest))

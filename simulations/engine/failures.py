"""What goes wrong at which time: `Fleet.schedule`."""

from __future__ import annotations

from simulations.engine.membership import Membership
from simulations.engine.request import FETCHING, Request
from simulations.engine.worker_spec import FleetError, rate_bytes_per_s
from simulations.engine.world import World
from simulations.fleet import Fleet, ScheduledChange

SILENCE_S = 1.5
"""As `timeouts.silence`: after so long without a heartbeat a peer session ends with all its grants."""


def schedule(world: World, members: Membership, fleet: Fleet) -> None:
    """Put every scheduled change into the event loop.

    Raises:
        FleetError: a change names an unknown worker or link, or says nothing.
    """
    names = set(world.workers)
    outages = Outages(world, fleet)
    world.network.on_cut = outages.on_cut
    for number, change in enumerate(fleet.schedule):
        where = f"schedule[{number}]"
        at_s = float(change.at)
        if change.worker:
            if change.worker not in names:
                raise FleetError(
                    f"{where}: no worker is called `{change.worker}`: {', '.join(sorted(names))}"
                )
            world.loop.at(at_s, members.restart if change.up else members.kill, change.worker)
        elif change.link:
            if change.link not in fleet.links:
                known = ", ".join(sorted(fleet.links)) or "none"
                raise FleetError(f"{where}: no link is called `{change.link}`: {known}")
            rate_bytes_per_s(change.capacity, f"{where}.capacity")
            world.loop.at(at_s, outages.change, change)
        else:
            delay_s = float(fleet.event_delay) + float(change.router_lag)
            world.loop.at(at_s, world.router.lag, delay_s)


class Outages:
    """Links whose capacity changes. The router is not told: it learns from what it measures, as live."""

    def __init__(self, world: World, fleet: Fleet) -> None:
        self._world = world
        self._fleet = fleet

    def change(self, change: ScheduledChange) -> None:
        """Set the capacity of both directions; at 0, sessions across the link end after a silence."""
        rate = rate_bytes_per_s(change.capacity, "capacity")
        source, target = self._fleet.links[change.link].between
        network = self._world.network
        for name in (f"{source}->{target}", f"{target}->{source}"):
            self._world.links.set_capacity(network.link_pipes[name], rate)
        if rate <= 0:
            self._world.loop.at(self._world.loop.now_s + SILENCE_S, self._on_silence, (source, target))

    def on_cut(self, request: Request) -> None:
        """A grant meets a dead link: it is delivered if the link comes back in time."""
        self._world.loop.at(self._world.loop.now_s + SILENCE_S, self._retry, (request, request.attempt))

    def _on_silence(self, clusters: tuple[str, str]) -> None:
        if not self._world.network.is_down(*clusters):
            return
        for worker in list(self._world.workers.values()):
            if worker.role == "prefill":
                for request in list(worker.live.values()):
                    self._fail_across(request, clusters)

    def _fail_across(self, request: Request, clusters: tuple[str, str]) -> None:
        if request.state != FETCHING or request.site is None or request.decode is None:
            return
        crosses = {request.site.spec.cluster, request.decode.spec.cluster} == set(clusters)
        if crosses and not (request.stream is not None and request.stream.done):
            self._world.prefill_failed(request, "peer_lost")

    def _retry(self, argument: tuple[Request, int]) -> None:
        request, attempt = argument
        if request.attempt != attempt or request.state != FETCHING:
            return
        assert request.site is not None
        assert request.decode is not None
        if self._world.network.is_down(request.site.spec.cluster, request.decode.spec.cluster):
            self._world.prefill_failed(request, "peer_lost")
        else:
            self._world.granted((request, attempt))

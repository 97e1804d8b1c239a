"""The scheduler's tick, once a second while there is anything to do, and the policy's slow orders."""

from __future__ import annotations

from collections.abc import Callable

from policies.types import Command
from simulations.engine.world import World

TICK_S = 1.0
"""As the gateway's."""


class Ticker:
    """Asks the policy for orders and hands them on."""

    def __init__(self, world: World, carry_out: Callable[[Command], None] | None = None) -> None:
        self._world = world
        self._carry_out = carry_out

    def start(self) -> None:
        self._world.loop.at(self._world.loop.now_s + TICK_S, self._tick)

    def _tick(self, _: object) -> None:
        world = self._world
        if not world.unfinished:
            return
        for command in world.router.control(world.loop.now_s):
            if self._carry_out is not None:
                self._carry_out(command)
        world.loop.at(world.loop.now_s + TICK_S, self._tick)

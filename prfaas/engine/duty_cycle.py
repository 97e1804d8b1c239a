"""Keep an engine to a share of its cores, so that several on one machine do not disturb each other."""

from __future__ import annotations

import time
from collections.abc import Callable


class DutyCycle:
    """Rests after work, so that CPU time stays at `share` of elapsed time over any longer stretch.

    On a machine with fewer cores than engines, who computes when decides how fast each one seems, and no
    prediction can hold. Engines whose shares of a core add up to less than one leave each other alone:
    each behaves like a slower device of its own. For demos and tests, as emulated links are.

    Args:
        share: of the engine's threads' time, 0 < share ≤ 1; 1 never rests.
        threads: that the process computes with.
    """

    def __init__(
        self,
        share: float,
        threads: int,
        *,
        cpu_time: Callable[[], float] = time.process_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rest_per_work = (1.0 / share - 1.0) / threads
        self._cpu_time = cpu_time
        self._sleep = sleep
        self._accounted_s = cpu_time()

    def rest(self) -> None:
        """Sleep for the work done since the last call; called after every layer."""
        if self._rest_per_work == 0.0:
            return
        spent_s = self._cpu_time()
        self._sleep((spent_s - self._accounted_s) * self._rest_per_work)
        self._accounted_s = spent_s

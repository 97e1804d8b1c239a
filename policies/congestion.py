"""Short-term correction of a solved threshold by what queues and links show."""

from __future__ import annotations

import math
from dataclasses import dataclass

GAIN = 0.3
"""Logarithm of the factor per mean prefill that one side waits longer. The correction follows the queues as
they are and never adds up: a sum over time swings between the sides, which is worse than no correction."""
BOUND = 2.0
LINK_FACTOR = 1.25
"""At least, while the link is congested."""


@dataclass(frozen=True, slots=True)
class Pressure:
    """How long work waits in either place, and how full the link is."""

    away_queue: float
    """Mean wait for a remote worker, in mean prefills of a request."""
    home_queue: float
    """Mean wait for a prefill worker of the PD cluster, in the same unit."""
    link_utilisation: float


class CongestionFactor:
    """Multiplies the threshold: above 1 keeps more requests at home, below 1 sends more away.

    With hysteresis: congestion starts at the higher of two marks and ends at the lower, so that a
    queue that hovers around one mark does not make the threshold swing. The model that the threshold is
    solved from has no queues, and knows a burst only when it is in the window; this sees it at once.

    Args:
        high, low: marks of the link's utilisation.
        queue_high, queue_low: marks of the difference between the two queues, in prefills.
    """

    def __init__(
        self, high: float = 0.9, low: float = 0.7, queue_high: float = 0.5, queue_low: float = 0.1
    ) -> None:
        self._high, self._low = high, low
        self._queue_high, self._queue_low = queue_high, queue_low
        self._link_congested = self._uneven = False
        self.value = 1.0

    def update(self, pressure: Pressure) -> float:
        """The factor under this pressure."""
        ahead = pressure.away_queue - pressure.home_queue
        self._uneven = abs(ahead) > (self._queue_low if self._uneven else self._queue_high)
        self._link_congested = pressure.link_utilisation > (self._low if self._link_congested else self._high)
        exponent = GAIN * ahead if self._uneven else 0.0
        self.value = math.exp(min(math.log(BOUND), max(-math.log(BOUND), exponent)))
        if self._link_congested:
            self.value = max(self.value, LINK_FACTOR)
        return self.value

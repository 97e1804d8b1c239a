"""The scheduler with the gateway's clock."""

from __future__ import annotations

from prfaas.clock import Clock
from router.core.decision import Decision
from router.core.events import PlaceRequest, SchedulerEvent
from router.core.scheduler import Scheduler


class Brain:
    """Hands inputs to the one scheduler, in the order in which they happened."""

    def __init__(self, scheduler: Scheduler, clock: Clock) -> None:
        self.scheduler = scheduler
        self._clock = clock

    def now(self) -> float:
        """Seconds on the clock that every scheduler input carries."""
        return self._clock.now()

    def apply(self, event: SchedulerEvent) -> None:
        self.scheduler.apply(event)

    def place(self, request: PlaceRequest) -> Decision:
        """Choose and book.

        Raises:
            NoCapacity: the request cannot be placed now.
        """
        return self.scheduler.place(request)

    def preview(self, request: PlaceRequest) -> Decision:
        """Choose without booking.

        Raises:
            NoCapacity: the request cannot be placed now.
        """
        return self.scheduler.preview(request)

"""One session on the sending side: its agent, its link, and the writes between queue and DONE."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from prfaas.kv.layout import KVLayout
from prfaas.transfer.agent import TransferAgent
from prfaas.transfer.counters import LinkMeter
from prfaas.transfer.events import AttemptKey
from prfaas.transfer.link import LinkModel, Passage
from prfaas.transfer.outgoing import Write


@dataclass(frozen=True)
class Flight:
    """A write on the link."""

    write: Write
    passage: Passage


class SendSession:
    """Guarded by the sender's lock, except for `agent`, which is thread safe."""

    def __init__(
        self,
        name: str,
        agent: TransferAgent,
        remote: KVLayout,
        link: LinkModel,
        meter: LinkMeter,
        on_broken: Callable[[str], None],
    ) -> None:
        self.name = name
        self.agent = agent
        self.remote = remote
        self.link = link
        self.meter = meter
        self.on_broken = on_broken
        self.closing = False
        self.broken = False
        """NIXL has lost the peer; `on_broken` has been called."""
        self.turns: deque[AttemptKey] = deque()
        """Attempts in the order in which they may post next."""
        self.flying: dict[int, Flight] = {}
        """By NIXL handle."""
        self._entered: list[tuple[float, int, Flight]] = []
        """Heap of writes that have entered the link and are not posted, by time of posting."""
        self._tags: list[tuple[float, int, bytes]] = []
        """Heap of tags to send on their own, by time."""
        self._in_flight_bytes = 0
        self._sequence = itertools.count()

    @property
    def busy(self) -> bool:
        return bool(self.flying or self._entered or self._tags)

    @property
    def next_post_s(self) -> float:
        return self._entered[0][0] if self._entered else math.inf

    def admit_s(self, now_s: float) -> float:
        """When another write may enter the link; infinity = when one in flight is done."""
        return self.link.admit_s(now_s, self._in_flight_bytes)

    def enter(self, write: Write, now_s: float) -> None:
        """Put a write on the link.

        Raises:
            TransferError: the link is not usable.
        """
        flight = Flight(write, self.link.enter(write.nbytes, now_s))
        heapq.heappush(self._entered, (flight.passage.post_s, next(self._sequence), flight))
        self._in_flight_bytes += write.nbytes
        self.meter.posted(write.nbytes)

    def pop_entered(self, now_s: float) -> Flight | None:
        """The next write to be posted by now."""
        if self.next_post_s > now_s:
            return None
        return heapq.heappop(self._entered)[2]

    def ripe(self, now_s: float) -> list[tuple[int, Flight]]:
        """(handle, flight) of the writes whose end may be noticed by now."""
        return [(handle, flight) for handle, flight in self.flying.items() if flight.passage.done_s <= now_s]

    def pop_tags(self, now_s: float) -> list[bytes]:
        """Tags to be sent on their own by now."""
        due = []
        while self._tags and self._tags[0][0] <= now_s:
            due.append(heapq.heappop(self._tags)[2])
        return due

    def landed(self, flight: Flight, now_s: float) -> None:
        """A write is DONE."""
        write, passage = flight.write, flight.passage
        self._in_flight_bytes -= write.nbytes
        self.meter.done(write.nbytes, write.ready_s, now_s)
        if passage.notify_s is not None:
            heapq.heappush(self._tags, (passage.notify_s, next(self._sequence), write.tag()))

    def lost(self, write: Write) -> None:
        """A write has failed."""
        self._in_flight_bytes -= write.nbytes
        self.meter.failed(write.nbytes)

    def destroyed(self) -> None:
        """The agent is gone, and everything in flight with it."""
        self.meter.dropped(self._in_flight_bytes)
        self._in_flight_bytes = 0
        self.flying.clear()
        self._entered.clear()
        self._tags.clear()

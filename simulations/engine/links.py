"""Links as fluids: max-min fair sharing among streams that can send only what has been computed.

A stream crosses pipes (the source worker's network, the link between two clusters, the destination
worker's network) and takes bytes no faster than they are released: cached pages at once, computed ones
while the prefill runs, fixed state at its end. One that has sent all that is released is capped by its
prefill's rate. Rates change only when a stream begins, catches up, ends, or its release rate changes, so
these are the events. Streams that share no pipe, directly or through others, do not see each other;
one that is alone needs a single event, its end.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from simulations.engine.loop import Loop

_EPSILON_BYTES = 0.5


class Pipe:
    """Something of limited capacity that streams cross."""

    __slots__ = ("capacity", "moved", "name", "nominal", "streams")

    def __init__(self, name: str, capacity: float) -> None:
        self.name = name
        self.capacity = capacity
        """Bytes per second; 0 = outage."""
        self.nominal = max(capacity, 1.0)
        """As configured: what utilisation is a share of."""
        self.moved = 0.0
        """Bytes so far."""
        self.streams: dict[Stream, None] = {}


class Meter:
    """What a sending worker learns of its path to one cluster (the live `LinkMeter`): while bytes wait, the
    rate is a sample of the link; else it is a lower bound only."""

    __slots__ = ("moved", "rtt_s", "sampled", "sampled_s", "sampled_until_s")

    def __init__(self, rtt_s: float) -> None:
        self.rtt_s = rtt_s
        self.moved = 0.0
        self.sampled = 0.0
        self.sampled_s = 0.0
        self.sampled_until_s = 0.0


class Stream:
    """One prompt's KV on its way. `released(t)` is a line until the next knot."""

    __slots__ = (
        "_knots", "_level", "_level_at_s", "_slope", "asked", "at_s", "backlogged", "group", "meter",
        "on_landed", "owner", "parked", "pipes", "rate", "sent", "tail_s", "total",
    )  # fmt: skip

    def __init__(
        self,
        pipes: tuple[Pipe, ...],
        meter: Meter,
        total: float,
        tail_s: float,
        on_landed: Callable[[Stream], None],
        owner: Any = None,
    ) -> None:
        self.owner = owner
        self.pipes = pipes
        self.meter = meter
        self.total = total
        """Bytes to send in all."""
        self.tail_s = tail_s
        """From the last byte sent until the receiver has counted it in."""
        self.on_landed = on_landed
        self.sent = 0.0
        self.rate = 0.0
        self.at_s = 0.0
        """Time up to which `sent` is known."""
        self.backlogged = False
        self.parked = True
        """Not in its pipes: not begun, waiting for its prefill, or over."""
        self.group: object = None
        """Whose next event covers this stream; another group's events are stale."""
        self._level = 0.0
        self._level_at_s = 0.0
        self._slope = 0.0
        self._knots: list[tuple[float, float]] = []
        """(time, released by then), latest first."""

    def release(self, level: float, now_s: float) -> None:
        """`level` bytes in all are released at once."""
        self._level, self._level_at_s, self._slope = level, now_s, 0.0

    def ramp(self, knots: list[tuple[float, float]], now_s: float) -> None:
        """From now on release along `knots` (time, bytes in all), rising; at the last one everything is."""
        self._knots = knots[::-1]
        self._level_at_s = now_s
        self._aim()

    def settle(self, now_s: float) -> None:
        """Account for what was sent since `at_s`: at `rate`, or as fast as it was released where that is
        slower."""
        at_s, sent, rate = self.at_s, self.sent, self.rate
        if now_s <= at_s and not (self._knots and self._knots[-1][0] <= now_s):
            return
        before = sent
        busy_s = busy_bytes = 0.0
        while True:
            knots = self._knots
            until_s = knots[-1][0] if knots and knots[-1][0] < now_s else now_s
            elapsed_s = until_s - at_s
            if elapsed_s > 0:
                slope = self._slope
                waiting = self._level + slope * (at_s - self._level_at_s) - sent
                if waiting > _EPSILON_BYTES or slope > rate:
                    catching_s = waiting / (rate - slope) if rate > slope else inf
                    if catching_s >= elapsed_s:
                        sent += rate * elapsed_s
                        busy_s += elapsed_s
                        busy_bytes += rate * elapsed_s
                    else:
                        busy_s += catching_s
                        busy_bytes += rate * catching_s
                        sent = self._level + slope * (until_s - self._level_at_s)
                else:
                    sent += min(rate, slope) * elapsed_s
                at_s = until_s
            if not knots or knots[-1][0] > now_s:
                break
            self._level_at_s, self._level = knots.pop()
            if not knots:
                self._level = self.total
            self._aim()
        self.at_s, self.sent = now_s, sent
        moved = sent - before
        if moved > 0:
            meter = self.meter
            meter.moved += moved
            if busy_s > 0:
                meter.sampled += busy_bytes
                busy_s = min(busy_s, now_s - meter.sampled_until_s)
                if busy_s > 0:
                    meter.sampled_s += busy_s
                meter.sampled_until_s = now_s
            for pipe in self.pipes:
                pipe.moved += moved

    def through_s(self, rate: float) -> float:
        """When everything is sent if the stream may take `rate` all the time: the release curve is a line
        between knots, so whatever holds it up last is the rate itself or one of them."""
        if rate <= 0:
            return inf
        through_s = self.at_s + (self.total - self.sent) / rate
        level = self._level
        for at_s, next_level in reversed(self._knots):
            # What is released by a jump at the last knot still has to be sent.
            through_s = max(through_s, at_s + (self.total - next_level) / rate)
            level = next_level
        return through_s if self._knots or level >= self.total else inf

    def limit(self) -> float:
        """Bytes per second that it could take now: unbounded while released bytes wait."""
        waiting = self._level + self._slope * (self.at_s - self._level_at_s) - self.sent
        self.backlogged = waiting > _EPSILON_BYTES
        return inf if self.backlogged else self._slope

    def next_event_s(self) -> float:
        """When, at the present rate, something about this stream changes."""
        at_s = self._knots[-1][0] if self._knots else inf
        if self.backlogged and self.rate > 0:
            if not self._knots and self._level >= self.total:
                at_s = self.at_s + (self.total - self.sent) / self.rate
            elif self.rate > self._slope:
                waiting = self._level + self._slope * (self.at_s - self._level_at_s) - self.sent
                at_s = min(at_s, self.at_s + waiting / (self.rate - self._slope))
        return at_s

    @property
    def done(self) -> bool:
        return self.sent >= self.total - _EPSILON_BYTES

    @property
    def idle(self) -> bool:
        """Whether nothing is there to send, and nothing will be until somebody says so."""
        return not self._knots and self._level - self.sent <= _EPSILON_BYTES

    def _aim(self) -> None:
        self._slope = 0.0
        if self._knots:
            until_s, level = self._knots[-1]
            self._slope = (level - self._level) / max(until_s - self._level_at_s, 1e-12)


class Links:
    """All streams under way."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def changed(self, stream: Stream) -> None:
        """More of the stream was released, or is going to be; it may be new."""
        if stream.parked:
            stream.parked = False
            stream.at_s = self._loop.now_s
            for pipe in stream.pipes:
                pipe.streams[stream] = None
        self._share(self._near([stream]))

    def drop(self, stream: Stream) -> None:
        """The stream ends without having sent everything."""
        if stream.parked:
            return
        stream.settle(self._loop.now_s)
        near = self._near([stream])
        self._remove(stream)
        self._share([other for other in near if other is not stream], parted=True)

    def set_capacity(self, pipe: Pipe, bytes_per_s: float) -> None:
        """From now on the pipe carries this."""
        near = self._near(list(pipe.streams))
        for stream in near:
            stream.settle(self._loop.now_s)
        pipe.capacity = bytes_per_s
        self._share(near)

    # ------------------------------------------------------------ inside

    def _on_event(self, argument: tuple[Stream, object]) -> None:
        stream, group = argument
        if stream.group is group:
            self._share(self._near([stream]))

    @staticmethod
    def _near(streams: list[Stream]) -> list[Stream]:
        """`streams` and all that share a pipe with them, directly or through others."""
        if len(streams) == 1:
            for pipe in streams[0].pipes:
                if len(pipe.streams) > 1:
                    break
            else:
                return streams
        found = dict.fromkeys(streams)
        todo, seen = list(streams), set()
        while todo:
            for pipe in todo.pop().pipes:
                if pipe not in seen:
                    seen.add(pipe)
                    for other in pipe.streams:
                        if other not in found:
                            found[other] = None
                            todo.append(other)
        return list(found)

    def _share(self, streams: list[Stream], *, parted: bool = False) -> None:
        """Settle a group of connected streams, end those that are through, share anew among the rest.

        Args:
            parted: one has just been taken from among them, so that they may be several groups.
        """
        now_s = self._loop.now_s
        left = []
        for stream in streams:
            stream.settle(now_s)
            if stream.done:
                self._remove(stream)
                self._loop.at(now_s + stream.tail_s, stream.on_landed, stream)
            elif stream.idle:
                # All that is released is sent and its prefill has yet to begin: out of the others' way.
                self._remove(stream)
            else:
                left.append(stream)
        if len(left) == len(streams) and not parted:
            self._settle_rates(left)
            return
        while left:
            near = self._near(left[:1])
            self._settle_rates(near)
            seen = set(near)
            left = [stream for stream in left if stream not in seen]

    def _settle_rates(self, streams: list[Stream]) -> None:
        """Share among streams that see each other, and schedule what happens to them next."""
        if not streams:
            return
        now_s = self._loop.now_s
        group = object()
        if len(streams) == 1:
            # Alone, a stream needs no event but its end: what it sends follows from its release curve.
            stream = streams[0]
            stream.rate = min([pipe.capacity for pipe in stream.pipes])
            stream.group = group
            next_s = stream.through_s(stream.rate)
        else:
            max_min(streams)
            next_s = inf
            for stream in streams:
                stream.group = group
                next_s = min(next_s, stream.next_event_s())
        if next_s < inf:
            # Rounding may put the next event at this very moment for ever: time must move.
            self._loop.at(max(next_s, now_s + 1e-9), self._on_event, (streams[0], group))

    @staticmethod
    def _remove(stream: Stream) -> None:
        stream.group = None
        stream.parked = True
        stream.rate = 0.0
        for pipe in stream.pipes:
            del pipe.streams[stream]


def max_min(streams: list[Stream]) -> None:
    """Set each stream's rate: the max-min fair share of its pipes, and never above its own limit."""
    limits = {stream: stream.limit() for stream in streams}
    demand: dict[Pipe, float] = {}
    for stream, limit in limits.items():
        stream.rate = limit
        for pipe in stream.pipes:
            demand[pipe] = demand.get(pipe, 0.0) + limit
    # A pipe that carries all that its streams could take holds nobody up.
    room = {pipe: pipe.capacity for pipe, wanted in demand.items() if wanted > pipe.capacity}
    if not room:
        return
    count = dict.fromkeys(room, 0)
    crossed: dict[Stream, list[Pipe]] = {}
    for stream in streams:
        narrow = [pipe for pipe in stream.pipes if pipe in room]
        if narrow:
            crossed[stream] = narrow
            for pipe in narrow:
                count[pipe] += 1
    while crossed:
        share, tightest = inf, None
        for pipe, waiting in count.items():
            if waiting and room[pipe] / waiting < share:
                share, tightest = room[pipe] / waiting, pipe
        share = max(share, 0.0)
        capped = [stream for stream in crossed if limits[stream] <= share]
        settled = capped or [stream for stream, narrow in crossed.items() if tightest in narrow]
        for stream in settled:
            stream.rate = min(limits[stream], share)
            for pipe in crossed.pop(stream):
                room[pipe] -= stream.rate
                count[pipe] -= 1

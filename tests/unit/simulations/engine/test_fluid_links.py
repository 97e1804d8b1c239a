"""Links against cases worked by hand, and conservation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulations.engine.links import Links, Meter, Pipe, Stream
from simulations.engine.loop import Loop


class Bench:
    def __init__(self) -> None:
        self.loop = Loop()
        self.links = Links(self.loop)
        self.landed: dict[str, float] = {}
        self.meter = Meter(0.0)

    def stream(self, name: str, total: float, *pipes: Pipe, tail_s: float = 0.0) -> Stream:
        return Stream(pipes, self.meter, total, tail_s, self.on_landed, name)

    def on_landed(self, stream: Stream) -> None:
        self.landed[stream.owner] = self.loop.now_s

    def send_at(self, at_s: float, stream: Stream) -> None:
        """Everything is there at once."""

        def go(_: object) -> None:
            stream.release(stream.total, self.loop.now_s)
            self.links.changed(stream)

        self.loop.at(at_s, go)

    def ramp_at(self, at_s: float, stream: Stream, knots: list[tuple[float, float]]) -> None:
        def go(_: object) -> None:
            stream.ramp(knots, self.loop.now_s)
            self.links.changed(stream)

        self.loop.at(at_s, go)


def near(seconds: float) -> object:
    return pytest.approx(seconds, abs=1e-6)


def test_two_equal_streams_share_a_link_evenly() -> None:
    bench, pipe = Bench(), Pipe("p", 10.0)
    bench.send_at(0, bench.stream("a", 100, pipe))
    bench.send_at(0, bench.stream("b", 100, pipe))
    bench.loop.run()
    assert bench.landed == {"a": near(20), "b": near(20)}


def test_a_later_stream_slows_the_first_and_inherits_its_share() -> None:
    # a alone until 5 (50 sent), both at 5 B/s until a's 50 left are gone at 15; b has 50 left: 20.
    bench, pipe = Bench(), Pipe("p", 10.0)
    bench.send_at(0, bench.stream("a", 100, pipe))
    bench.send_at(5, bench.stream("b", 100, pipe))
    bench.loop.run()
    assert bench.landed == {"a": near(15), "b": near(20)}


def test_a_stream_limited_by_its_prefill_leaves_the_rest_to_others() -> None:
    # a is computed at 2 B/s for 10 s; b gets 8 B/s meanwhile: 80 bytes in 10 s.
    bench, pipe = Bench(), Pipe("p", 10.0)
    bench.ramp_at(0, bench.stream("a", 20, pipe), [(10, 20)])
    bench.send_at(0, bench.stream("b", 80, pipe))
    bench.loop.run()
    assert bench.landed == {"a": near(10), "b": near(10)}


def test_what_is_released_at_the_end_still_has_to_be_sent() -> None:
    # 15 of 20 bytes by 10 s, the last layer's 5 at its end: half a second more at 10 B/s; then the tail.
    bench, pipe = Bench(), Pipe("p", 10.0)
    bench.ramp_at(0, bench.stream("a", 20, pipe, tail_s=0.25), [(10, 15)])
    bench.loop.run()
    assert bench.landed == {"a": near(10.75)}


def test_a_link_slower_than_the_prefill_is_busy_from_begin_to_end() -> None:
    # Released at 4 B/s then 1 B/s; the link carries 2: behind from the start, level again never before 30/2.
    bench, pipe = Bench(), Pipe("p", 2.0)
    bench.ramp_at(0, bench.stream("a", 30, pipe), [(5, 20), (15, 30)])
    bench.loop.run()
    assert bench.landed == {"a": near(15)}
    assert bench.meter.sampled == pytest.approx(30, rel=1e-3)
    assert bench.meter.sampled_s == pytest.approx(15, rel=1e-3)


def test_source_pair_and_destination_limits_all_hold() -> None:
    # a: source 4; b: destination 3; the link's 10 is left with 3 for c.
    source, link, target = Pipe("s", 4.0), Pipe("l", 10.0), Pipe("d", 3.0)
    bench = Bench()
    for name, total, pipes in (("a", 40, (source, link)), ("b", 30, (link, target)), ("c", 30, (link,))):
        bench.send_at(0, bench.stream(name, total, *pipes))
    bench.loop.run()
    assert bench.landed["b"] == near(10)
    # b takes 3; a and c share the other 7 evenly (3.5 each, below a's 4) until c's 30 are sent.
    assert bench.landed["c"] == near(30 / 3.5)
    # a has 40 - 30 = 10 left at 60/7 s, and then its source's 4 B/s.
    assert bench.landed["a"] == near(30 / 3.5 + 10 / 4)


def test_an_outage_stops_everything_and_a_capacity_change_holds_at_once() -> None:
    bench, pipe = Bench(), Pipe("p", 10.0)
    bench.send_at(0, bench.stream("a", 100, pipe))
    bench.loop.at(5, lambda _: bench.links.set_capacity(pipe, 0.0))
    bench.loop.at(8, lambda _: bench.links.set_capacity(pipe, 5.0))
    bench.loop.run()
    assert bench.landed == {"a": near(18)}


def test_a_dropped_stream_gives_its_share_back() -> None:
    bench, pipe = Bench(), Pipe("p", 10.0)
    a, b = bench.stream("a", 100, pipe), bench.stream("b", 100, pipe)
    bench.send_at(0, a)
    bench.send_at(0, b)
    bench.loop.at(4, lambda _: bench.links.drop(a))
    bench.loop.run()
    assert bench.landed == {"b": near(12)}
    assert a.sent == pytest.approx(20)
    assert pipe.moved == pytest.approx(120)


def test_a_stream_whose_cached_pages_are_sent_waits_out_of_the_way() -> None:
    bench, pipe = Bench(), Pipe("p", 10.0)
    a, crossing = bench.stream("a", 100, pipe), []

    def cached(_: object) -> None:
        a.release(50, bench.loop.now_s)
        bench.links.changed(a)

    bench.loop.at(0, cached)
    bench.send_at(7, bench.stream("b", 30, pipe))
    bench.loop.at(8, lambda _: crossing.append([stream.owner for stream in pipe.streams]))
    bench.ramp_at(11, a, [(20, 100)])
    bench.loop.run()
    assert bench.landed == {"b": near(10), "a": near(20)}
    assert crossing == [["b"]]


streams = st.lists(
    st.tuples(
        st.floats(0, 20),  # begin
        st.floats(1, 200).map(lambda mega: mega * 1e6),  # bytes
        st.floats(0, 10),  # seconds of prefill, 0 = cached
        st.floats(0, 1),  # part that is cached
        st.integers(0, 2),  # source
        st.integers(0, 2),  # target
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(streams)
def test_every_byte_asked_for_crosses_each_of_its_pipes_once(asked: list[tuple]) -> None:
    bench = Bench()
    out = [Pipe(f"out{n}", 7e6 + n * 1e6) for n in range(3)]
    into = [Pipe(f"in{n}", 9e6 - n * 1e6) for n in range(3)]
    link = Pipe("link", 12e6)
    by_pipe: dict[str, float] = {}
    for number, (begin, total, prefill, cached, source, target) in enumerate(asked):
        pipes = (out[source], link, into[target])
        stream = bench.stream(str(number), total, *pipes)
        for pipe in pipes:
            by_pipe[pipe.name] = by_pipe.get(pipe.name, 0.0) + total
        if prefill > 0.01:
            knots = [(begin + prefill / 3, 0.9 * cached * total), (begin + prefill, total)]
            bench.ramp_at(begin, stream, knots)
        else:
            bench.send_at(begin, stream)
    bench.loop.run()
    assert len(bench.landed) == len(asked)
    for pipe in (*out, *into, link):
        assert pipe.moved == pytest.approx(by_pipe.get(pipe.name, 0.0), abs=0.5 * len(asked) + 1e-6)
        assert not pipe.streams
    for number, (begin, total, prefill, *_rest) in enumerate(asked):
        shortest = max(prefill, total / min(out[_rest[1]].capacity, into[_rest[2]].capacity))
        assert bench.landed[str(number)] >= begin + shortest - 1e-3
    assert max(bench.landed.values()) >= sum(total for _, total, *_ in asked) / 12e6 - 1e-3

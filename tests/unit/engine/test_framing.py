"""Frames survive any cutting of the stream; a stream out of step is noticed."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.engine.framing import MAX_FRAME_BYTES, BlockingChannel, FrameReader, FrameWriter
from prfaas.engine.step import RunnerError, RunnerMessage, RunnerReady


@given(st.lists(st.text(max_size=40), max_size=5), st.lists(st.integers(1, 9), min_size=1))
@settings(deadline=None)
def test_any_cut_of_the_stream_gives_the_same_payloads(texts: list[str], cuts: list[int]) -> None:
    frames = [bytes(FrameWriter().frame(RunnerError(step=i, message=text))) for i, text in enumerate(texts)]
    stream, reader, payloads = b"".join(frames), FrameReader(), []
    while stream:
        cut = cuts[len(stream) % len(cuts)]
        payloads += reader.feed(stream[:cut])
        stream = stream[cut:]
    assert payloads == [frame[4:] for frame in frames]


def test_an_absurd_length_is_refused() -> None:
    with pytest.raises(ValueError, match="exceeds"):
        FrameReader().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))


def test_a_blocking_channel_carries_messages_until_the_other_side_closes() -> None:
    left, right = socket.socketpair()
    with left, right:
        sender, receiver = BlockingChannel(left, RunnerMessage), BlockingChannel(right, RunnerMessage)
        sent = [RunnerReady(vocab_size=5), RunnerError(step=1, message="x")]
        for message in sent:
            sender.send(message)
        left.close()
        assert [receiver.receive() for _ in range(3)] == [*sent, None]

"""How writes pass the link to another cluster: as they come, or paced and delayed like an emulated WAN.

On an emulated link a write's last byte leaves when the link's rate allows it, its data lands half a round
trip later, the writer learns of it (DONE) after a whole one, and its notification arrives after one and a
half: what a real link of that length showed. Control messages are delayed by the messengers
(`control_delay_s`).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from prfaas.transfer.agent import TransferError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Passage:
    """When the parts of one write happen, in monotonic seconds; times in the past mean at once."""

    post_s: float
    """Hand it to NIXL."""
    done_s: float
    """Its end may be noticed from now on."""
    notify_s: float | None
    """Send its tag; None = the tag travels with the write."""


class LinkModel(Protocol):
    """The path to another cluster, as one sending process sees it."""

    rtt_s: float
    """Round trip expected; 0 = unknown."""
    control_delay_s: float
    """What messengers add to each control message."""
    max_write_bytes: int
    """Pages are coalesced into writes up to this size."""

    def admit_s(self, now_s: float, in_flight_bytes: int) -> float:
        """When another write may enter the link; infinity = when one in flight is done."""
        ...

    def enter(self, nbytes: int, now_s: float) -> Passage:
        """A write enters the link.

        Raises:
            TransferError: the link is not usable.
        """
        ...


class DirectLink:
    """The network as it is. Writes in flight are bounded, so that attempts take turns on a busy link."""

    control_delay_s = 0.0
    max_write_bytes = 2**20
    DEFAULT_WINDOW_BYTES = 64 * 2**20
    NOTICE_S = 0.005
    """How long the end of a write may go unnoticed on a busy machine."""

    def __init__(self, capacity_bytes_per_s: float = 0.0, rtt_s: float = 0.0) -> None:
        """
        Args:
            capacity_bytes_per_s, rtt_s: what the configuration says of this link; capacity 0 = unknown. Twice
                what it holds until the end of a write is noticed may be in flight.
        """
        self.rtt_s = rtt_s
        held = 2 * int(capacity_bytes_per_s * (rtt_s + self.NOTICE_S))
        self._window_bytes = held + self.max_write_bytes if held else self.DEFAULT_WINDOW_BYTES

    def admit_s(self, now_s: float, in_flight_bytes: int) -> float:
        return now_s if in_flight_bytes < self._window_bytes else math.inf

    def enter(self, nbytes: int, now_s: float) -> Passage:
        return Passage(now_s, now_s, None)


class EmulatedLink:
    """One direction between two clusters, shared by all sending processes of the host through a small file.

    The file holds the time at which the link is next free; each write moves it on by its bytes over the
    rate. A sender enters the link only shortly before its previous write has left it, so senders take
    turns.
    """

    max_write_bytes = 256 * 1024
    LOOKAHEAD_S = 0.010
    """How long before the link is free of our last write the next one may enter: covers scheduling delays."""
    LOCK_DEADLINE_S = 0.2
    MAX_BACKLOG_S = 60.0
    """A link that is booked for longer holds a time from before a reboot."""

    def __init__(self, capacity_bytes_per_s: float, rtt_s: float, state_path: Path) -> None:
        """
        Args:
            state_path: one file per (source cluster, destination cluster); made if missing.

        Raises:
            ValueError: the capacity is not positive or the round trip negative.
            OSError: the file cannot be made.
        """
        if capacity_bytes_per_s <= 0 or rtt_s < 0:
            raise ValueError(f"an emulated link cannot have {capacity_bytes_per_s} bytes/s and rtt {rtt_s} s")
        self.rtt_s = rtt_s
        self.control_delay_s = rtt_s / 2
        self._bytes_per_s = capacity_bytes_per_s
        self._last_sent_s = -math.inf
        state_path.parent.mkdir(parents=True, exist_ok=True)
        # flock belongs to this open file: threads exclude each other too, and a killed process lets go.
        self._fd = os.open(state_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._fd, mmap.PAGESIZE)
        self._state = mmap.mmap(self._fd, mmap.PAGESIZE)

    def admit_s(self, now_s: float, in_flight_bytes: int) -> float:
        return max(now_s, self._last_sent_s - self.LOOKAHEAD_S)

    def enter(self, nbytes: int, now_s: float) -> Passage:
        with self._locked():
            (free_s,) = struct.unpack_from("d", self._state)
            if not 0 <= free_s <= now_s + self.MAX_BACKLOG_S:
                logger.warning("event=emulated_link_reset free_s=%s now_s=%s", free_s, now_s)
                free_s = now_s
            sent_s = max(free_s, now_s) + nbytes / self._bytes_per_s
            struct.pack_into("d", self._state, 0, sent_s)
        self._last_sent_s = sent_s
        return Passage(sent_s + self.rtt_s / 2, sent_s + self.rtt_s, sent_s + 1.5 * self.rtt_s)

    def close(self) -> None:
        """Give up the shared file (which stays)."""
        if self._fd >= 0:
            self._state.close()
            os.close(self._fd)
            self._fd = -1

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        deadline_s = time.monotonic() + self.LOCK_DEADLINE_S
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise TransferError("a stopped process holds the emulated link's file") from None
                time.sleep(0.0002)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

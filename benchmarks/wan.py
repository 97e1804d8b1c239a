"""A real thin, long link on one machine: the referee for transfer benchmarks.

Two network namespaces, each with a TUN device; this process reads packets from one, holds them for the time
that the link's rate, queue and delay ask for, and writes them to the other. TCP sees an ordinary WAN. (`tc
netem` would do the same, but many kernels are built without it.) Needs root and /dev/net/tun.

The namespaces have no names: they live as long as this process or a program inside them, so nothing is left
behind however it ends.

    with Wan(rate_bytes_per_s=25e6, rtt_s=0.04) as wan:
        subprocess.run([*wan.inside("a"), "ping", "-c1", wan.ADDRESS["b"]])
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from types import TracebackType

_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x1001
_START_S = 10.0
_BATCH = 64
_MAX_SLEEP_S = 0.5

libc = ctypes.CDLL(None, use_errno=True)


class WanUnavailable(Exception):
    """The referee link cannot run here; the message says why."""


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends."""
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Wan:
    """The link as a context manager; sides are called `a` and `b`."""

    ADDRESS = {"a": "10.77.0.1", "b": "10.77.0.2"}  # noqa: RUF012
    DEVICE = "wan0"

    def __init__(
        self,
        rate_bytes_per_s: float,
        rtt_s: float,
        queue_bytes: int = 0,
        mtu: int = 1500,
        congestion_control: str = "",
    ) -> None:
        """
        Args:
            rate_bytes_per_s: of IP packets, each way.
            queue_bytes: of each direction; 0 = one bandwidth-delay product. A full queue drops.
            congestion_control: TCP's, for both sides; empty = the machine's default.
        """
        self._settings = {
            "rate_bytes_per_s": rate_bytes_per_s,
            "rtt_s": rtt_s,
            "queue_bytes": queue_bytes or int(rate_bytes_per_s * rtt_s) or 64 * mtu,
            "mtu": mtu,
            "congestion_control": congestion_control,
        }
        self._relay: subprocess.Popen[str] | None = None
        self._namespaces: dict[str, str] = {}

    def inside(self, side: str) -> list[str]:
        """Command prefix that runs a program in the namespace of `side`.

        UCX finds devices through /sys, which shows those of the namespace that it was mounted in.
        """
        enter = ["nsenter", f"--net={self._namespaces[side]}", "unshare", "--mount"]
        return [*enter, "sh", "-c", 'mount -t sysfs sysfs /sys && exec "$@"', "sh"]

    def __enter__(self) -> Wan:
        if os.geteuid() != 0:
            raise WanUnavailable("the referee link needs root (network namespaces); use --emulated")
        if not os.path.exists("/dev/net/tun"):
            raise WanUnavailable("the referee link needs /dev/net/tun; use --emulated")
        self._relay = subprocess.Popen(
            [sys.executable, __file__, json.dumps(self._settings)],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
        )
        assert self._relay.stdout is not None
        readable, _, _ = select.select([self._relay.stdout], [], [], _START_S)
        line = self._relay.stdout.readline() if readable else ""
        if not line:
            self.close()
            raise WanUnavailable("the relay did not start: its error stands above")
        self._namespaces = json.loads(line)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the relay; the namespaces go with the last program in them."""
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
            if self._relay.stdout is not None:
                self._relay.stdout.close()
            self._relay = None


class Direction:
    """One direction of the link: a tail-drop queue, a rate, a delay."""

    def __init__(
        self, source: int, sink: int, rate_bytes_per_s: float, delay_s: float, queue_bytes: int
    ) -> None:
        self.source = source
        self._sink = sink
        self._rate_bytes_per_s = rate_bytes_per_s
        self._delay_s = delay_s
        self._queue_s = queue_bytes / rate_bytes_per_s
        self._free_s = 0.0
        self._held: deque[tuple[float, bytes]] = deque()
        self.dropped = 0

    @property
    def next_s(self) -> float:
        return self._held[0][0] if self._held else float("inf")

    def take(self) -> None:
        """Read what has come, at most a batch of it."""
        for _ in range(_BATCH):
            try:
                packet = os.read(self.source, 65536)
            except BlockingIOError:
                return
            now_s = time.monotonic()
            start_s = max(self._free_s, now_s)
            if start_s - now_s > self._queue_s:
                self.dropped += 1
                continue
            self._free_s = start_s + len(packet) / self._rate_bytes_per_s
            self._held.append((self._free_s + self._delay_s, packet))

    def give(self) -> None:
        """Deliver what is due."""
        now_s = time.monotonic()
        while self._held and self._held[0][0] <= now_s:
            try:
                os.write(self._sink, self._held.popleft()[1])
            except BlockingIOError:
                self.dropped += 1


def make_side(address: str, mtu: int, congestion_control: str) -> tuple[int, int]:
    """Move this process to a new namespace with a TUN device; (TUN descriptor, namespace descriptor)."""
    if libc.unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "cannot make a network namespace")
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH", Wan.DEVICE.encode(), _IFF_TUN_NO_PI))
    algorithm = ["congctl", congestion_control] if congestion_control else []
    for command in (
        ["ip", "link", "set", "lo", "up"],
        ["ip", "link", "set", Wan.DEVICE, "mtu", str(mtu), "txqueuelen", "1000", "up"],
        ["ip", "addr", "add", f"{address}/24", "dev", Wan.DEVICE],
        ["ip", "route", "replace", "10.77.0.0/24", "dev", Wan.DEVICE, "src", address, *algorithm],
    ):
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    return tun, os.open("/proc/self/ns/net", os.O_RDONLY)


def relay(settings: dict[str, float], congestion_control: str) -> None:
    """Make both sides, say where they are, and carry packets until killed."""
    mtu, delay_s = int(settings["mtu"]), settings["rtt_s"] / 2
    sides = {name: make_side(address, mtu, congestion_control) for name, address in Wan.ADDRESS.items()}
    (a, _), (b, _) = sides["a"], sides["b"]
    rate, queue_bytes = settings["rate_bytes_per_s"], int(settings["queue_bytes"])
    directions = [Direction(a, b, rate, delay_s, queue_bytes), Direction(b, a, rate, delay_s, queue_bytes)]
    print(json.dumps({name: f"/proc/{os.getpid()}/fd/{ns}" for name, (_, ns) in sides.items()}), flush=True)
    while True:
        pause_s = min(direction.next_s for direction in directions) - time.monotonic()
        ready, _, _ = select.select([a, b], [], [], min(max(pause_s, 0.0), _MAX_SLEEP_S))
        for direction in directions:
            if direction.source in ready:
                direction.take()
            direction.give()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="relay of the referee link (started by benchmarks/transfer.py)"
    )
    parser.add_argument("settings", type=json.loads)
    arguments = parser.parse_args().settings
    relay(arguments, str(arguments.pop("congestion_control")))

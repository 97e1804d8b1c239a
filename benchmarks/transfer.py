"""Layer streaming over a WAN: how long after the last layer's compute does the KV stand at the receiver?

A sending and a receiving process (real `PageSender`, `PageReceiver` and NIXL) on the two sides of the
referee link (`wan.py`; needs root), or of an emulated link on loopback (`--emulated`). A third process
plays the engine: it bumps the layer counter at a settable pace. Control messages cross the same link. All
processes share one monotonic clock.

    python benchmarks/transfer.py                  # 200 Mbit/s, 40 ms, 20 runs of each case
    python benchmarks/transfer.py --emulated --runs 5

Bars: with compute longer than transfer, tail ≤ 1.5 RTT + last layer's bytes ÷ rate + 20 ms; with transfer
longer than compute, ≥ 90 % of the link's rate. Ends with one JSON line; exit status 1 if a bar is missed, 2
if it cannot run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from wan import Wan, WanUnavailable, die_with_parent

from prfaas.engine.interface import ChunkPlan
from prfaas.kv.layout import CacheGroup, CompatRecord, KVLayout
from prfaas.kv.shared_buffer import SharedBuffer, SharedLayerCounter
from prfaas.protocol.messages import Hello, Welcome
from prfaas.transfer.agent import AgentOptions
from prfaas.transfer.checksums import page_checksums
from prfaas.transfer.events import AttemptKey, ReceiveComplete, SendFinished
from prfaas.transfer.link import DirectLink, EmulatedLink, LinkModel
from prfaas.transfer.receiver import PageReceiver
from prfaas.transfer.sender import PageSender
from prfaas.units import Rate, Seconds

SLACK_S = 0.020
WANTED_SHARE = 0.90
RUN_DEADLINE_S = 60.0
PAUSE_S = 0.1


class Setup(msgspec.Struct, frozen=True):
    """What all processes of one benchmark must know."""

    rate_bytes_per_s: float
    rtt_s: float
    layers: int
    chunks: int
    pages_per_chunk: int
    page_size: int
    kv_heads: int
    head_dim: int
    emulated_state: str
    """File of the emulated link; empty = the real link."""
    host: str
    """Where the sender listens."""
    devices: str

    @property
    def layout(self) -> KVLayout:
        group = CacheGroup("full", tuple(range(self.layers)), self.kv_heads, self.head_dim)
        return KVLayout((group,), self.page_size, "float32", self.chunks * self.pages_per_chunk)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one chunk."""
        return self.pages_per_chunk * self.layout.page_bytes

    @property
    def transfer_s(self) -> float:
        """The whole KV at the link's rate."""
        return self.layout.pool_bytes / self.rate_bytes_per_s


class Case(msgspec.Struct, frozen=True, tag="case"):
    """One way to run."""

    name: str
    pace: float
    """Compute time over transfer time."""
    streamed: bool
    """Each layer as soon as it is computed; else everything after the last one."""


CASES = (
    Case("compute longer, streamed", 1.3, True),
    Case("compute longer, at the end", 1.3, False),
    Case("transfer longer, streamed", 0.3, True),
    Case("transfer longer, at the end", 0.3, False),
)


class Start(msgspec.Struct, frozen=True, tag="start"):
    request_id: str
    case: Case


class Computed(msgspec.Struct, frozen=True, tag="computed"):
    """Monotonic times at the sending side, and what the sender itself measured."""

    first_layer_s: float
    last_layer_s: float
    transfer_s: float
    tail_s: float
    link_bytes_per_s: float
    """Estimate from the link counters so far; 0 = no sample."""
    checksums: list[int]


class Sample(msgspec.Struct, frozen=True):
    tail_s: float
    """Complete at the receiver - last layer computed."""
    ready_s: float
    """Complete at the receiver - first layer's compute began."""
    share: float
    """Bytes ÷ (first layer computed, or everything where not streamed, → complete, less 1.5 RTT) ÷ the
    link's rate."""


Frame = Hello | Welcome | Start | Computed


class Channel:
    """Length-prefixed msgpack frames; delayed where the link is emulated."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float) -> None:
        self._reader, self._writer, self._delay_s = reader, writer, delay_s
        self._decoder = msgspec.msgpack.Decoder(Frame)

    async def send(self, frame: Frame) -> None:
        await asyncio.sleep(self._delay_s)
        data = msgspec.msgpack.encode(frame)
        self._writer.write(len(data).to_bytes(4, "big") + data)
        await self._writer.drain()

    async def receive(self) -> Frame:
        async with asyncio.timeout(RUN_DEADLINE_S):
            size = int.from_bytes(await self._reader.readexactly(4), "big")
            return self._decoder.decode(await self._reader.readexactly(size))

    def close(self) -> None:
        self._writer.close()


def make_link(setup: Setup) -> LinkModel:
    if setup.emulated_state:
        return EmulatedLink(setup.rate_bytes_per_s, setup.rtt_s, Path(setup.emulated_state))
    return DirectLink(setup.rate_bytes_per_s, setup.rtt_s)


# ---------------------------------------------------------------- the engine's stand-in


def play_engine(counter_fd: int) -> None:
    """For each line `bumps seconds`: bump the counter at that pace; answer `start first last` times."""
    counter = SharedLayerCounter.attach(counter_fd)
    for line in sys.stdin:
        bumps, layer_s = int(line.split()[0]), float(line.split()[1])
        start_s = time.monotonic()
        times = []
        for bump in range(1, bumps + 1):
            time.sleep(max(0.0, start_s + bump * layer_s - time.monotonic()))
            counter.increment()
            times.append(time.monotonic())
        print(start_s, times[0], times[-1], flush=True)


@contextlib.asynccontextmanager
async def engine(counter: SharedLayerCounter) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        "--engine",
        str(counter.fd),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[counter.fd],
        preexec_fn=die_with_parent,
    )
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


async def compute(process: asyncio.subprocess.Process, bumps: int, layer_s: float) -> tuple[float, float]:
    """Have the engine bump; (time of the first bump, of the last)."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{bumps} {layer_s}\n".encode())
    _, first_s, last_s = map(float, (await process.stdout.readline()).split())
    return first_s, last_s


# ---------------------------------------------------------------- sending side


async def send(setup: Setup) -> None:
    """Serve one receiver; prints the port."""
    ready: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
    server = await asyncio.start_server(lambda r, w: ready.put_nowait((r, w)), setup.host, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    link = make_link(setup)
    channel = Channel(*await ready.get(), link.control_delay_s)
    layout = setup.layout
    pool, counter = SharedBuffer(layout.pool_bytes), SharedLayerCounter()
    pool.array[:] = 0xA5
    options = AgentOptions(net_devices=setup.devices)
    sender = PageSender(pool, layout, counter, asyncio.get_running_loop(), options=options)
    hello = await channel.receive()
    assert isinstance(hello, Hello)
    metadata = await sender.open(hello, link)
    sender.observe_rtt(hello.cluster, setup.rtt_s)
    await channel.send(Welcome(worker="send", incarnation="1", agent_metadata=metadata))
    async with engine(counter) as process:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                start = await channel.receive()
                assert isinstance(start, Start)
                await channel.send(await send_once(setup, sender, hello.session, counter, process, start))
    await sender.stop()


async def send_once(
    setup: Setup,
    sender: PageSender,
    session: str,
    counter: SharedLayerCounter,
    process: asyncio.subprocess.Process,
    start: Start,
) -> Computed:
    layout, case, key = setup.layout, start.case, AttemptKey(start.request_id, 1)
    over: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    pages = {page: page for page in range(layout.num_pages)}
    # Other bytes in every run: what arrived earlier must not pass for what arrives now.
    pool = sender._buffer.array.view("uint64")
    pool += int.from_bytes(start.request_id.encode()[:4], "big") | 1
    sender.begin(session, key, 0, list(pages), over.set_result)
    if case.streamed:
        announce_all(setup, sender, key, counter.value(), pages)
    bumps = setup.layers * setup.chunks
    first_s, last_s = await compute(process, bumps, case.pace * setup.transfer_s / bumps)
    if not case.streamed:
        sender.send_cached(key, pages)
    sender.end(key)
    event = await asyncio.wait_for(over, RUN_DEADLINE_S)
    assert isinstance(event, SendFinished), event
    (counters,) = sender.counters()
    seen = counters.sampled_s_total
    return Computed(
        first_layer_s=first_s,
        last_layer_s=last_s,
        transfer_s=event.stats.transfer_s,
        tail_s=event.stats.tail_s,
        link_bytes_per_s=counters.sampled_bytes_total / seen if seen else 0.0,
        checksums=page_checksums(sender._buffer.array, layout, [0, layout.num_pages - 1]),
    )


def announce_all(setup: Setup, sender: PageSender, key: AttemptKey, done: int, pages: dict[int, int]) -> None:
    tokens = setup.pages_per_chunk * setup.page_size
    for chunk in range(setup.chunks):
        plan = ChunkPlan(
            sequence_id=key.request_id,
            start_token=chunk * tokens,
            end_token=(chunk + 1) * tokens,
            layers_done_before=done + chunk * setup.layers,
            last=chunk == setup.chunks - 1,
        )
        sender.announce(key, plan, pages)


# ---------------------------------------------------------------- receiving side


async def receive(setup: Setup, port: int, runs: int) -> None:
    """Run every case; prints a JSON object: samples of each case, and the sender's link estimate."""
    channel = Channel(*await asyncio.open_connection(setup.host, port), make_link(setup).control_delay_s)
    layout, session = setup.layout, uuid.uuid4().hex
    pool = SharedBuffer(layout.pool_bytes)
    options = AgentOptions(net_devices=setup.devices)
    receiver = PageReceiver(pool, layout, asyncio.get_running_loop(), quarantine_s=5, options=options)
    hello = Hello(
        session=session,
        worker="receive",
        cluster="pd",
        incarnation="1",
        compat=CompatRecord(1, "w", "t", "gqa", "HND", setup.page_size, "float32", layout.groups),
        layout=layout,
        pool_address=pool.address,
        agent_metadata=await receiver.open(session, lambda due: sys.exit(str(due))),
    )
    await channel.send(hello)
    welcome = await channel.receive()
    assert isinstance(welcome, Welcome)
    receiver.connect(session, welcome.agent_metadata)
    warm_up = Case("warm-up", 0.3, True)
    await receive_once(setup, channel, receiver, session, warm_up)
    samples: dict[str, list[Sample]] = {case.name: [] for case in CASES}
    estimate = 0.0
    for _ in range(runs):  # cases take turns, so that a disturbance hits all of them
        for case in CASES:
            sample, estimate = await receive_once(setup, channel, receiver, session, case)
            samples[case.name].append(sample)
            print(f"{case.name}: tail {sample.tail_s * 1e3:.1f} ms", file=sys.stderr, flush=True)
            await asyncio.sleep(PAUSE_S)
    channel.close()
    await receiver.stop()
    print(msgspec.json.encode({"samples": samples, "link_bytes_per_s": estimate}).decode(), flush=True)


async def receive_once(
    setup: Setup, channel: Channel, receiver: PageReceiver, session: str, case: Case
) -> tuple[Sample, float]:
    key = AttemptKey(uuid.uuid4().hex, 1)
    complete: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def on_event(event: object) -> None:
        assert isinstance(event, ReceiveComplete), event
        complete.set_result(time.monotonic())

    layout = setup.layout
    receiver.expect(session, key, 0, range(layout.num_pages), on_event)
    await channel.send(Start(key.request_id, case))
    complete_s = await asyncio.wait_for(complete, RUN_DEADLINE_S)
    computed = await channel.receive()
    assert isinstance(computed, Computed)
    arrived = page_checksums(receiver._buffer.array, layout, [0, layout.num_pages - 1])
    assert arrived == computed.checksums, "other bytes arrived than were sent"
    layer_s = case.pace * setup.transfer_s / (setup.layers * setup.chunks)
    began_s = computed.first_layer_s if case.streamed else computed.last_layer_s
    moving_s = complete_s - began_s - 1.5 * setup.rtt_s
    sample = Sample(
        tail_s=complete_s - computed.last_layer_s,
        ready_s=complete_s - computed.first_layer_s + layer_s,
        share=layout.pool_bytes / moving_s / setup.rate_bytes_per_s,
    )
    return sample, computed.link_bytes_per_s


# ---------------------------------------------------------------- the whole


def measure(setup: Setup, runs: int, sending: list[str], receiving: list[str]) -> dict[str, Any]:
    """Run both sides (each with its command prefix) and return what the receiver printed."""
    script = [sys.executable, __file__, "--setup", msgspec.json.encode(setup).decode()]
    sender = subprocess.Popen(
        [*sending, *script, "--send"], stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent
    )
    try:
        assert sender.stdout is not None
        port = sender.stdout.readline().strip()
        budget_s = 60 + runs * sum((1 + case.pace) * setup.transfer_s + 2 for case in CASES)
        result = subprocess.run(
            [*receiving, *script, "--receive", port, "--runs", str(runs)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=budget_s,
            preexec_fn=die_with_parent,
        )
    finally:
        sender.kill()
        sender.wait()
        if sender.stdout is not None:
            sender.stdout.close()
    return dict(json.loads(result.stdout))


def report(setup: Setup, measured: dict[str, Any], link: str) -> bool:
    """Print the table and the JSON line; whether both bars are met."""
    bound_s = 1.5 * setup.rtt_s + setup.layer_bytes / setup.rate_bytes_per_s + SLACK_S
    medians = {
        name: {field: statistics.median(sample[field] for sample in rows) for field in rows[0]}
        for name, rows in measured["samples"].items()
    }
    runs = len(measured["samples"][CASES[0].name])
    print(
        f"\n{setup.layout.pool_bytes / 1e6:.1f} MB of KV: {setup.chunks} chunks x {setup.layers} layers x "
        f"{setup.layer_bytes / 1e3:.0f} kB over {link}, medians of {runs}\n"
    )
    print(f"{'case':<30}{'tail ms':>10}{'ready ms':>10}{'% of rate':>11}   bar")
    passed = {}
    for case in CASES:
        row, bar = medians[case.name], ""
        if case.streamed and case.pace > 1:
            passed[case.name] = row["tail_s"] <= bound_s
            bar = f"tail <= {bound_s * 1e3:.1f} ms: {'pass' if passed[case.name] else 'FAIL'}"
        elif case.streamed:
            passed[case.name] = row["share"] >= WANTED_SHARE
            bar = f"share >= {WANTED_SHARE:.0%}: {'pass' if passed[case.name] else 'FAIL'}"
        print(
            f"{case.name:<30}{row['tail_s'] * 1e3:>10.1f}{row['ready_s'] * 1e3:>10.1f}"
            f"{row['share'] * 100:>11.1f}   {bar}"
        )
    print()
    ends = [medians[case.name]["ready_s"] for case in CASES]
    summary = {
        "link": link, "tail_s": medians[CASES[0].name]["tail_s"], "tail_bound_s": bound_s,
        "share": medians[CASES[2].name]["share"],
        "gain_compute_longer_s": ends[1] - ends[0], "gain_transfer_longer_s": ends[3] - ends[2],
        "link_estimate_bytes_per_s": measured["link_bytes_per_s"],
        "passed": all(passed.values()), "medians": medians,
    }  # fmt: skip
    print(json.dumps(summary))
    return all(passed.values())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rate", default="200Mbit", help="of the link (default %(default)s)")
    parser.add_argument("--rtt", default="40ms", help="of the link (default %(default)s)")
    parser.add_argument("--runs", type=int, default=20, help="of each case (default %(default)s)")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--chunks", type=int, default=3)
    parser.add_argument("--pages-per-chunk", type=int, default=8, help="8 pages of 32 tokens = 256 tokens")
    parser.add_argument("--mtu", type=int, default=1500, help="of the referee link")
    parser.add_argument("--congestion", default="", help="TCP congestion control on the referee link")
    parser.add_argument("--emulated", action="store_true", help="emulated link on loopback; no root needed")
    parser.add_argument("--setup", help=argparse.SUPPRESS)
    parser.add_argument("--send", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--receive", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    if arguments.engine is not None:
        play_engine(arguments.engine)
        return 0
    if arguments.setup:
        setup = msgspec.json.decode(arguments.setup, type=Setup)
        side = send(setup) if arguments.send else receive(setup, arguments.receive, arguments.runs)
        asyncio.run(side)
        return 0
    with tempfile.TemporaryDirectory(prefix="prfaas-bench-") as folder:
        setup = Setup(
            rate_bytes_per_s=float(Rate.parse(arguments.rate)),
            rtt_s=float(Seconds.parse(arguments.rtt)),
            layers=arguments.layers,
            chunks=arguments.chunks,
            pages_per_chunk=arguments.pages_per_chunk,
            page_size=32,
            kv_heads=3,
            head_dim=64,
            emulated_state=f"{folder}/link" if arguments.emulated else "",
            host="127.0.0.1" if arguments.emulated else Wan.ADDRESS["a"],
            devices="lo" if arguments.emulated else Wan.DEVICE,
        )
        described = f"{arguments.rate}, rtt {arguments.rtt}"
        if arguments.emulated:
            passed = report(setup, measure(setup, arguments.runs, [], []), f"an emulated link of {described}")
        else:
            try:
                with Wan(setup.rate_bytes_per_s, setup.rtt_s, 0, arguments.mtu, arguments.congestion) as wan:
                    measured = measure(setup, arguments.runs, wan.inside("a"), wan.inside("b"))
            except WanUnavailable as error:
                print(f"cannot run: {error}", file=sys.stderr)
                return 2
            passed = report(setup, measured, f"the referee link of {described}, mtu {arguments.mtu}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())

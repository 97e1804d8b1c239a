"""A worker's transfer side in a process of its own, driven by JSON lines; for test_transfer_peers.py.

    {"do": "hello"}                           opens a receive agent → {"hello": …}
    {"do": "connect", "metadata", "pages"}    expects the pages     → {"expecting": …}
    {"do": "open", "hello"}                   opens a send agent    → {"metadata": …}
    {"do": "send", "pages"}
    {"do": "count", "byte"}                   → {"count": bytes of the pool that have this value}

Every event is printed as {"event": its type, …}.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from prfaas.kv.layout import CacheGroup, CompatRecord, KVLayout
from prfaas.kv.shared_buffer import SharedBuffer, SharedLayerCounter
from prfaas.protocol.messages import Hello
from prfaas.transfer.agent import AgentOptions
from prfaas.transfer.events import AttemptKey
from prfaas.transfer.link import EmulatedLink
from prfaas.transfer.receiver import PageReceiver
from prfaas.transfer.sender import PageSender

GROUP = CacheGroup(kind="full", layers=(0, 1), kv_heads=4, head_dim=64)
LAYOUT = KVLayout(groups=(GROUP,), page_size=32, dtype="float32", num_pages=512)
"""64 MiB: more than sockets buffer."""
SEND_BYTES_PER_S = 20e6
"""A send takes over three seconds: a parent that is late still stops it in the middle."""
COMPAT = CompatRecord(1, "w", "t", "gqa", "HND", 32, "float32", (GROUP,))
OPTIONS = AgentOptions(net_devices="lo")
KEY = AttemptKey("request", 1)
FILL = 0xA5


def encode(message: msgspec.Struct) -> str:
    return base64.b64encode(msgspec.msgpack.encode(message)).decode()


def hello(session: str, address: int, metadata: bytes) -> Hello:
    return Hello(
        session=session,
        worker="w",
        cluster="pd",
        incarnation="1",
        compat=COMPAT,
        layout=LAYOUT,
        pool_address=address,
        agent_metadata=metadata,
    )


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def on_event(event: object) -> None:
    say(event=type(event).__name__)


async def main(scratch: Path) -> None:
    link = EmulatedLink(SEND_BYTES_PER_S, 0.0, scratch / "link")
    loop = asyncio.get_running_loop()
    pool = SharedBuffer(LAYOUT.pool_bytes)
    sender = PageSender(pool, LAYOUT, SharedLayerCounter(), loop, options=OPTIONS)
    receiver = PageReceiver(pool, LAYOUT, loop, quarantine_s=60, options=OPTIONS)
    reader = asyncio.StreamReader(limit=2**20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        command = json.loads(line)
        session = command["session"]
        if command["do"] == "hello":
            metadata = await receiver.open(session, on_event)
            say(hello=encode(hello(session, pool.address, metadata)))
        elif command["do"] == "open":
            pool.array[:] = FILL
            opening = msgspec.msgpack.decode(base64.b64decode(command["hello"]), type=Hello)
            say(metadata=base64.b64encode(await sender.open(opening, link)).decode())
        elif command["do"] == "connect":
            receiver.connect(session, base64.b64decode(command["metadata"]))
            receiver.expect(session, KEY, 0, range(command["pages"]), on_event)
            say(expecting=command["pages"])
        elif command["do"] == "count":
            say(count=int((pool.array == command["byte"]).sum()))
        elif command["do"] == "send":
            sender.begin(session, KEY, 0, range(command["pages"]), on_event)
            sender.send_cached(KEY, {page: page for page in range(command["pages"])})
            sender.end(KEY)
    await sender.stop()
    await receiver.stop()
    link.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(main(Path(directory)))

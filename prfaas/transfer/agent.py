"""One NIXL agent for one session: a thin, typed wrapper that can be destroyed, which is what fences a peer.

Facts this file leans on (measured with NIXL 1.5, UCX over TCP): the default progress thread burns a core,
so it is off and our pollers drive progress; releasing a handle in flight, removing the peer or
deregistering memory do not stop a transfer, destroying either side's agent does; a notification leaves only
when the writer polls the finished write.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prfaas.errors import PrfaasError
from prfaas.kv.layout import KVLayout

logger = logging.getLogger(__name__)

MAX_METADATA_BYTES = 64 * 1024
_BACKEND = "UCX"
_MEMORY = "DRAM"
_ADDRESS_LIMIT = 2**63


class TransferError(PrfaasError):
    """NIXL refused something, or lost the peer; the session is of no further use."""


@dataclass(frozen=True)
class AgentOptions:
    """What every agent of a worker is made with."""

    net_devices: str = ""
    """Network devices for UCX, comma separated (`lo`, `eth0`); empty = UCX_NET_DEVICES, else all."""
    transports: str = "tcp,self"
    """UCX_TLS where the environment does not set it. Shared memory transports copy inside the posting
    call."""
    num_workers: int = 1
    """UCX workers; more than one on both sides spreads a peer over several connections."""


DEFAULT_OPTIONS = AgentOptions()


def devices_for(host: str) -> str:
    """`AgentOptions.net_devices` for a worker listening on `host`: loopback only if it can have no other
    peers.

    UCX would otherwise open a connection on an outside interface, too.
    """
    if "UCX_NET_DEVICES" in os.environ:
        return ""
    return "lo" if host in ("localhost", "::1") or host.startswith("127.") else ""


def _nixl_api() -> Any:
    """The NIXL module. A concrete build comes first: the meta package `nixl` imports torch to choose one."""
    # Both log to stdout otherwise, and UCX reads its setting when it is loaded.
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    for name in ("nixl_cu12", "nixl_cu13", "nixl"):
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(f"{name}._api")
    raise TransferError("NIXL is not installed: pip install nixl-cu12 (its CPU path needs no CUDA)")


def pool_descriptors(layout: KVLayout, address: int) -> npt.NDArray[np.uint64]:
    """(layers · pages, 3) uint64 rows (address, bytes, device 0): every (layer, page) in memory order, so
    that `layout.descriptor_index` indexes it."""
    count = layout.num_layers * layout.num_pages
    rows = np.zeros((count, 3), dtype=np.uint64)
    rows[:, 0] = np.uint64(address) + np.arange(count, dtype=np.uint64) * np.uint64(layout.page_bytes)
    rows[:, 1] = layout.page_bytes
    return rows


def check_remote_pool(ours: KVLayout, theirs: KVLayout, address: int) -> None:
    """Whether a peer's pool can take our pages.

    Raises:
        TransferError: its pages have another shape, or its addresses are impossible.
    """
    if theirs.num_layers != ours.num_layers or theirs.page_bytes != ours.page_bytes:
        raise TransferError(
            f"peer's pool has {theirs.num_layers} layers of {theirs.page_bytes}-byte pages, "
            f"ours {ours.num_layers} of {ours.page_bytes}: use the same model, page size and dtype"
        )
    if theirs.num_pages < 1 or address <= 0 or address + theirs.pool_bytes >= _ADDRESS_LIMIT:
        raise TransferError(f"peer's pool is impossible: {theirs.num_pages} pages at address {address:#x}")


class TransferAgent:
    """A NIXL agent over the whole pool, for one peer. Thread safe; every method but `destroy` raises
    `TransferError` once it is destroyed."""

    def __init__(self, name: str, layout: KVLayout, address: int, options: AgentOptions) -> None:
        """
        Args:
            name: unique over all processes and time; NIXL keeps peers apart by it.
            address: where the pool of `layout` is mapped in this process.

        Raises:
            TransferError: NIXL or its UCX back end is not usable here.
        """
        self.name = name
        self._layout = layout
        self._lock = threading.Lock()
        self._peer = ""
        self._local: Any = None
        self._remote: Any = None
        self._remote_layout = layout
        self._handles: dict[int, Any] = {}
        self._next_handle = 0
        os.environ.setdefault("UCX_TLS", options.transports)
        api = _nixl_api()
        try:
            self._agent: Any = api.nixl_agent(
                name,
                api.nixl_agent_config(
                    enable_prog_thread=False,
                    backends=[],
                    sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
                ),
            )
            params = dict(self._agent.get_plugin_params(_BACKEND))
            params |= {"num_workers": str(options.num_workers), "ucx_devices": options.net_devices}
            self._agent.create_backend(_BACKEND, params)
            self._registered = self._agent.register_memory([(address, layout.pool_bytes, 0, "")], _MEMORY)
            self._metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:
            raise TransferError(f"cannot make NIXL agent {name}: {error!r} (try `prfaas doctor`)") from error
        self._address = address

    @property
    def metadata(self) -> bytes:
        """What the peer needs to reach this agent."""
        return self._metadata

    def connect(self, metadata: bytes, expected_name: str) -> None:
        """Load the peer's metadata.

        Raises:
            TransferError: it is too long, unreadable, or another agent's.
        """
        if len(metadata) > MAX_METADATA_BYTES:
            raise TransferError(f"peer's agent metadata has {len(metadata)} bytes, over {MAX_METADATA_BYTES}")
        name = self._call("load the peer's metadata", lambda agent: agent.add_remote_agent(metadata))
        name = name.decode() if isinstance(name, bytes) else name
        if name != expected_name:
            raise TransferError(f"metadata is agent {name}'s, expected {expected_name}'s")
        self._peer = name

    def prepare_writes(self, remote: KVLayout, remote_address: int) -> None:
        """Prepare writing from any (layer, page) here to any there.

        Raises:
            TransferError: the remote pool does not match ours or is not what the peer registered.
        """
        check_remote_pool(self._layout, remote, remote_address)
        ours = pool_descriptors(self._layout, self._address)
        theirs = pool_descriptors(remote, remote_address)

        def prepare(agent: Any) -> tuple[Any, Any]:
            return (
                agent.prep_xfer_dlist("NIXL_INIT_AGENT", ours, _MEMORY),
                agent.prep_xfer_dlist(self._peer, theirs, _MEMORY),
            )

        self._local, self._remote = self._call("prepare the pools' descriptors", prepare)
        self._remote_layout = remote

    def write(
        self, layer: int, source_pages: Sequence[int], dest_pages: Sequence[int], notification: bytes = b""
    ) -> int:
        """Post one write of a layer's pages; returns a handle for `done`.

        `notification`, if any, reaches the peer after the data, once `done` has seen the end of the write.

        Raises:
            TransferError: NIXL refused it; the session is of no further use, `destroy` ends what is left.
        """
        sources = self._layout.descriptor_index(layer, 0) + np.asarray(source_pages, dtype=np.int32)
        dests = self._remote_layout.descriptor_index(layer, 0) + np.asarray(dest_pages, dtype=np.int32)

        def post(agent: Any) -> int:
            handle = agent.make_prepped_xfer("WRITE", self._local, sources, self._remote, dests, notification)
            # Before it is posted: a handle unknown to `destroy` would keep the agent, and its writes, alive.
            self._next_handle += 1
            self._handles[self._next_handle] = handle
            if agent.transfer(handle) == "ERR":
                raise TransferError("the post failed")
            return self._next_handle

        result: int = self._call("post a write", post)
        return result

    def done(self, handle: int) -> bool:
        """Whether the write has ended; a write that has is forgotten. Drives progress.

        Raises:
            TransferError: the write failed (the peer is gone); it is over and forgotten, too.
        """

        def check(agent: Any) -> bool:
            try:
                state = agent.check_xfer_state(self._handles[handle])
                if state == "ERR":
                    raise TransferError("the write ended in state ERR")
            except Exception:
                agent.release_xfer_handle(self._handles.pop(handle))
                raise
            if state == "DONE":
                agent.release_xfer_handle(self._handles.pop(handle))
            return bool(state == "DONE")

        return bool(self._call("complete a write", check))

    def notify(self, notification: bytes) -> None:
        """Send a notification that belongs to no write."""
        self._call("send a notification", lambda agent: agent.send_notif(self._peer, notification))

    def notifications(self) -> list[tuple[str, bytes]]:
        """(sending agent, bytes) of what has arrived since the last call. Drives progress."""
        arrived = self._call("read notifications", lambda agent: agent.get_new_notifs())
        return [
            (peer.decode() if isinstance(peer, bytes) else peer, note)
            for peer, notes in arrived.items()
            for note in notes
        ]

    def destroy(self) -> None:
        """The fence. When this returns, no write lands here any more, and none of ours reads our pages.

        May be called again and from any thread; takes tens of milliseconds, rarely a second.
        """
        with self._lock:
            agent, self._agent = self._agent, None
            if agent is None:
                return
            try:
                agent.deregister_memory(self._registered)
            except Exception as error:  # the agent goes anyway, and with it the registration
                logger.warning("event=deregister_failed agent=%s error=%r", self.name, error)
            for handle in (*self._handles.values(), self._local, self._remote):
                _release(handle, self.name)
            self._handles.clear()
            # The binding ends the agent when its last reference goes: none may be left behind.
            self._local = self._remote = self._registered = None
            agent.agent = None
            del agent

    def _call(self, what: str, action: Any) -> Any:
        """Run `action(agent)`, with every error typed."""
        with self._lock:
            if self._agent is None:
                raise TransferError(f"cannot {what}: agent {self.name} is destroyed")
            try:
                return action(self._agent)
            except Exception as error:
                raise TransferError(f"agent {self.name} cannot {what}: {error!r}") from error


async def make_agent(make: Callable[[], TransferAgent]) -> TransferAgent:
    """Run `make` in a thread; if the caller is cancelled meanwhile, the agent is destroyed as soon as it is
    there."""
    making = asyncio.ensure_future(asyncio.to_thread(make))

    def discard(done: asyncio.Future[TransferAgent]) -> None:
        if not done.cancelled() and done.exception() is None:
            done.result().destroy()

    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(discard)
        raise


def _release(handle: Any, agent_name: str) -> None:
    """Release a NIXL handle and drop its reference to the agent."""
    if handle is None:
        return
    try:
        handle.release()
    except Exception as error:
        logger.debug("event=release_failed agent=%s error=%r", agent_name, error)
    handle._agent = None
    handle._released = True

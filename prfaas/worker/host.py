"""The role-neutral worker host: one engine, one page pool, lazily a sender and a receiver, one role.

Everything here belongs to one event loop. A failed engine ends the process with a non-zero status after
every request has got its typed failure; whoever supervises the worker starts a new incarnation. That is
simpler than reviving an engine in place, and peers treat both alike.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from pathlib import Path

from prfaas.config import Config
from prfaas.engine.interface import ChunkPlan, Engine
from prfaas.engine.model_config import LlamaConfig
from prfaas.errors import EngineFailure
from prfaas.kv.layout import CompatRecord
from prfaas.kv.shared_buffer import SharedBuffer
from prfaas.protocol.messages import WorkerInfo, WorkerStatus
from prfaas.transfer.agent import AgentOptions, TransferAgent, devices_for
from prfaas.transfer.link import DirectLink, EmulatedLink, LinkModel
from prfaas.transfer.receiver import PageReceiver
from prfaas.transfer.sender import PageSender
from prfaas.worker.events import EventLog
from prfaas.worker.metrics import WorkerMetrics
from prfaas.worker.rates import RateMeter
from prfaas.worker.role import RoleService, make_role

_LOG = logging.getLogger(__name__)


class WorkerHost:
    """What a role finds in the room: configuration, engine, pages, transfer, events, metrics.

    Args:
        config, name: the fleet, and which worker of it this is.
        engine: not started yet.
        buffer: the KV pool that engine and NIXL share.
        compat: what a peer must have in common with us.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        engine: Engine,
        buffer: SharedBuffer,
        model: LlamaConfig,
        compat: CompatRecord,
    ) -> None:
        self.config = config
        self.name = name
        self.cluster, self.spec = config.worker(name)
        self.incarnation = secrets.token_hex(8)
        self.engine = engine
        self.pool = engine.pool
        self.buffer = buffer
        self.model = model
        self.compat = compat
        self.state = "starting"
        self.stopping = asyncio.Event()
        """Set when streams to readers are to end."""
        self.engine_failure: asyncio.Future[EngineFailure] = asyncio.get_running_loop().create_future()
        self.chunk_watchers: dict[str, Callable[[ChunkPlan], None]] = {}
        """Sequence id → called right before a step that computes a chunk of it."""
        self.events = EventLog(self.incarnation, self.pool.page_size, self.pool.snapshot)
        self.metrics = WorkerMetrics(self.status, engine.load)
        self.auth_headers = _auth_headers(config.auth.service_token)
        self._loop = asyncio.get_running_loop()
        self._rates = RateMeter()
        self._sender: PageSender | None = None
        self._receiver: PageReceiver | None = None
        self._links: dict[str, LinkModel] = {}
        self.pool.on_stored = self.events.stored
        self.pool.on_removed = self.events.removed
        engine.on_chunk = self._on_chunk
        self.role: RoleService = make_role(self.spec.role, self)

    # ------------------------------------------------------------ state

    @property
    def ready(self) -> bool:
        """Whether new requests are taken."""
        return self.state == "ready"

    def set_state(self, state: str) -> None:
        """`starting` → `ready` → `draining`; readers of the event stream learn at once."""
        _LOG.info("worker=%s state=%s", self.name, state)
        self.state = state
        self.events.wake()

    @property
    def longest_prompt_tokens(self) -> int:
        """Bounded by the model's context and by the pool."""
        layout = self.engine.layout
        return min(self.model.context_length, layout.num_pages * layout.page_size)

    @property
    def handshake_s(self) -> float:
        """Bound on a peer session's Hello and Welcome; a dead peer is noticed by its silence before."""
        return 5 * self.config.timeouts.connect

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            worker=self.name,
            cluster=self.cluster,
            role=self.spec.role,
            incarnation=self.incarnation,
            model=self.config.model.name or Path(self.config.model.path).name,
            context_length=self.model.context_length,
            layout=self.engine.layout,
            compat=self.compat,
            chunk_tokens=self.spec.chunk_tokens,
            max_running=self.spec.max_running,
            max_queue=self.spec.max_queue,
        )

    def status(self) -> WorkerStatus:
        """A snapshot; also the moment at which rates are sampled."""
        load = self.engine.load()
        self._rates.sample(self._loop.time(), load)
        pages = self.pool.counts()
        extra = self.role.load()
        return WorkerStatus(
            worker=self.name,
            incarnation=self.incarnation,
            role=self.spec.role,
            state=self.state,
            waiting=load.waiting + extra.waiting,
            running=load.running,
            waiting_prefill_tokens=load.waiting_prefill_tokens + extra.waiting_prefill_tokens,
            running_context_tokens=load.running_context_tokens,
            total_pages=pages.total,
            free_pages=pages.free + pages.cached,
            cached_pages=pages.cached,
            quarantined_pages=pages.quarantined,
            pinned_pages=pages.pinned,
            live_grants=extra.live_grants,
            sessions=extra.sessions,
            prefill_tokens_per_s=self._rates.prefill_tokens_per_s,
            decode_step_s=self._rates.decode_step_s,
            links=self.role.links(),
        )

    def engine_failed(self, failure: EngineFailure) -> None:
        """The engine tells that it has failed for good."""
        if not self.engine_failure.done():
            self.engine_failure.set_result(failure)

    def _on_chunk(self, plan: ChunkPlan) -> None:
        watcher = self.chunk_watchers.get(plan.sequence_id)
        if watcher is not None:
            watcher(plan)

    # ------------------------------------------------------------ transfer

    @property
    def sender(self) -> PageSender:
        """The one sender, made when it is first needed."""
        if self._sender is None:
            self._sender = PageSender(
                self.buffer,
                self.engine.layout,
                self.engine.layer_counter,
                self._loop,
                options=self._agent_options(),
            )
        return self._sender

    @property
    def receiver(self) -> PageReceiver:
        """The one receiver, made when it is first needed."""
        if self._receiver is None:
            self._receiver = PageReceiver(
                self.buffer,
                self.engine.layout,
                self._loop,
                quarantine_s=self.config.timeouts.quarantine,
                options=self._agent_options(),
            )
        return self._receiver

    def _agent_options(self) -> AgentOptions:
        return AgentOptions(net_devices=devices_for(self.spec.host))

    def link_to(self, cluster: str) -> LinkModel:
        """How writes to `cluster` travel; one model per cluster, so that its sessions share the rate."""
        if cluster not in self._links:
            self._links[cluster] = self._make_link(cluster)
        return self._links[cluster]

    def _make_link(self, cluster: str) -> LinkModel:
        found = self.config.link_between(self.cluster, cluster)
        if found is None:
            return DirectLink()
        name, link = found
        if not link.emulate:
            return DirectLink(float(link.capacity), float(link.rtt))
        state = Path(self.config.state_dir) / "links" / f"{name}.{self.cluster}-{cluster}"
        return EmulatedLink(float(link.capacity), float(link.rtt), state)

    def control_delay_s(self, cluster: str) -> float:
        """How long a control message from `cluster` is held back here: half an emulated round trip."""
        found = self.config.link_between(self.cluster, cluster)
        return float(found[1].rtt) / 2 if found is not None and found[1].emulate else 0.0

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Load the model, and see that KV can be moved at all.

        Raises:
            EngineFailure: the engine did not become ready in time or died.
            TransferError: NIXL is not usable here.
        """
        await asyncio.gather(self.engine.start(), asyncio.to_thread(self._try_transfer))
        self.set_state("ready")

    def _try_transfer(self) -> None:
        """Make an agent and destroy it: the first one imports NIXL, which takes seconds, and a machine
        without it should say so now and not at the first request."""
        name = f"{self.incarnation}/start"
        TransferAgent(name, self.engine.layout, self.buffer.address, self._agent_options()).destroy()

    async def drain(self) -> None:
        """Take nothing new, let what runs finish within `timeouts.drain`, fail the rest."""
        self.set_state("draining")
        bound_s = self.config.timeouts.drain
        try:
            async with asyncio.timeout(bound_s):
                await self.role.drain()
        except TimeoutError:
            _LOG.warning("worker=%s requests were still running after %.0f s", self.name, bound_s)
            self.role.fail_all("draining", f"{self.name} is shutting down")
            await self.settle()

    async def fail(self, message: str) -> None:
        """The engine is gone: everything gets its typed failure."""
        self.set_state("draining")
        self.role.fail_all("engine_failed", message)
        await self.settle()

    async def settle(self) -> None:
        """Let failures reach their readers, for a bounded time."""
        try:
            async with asyncio.timeout(self.config.timeouts.connect):
                await self.role.drain()
        except TimeoutError:
            _LOG.warning("worker=%s live=%d at the end", self.name, self.role.load().live)

    async def stop(self) -> None:
        """End sessions (peers learn at once), transfer threads and the engine. Order matters: no agent may
        outlive the pool it reads and writes."""
        self.stopping.set()
        self.events.wake()
        await self.role.stop()
        for part in (self._sender, self._receiver):
            if part is not None:
                await part.stop()
        for link in self._links.values():
            if isinstance(link, EmulatedLink):
                link.close()
        await self.engine.stop()


def _auth_headers(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}

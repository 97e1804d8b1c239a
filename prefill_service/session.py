"""The prefill side of one peer session: handshake, grants, leases, and the agent's end.

However the session ends, its send agent is destroyed; that ends every write, so source pages may go.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable

from prefill_service.grant import PrefillGrant
from prefill_service.grant_check import grant_problem, hello_refusal
from prfaas.protocol.messages import Cancel, Grant, GrantFailed, Hello, PeerMessage, Refused, Welcome
from prfaas.transfer.agent import TransferError
from prfaas.transfer.events import AttemptKey
from prfaas.worker.host import WorkerHost
from prfaas.worker.peer_channel import ChannelClosed, PeerChannel, WebSocket

_LOG = logging.getLogger(__name__)
_REMEMBERED_REQUESTS = 4096
"""Requests whose last attempt is remembered, to refuse a stale grant."""


class PeerSession:
    """One decode worker's session, from its Hello to the destruction of the agent.

    Args:
        make_grant: makes a grant of this session (the service knows the queues).
        refusal: (reason, message) if no new grant is taken now, else None.
        on_hello: called with the peer's name once it is known; ends older sessions of the same worker.
    """

    def __init__(
        self,
        host: WorkerHost,
        socket: WebSocket,
        make_grant: Callable[[PeerSession, Grant], PrefillGrant],
        refusal: Callable[[], tuple[str, str] | None],
        on_hello: Callable[[PeerSession, str], None],
    ) -> None:
        timeouts = host.config.timeouts
        self.worker = ""
        self.name = ""
        self.cluster = ""
        self.grants: dict[AttemptKey, PrefillGrant] = {}
        self._host = host
        self._make_grant = make_grant
        self._refusal = refusal
        self._on_hello = on_hello
        self._hello: Hello | None = None
        self._last_attempts: OrderedDict[str, int] = OrderedDict()
        self._loop = asyncio.get_running_loop()
        self._renewed_s = self._loop.time()
        self._channel = PeerChannel(socket, heartbeat_s=timeouts.heartbeat, silence_s=timeouts.silence)
        self._channel.on_heartbeat = self._renew
        self._channel.on_tick = self._sweep_leases

    @property
    def rtt_s(self) -> float:
        """Smallest recent round trip on the control channel; 0 = not measured."""
        return self._channel.rtt_s

    def post(self, message: PeerMessage) -> None:
        self._channel.post(message)

    def end(self, why: str) -> None:
        """End the session; `run` returns when the agent is destroyed."""
        self._channel.end(why)

    def forget(self, grant: PrefillGrant) -> None:
        """Nothing is left of `grant`."""
        self.grants.pop(grant.key, None)

    async def run(self) -> None:
        """Serve until the channel ends, then fence."""
        try:
            if await self._shake_hands():
                while True:
                    self._handle(await self._channel.receive())
        except (ChannelClosed, TransferError) as error:
            self._channel.end(str(error))
            _LOG.info("session=%s peer=%s ended why=%r", self.name, self.worker, str(error))
        finally:
            await self._finish()

    # ------------------------------------------------------------ handshake

    async def _shake_hands(self) -> bool:
        host = self._host
        try:
            async with asyncio.timeout(host.handshake_s):
                hello = await self._channel.receive()
        except TimeoutError:
            raise ChannelClosed(f"no Hello within {host.handshake_s} s") from None
        if not isinstance(hello, Hello):
            raise ChannelClosed(f"protocol error: {type(hello).__name__} before Hello")
        self._channel.delay_s = host.control_delay_s(hello.cluster)
        await asyncio.sleep(self._channel.delay_s)
        refused = hello_refusal(hello, host.compat, host.name)
        if refused is not None:
            self._refuse(hello, refused)
            return False
        self._on_hello(self, hello.worker)
        self.worker, self.name, self.cluster, self._hello = hello.worker, hello.session, hello.cluster, hello
        try:
            metadata = await host.sender.open(hello, host.link_to(hello.cluster), self.end)
        except (TransferError, ValueError) as error:
            self._refuse(hello, Refused(reason="bad_request", message=str(error)))
            return False
        self.post(Welcome(worker=host.name, incarnation=host.incarnation, agent_metadata=metadata))
        _LOG.info("session=%s peer=%s opened", self.name, self.worker)
        return True

    def _refuse(self, hello: Hello, refused: Refused) -> None:
        _LOG.warning("session=%s peer=%s refused why=%r", hello.session, hello.worker, refused.message)
        self._host.metrics.peer_refusals.inc()
        self.post(refused)

    # ------------------------------------------------------------ messages

    def _handle(self, message: PeerMessage) -> None:
        match message:
            case Grant():
                self._on_grant(message)
            case Cancel():
                grant = self.grants.get(AttemptKey(message.request_id, message.attempt))
                if grant is not None:
                    grant.cancel("cancelled", "cancelled by the decode worker")
            case _:
                raise ChannelClosed(f"protocol error: unexpected {type(message).__name__}")

    def _on_grant(self, message: Grant) -> None:
        key = AttemptKey(message.request_id, message.attempt)
        if key in self.grants:
            # Refusing it would tell the receiver that no write follows, and writes of this key may.
            raise ChannelClosed(f"protocol error: grant {key} came twice")
        problem = self._problem(message)
        if problem is not None:
            self._refuse_grant(key, *problem)
            return
        self._remember(key)
        grant = self._make_grant(self, message)
        self.grants[key] = grant
        try:
            grant.start()
        except (TransferError, ValueError) as error:
            del self.grants[key]
            self._refuse_grant(key, "transfer_failed", str(error))

    def _problem(self, grant: Grant) -> tuple[str, str] | None:
        assert self._hello is not None
        if grant.attempt <= self._last_attempts.get(grant.request_id, 0):
            return "bad_request", f"attempt {grant.attempt} of {grant.request_id} is stale"
        problem = grant_problem(grant, self._host.engine.layout, self._hello.layout, self._host.model)
        return ("bad_request", problem) if problem else self._refusal()

    def _refuse_grant(self, key: AttemptKey, reason: str, message: str) -> None:
        self._host.metrics.transfer_failures.labels(reason).inc()
        self.post(GrantFailed(request_id=key.request_id, attempt=key.attempt, reason=reason, message=message))

    def _remember(self, key: AttemptKey) -> None:
        self._last_attempts[key.request_id] = key.attempt
        self._last_attempts.move_to_end(key.request_id)
        if len(self._last_attempts) > _REMEMBERED_REQUESTS:
            self._last_attempts.popitem(last=False)

    # ------------------------------------------------------------ timers

    def _renew(self) -> None:
        self._renewed_s = self._loop.time()
        self._host.sender.observe_rtt(self.cluster, self._channel.rtt_s)

    def _sweep_leases(self) -> None:
        age_s = self._loop.time() - self._renewed_s
        for grant in list(self.grants.values()):
            if age_s > grant.lease_s:
                self._host.metrics.leases_expired.inc()
                grant.cancel("deadline", f"the lease was not renewed for {age_s:.1f} s")

    async def _finish(self) -> None:
        why = self._channel.closed_reason or "closed"
        for grant in list(self.grants.values()):
            grant.cancel("peer_lost", why)
        close_channel = self._channel.close(why)
        if self._hello is None:
            await close_channel
        else:
            await asyncio.gather(close_channel, self._host.sender.close(self._hello.session))

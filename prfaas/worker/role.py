"""What a role (prefill, decode) is to the worker host that mounts it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from aiohttp import web

from prfaas.protocol.messages import LinkCounters

if TYPE_CHECKING:
    from prfaas.worker.host import WorkerHost

ROLES = {
    "prefill": "prefill_service.service:PrefillService",
    "decode": "decode_service.service:DecodeService",
}
"""Role → `module:Class`. Names, not imports: roles stand above the host that mounts them."""


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """What a role holds beside the engine's own queue."""

    waiting: int = 0
    """Requests waiting outside the engine."""
    waiting_prefill_tokens: int = 0
    live: int = 0
    """Requests or grants not over yet, wherever they are."""
    live_grants: int = 0
    sessions: int = 0
    """Peer sessions whose agent is not destroyed."""


class RoleService(Protocol):
    """One role. The host calls it on its event loop."""

    def routes(self) -> list[web.RouteDef]:
        """HTTP routes to mount."""
        ...

    def load(self) -> RoleLoad: ...

    def links(self) -> list[LinkCounters]:
        """Running totals of what this worker has sent, by destination cluster."""
        ...

    def fail_all(self, reason: str, message: str) -> None:
        """End everything that is not over with a typed failure."""
        ...

    async def drain(self) -> None:
        """Return once nothing is live; the caller bounds the wait and has stopped new work."""
        ...

    async def stop(self) -> None:
        """End every peer session and wait for its fence."""
        ...


def make_role(name: str, host: WorkerHost) -> RoleService:
    """The service of role `name`, bound to `host`.

    Raises:
        KeyError: there is no such role.
    """
    module, _, attribute = ROLES[name].partition(":")
    factory = getattr(importlib.import_module(module), attribute)
    return cast("RoleService", factory(host))

"""The outcome of a placement: what was chosen, among what, at which cost."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from policies.types import TERM_NAMES, Candidates, PlacementKind
from prfaas.errors import PrfaasError

_KINDS = tuple(PlacementKind)
COUNT_NAMES = ("uncached_tokens", "decode_cached_tokens", "site_cached_tokens", "kv_bytes")


class NoCapacity(PrfaasError):
    """The request cannot be placed now.

    Attributes:
        reason: `no_decode_worker` (503: none is ready), `queues_full` (429: all that could take it have
            full queues), `prompt_too_long` (400: fits no worker's pages, ever),
            `policy_refused` (503: the policy accepts none of the candidates), `pair_unavailable` (503: the
            pair that a warm-up asks for cannot take it now).
        retry_after_s: when trying again makes sense; 0 where it never does.
    """

    def __init__(self, reason: str, retry_after_s: float, message: str) -> None:
        self.reason = reason
        self.retry_after_s = retry_after_s
        super().__init__(message)

    @property
    def http_status(self) -> int:
        return {"queues_full": 429, "prompt_too_long": 400}.get(self.reason, 503)


class Decision(msgspec.Struct, frozen=True):
    """One placed request, with every candidate that was weighed."""

    request_id: str
    attempt: int
    now_s: float
    prompt_tokens: int
    policy: str
    """Name of the policy that chose (the default's where the configured one failed)."""
    candidates: Candidates
    chosen: int
    least_cost: bool
    """Whether no candidate had a smaller `cost_s`."""

    @property
    def decode(self) -> str:
        return self.candidates.pair(self.chosen)[0]

    @property
    def site(self) -> str:
        """Worker that prefills; the decode worker itself for `reuse` and `local`."""
        return self.candidates.pair(self.chosen)[1]

    @property
    def kind(self) -> PlacementKind:
        return _KINDS[int(self.candidates.kind[self.chosen])]

    @property
    def prefill_worker(self) -> str | None:
        """The other worker that prefills; None for local prefill."""
        return None if self.site == self.decode else self.site

    @property
    def ttft_s(self) -> float:
        """Predicted, since the request's arrival."""
        return self.term("ttft_s")

    def term(self, name: str) -> float:
        """A term of the chosen candidate, by its name in `policies.types.TERM_NAMES`."""
        return float(getattr(self.candidates, name)[self.chosen])

    def count(self, name: str) -> int:
        """A count of the chosen candidate, by its name in `COUNT_NAMES`."""
        return int(getattr(self.candidates, name)[self.chosen])

    @property
    def header(self) -> str:
        """One line for a response header: `remote decode-0<-remote-0 ttft=1.23s`."""
        path = self.decode if self.prefill_worker is None else f"{self.decode}<-{self.site}"
        return f"{self.kind.label} {path} ttft={self.ttft_s:.2f}s"

    def as_record(self, top: int | None = 5) -> dict[str, Any]:
        """JSON-able record: the chosen candidate, then the `top` cheapest ones (None = all) by cost."""
        order = np.argsort(self.candidates.cost_s, kind="stable")[:top]
        return {
            "request_id": self.request_id,
            "attempt": self.attempt,
            "now_s": self.now_s,
            "prompt_tokens": self.prompt_tokens,
            "policy": self.policy,
            "candidates_total": len(self.candidates),
            "least_cost": self.least_cost,
            "chosen": self._row(self.chosen),
            "candidates": [self._row(int(index)) for index in order],
        }

    def _row(self, index: int) -> dict[str, Any]:
        c = self.candidates
        row: dict[str, Any] = {
            "decode": c.decode[index],
            "site": c.site[index],
            "kind": PlacementKind(int(c.kind[index])).label,
        }
        row.update((name, int(getattr(c, name)[index])) for name in COUNT_NAMES)
        row.update((name, float(getattr(c, name)[index])) for name in TERM_NAMES)
        return row

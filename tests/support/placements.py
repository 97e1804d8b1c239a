"""Hand-made candidates and fleet views for policy tests.

Workers are called d0, d1, … (decode), p0, … (prefill, cluster `pd`) and r0, … (prefill, cluster `far`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.types import Candidates, FleetView, PlacementKind, RequestView

REUSE, LOCAL, POOL, REMOTE = PlacementKind
PROMPT = 1000


@dataclass
class Row:
    """One candidate: a pair like `"d0 p1"`, or `"d0"` for local prefill."""

    pair: str
    cached: int = 0
    """Tokens at the site."""
    decode_cached: int = 0
    start_s: float = 0.0
    prefill_s: float = 1.0
    transfer_s: float = 0.0
    slot_s: float = 0.0
    step_s: float = 0.0
    overhead_s: float = 0.0
    interference_s: float = 0.0
    kv_bytes: int = 0

    @property
    def decode(self) -> str:
        return self.pair.split()[0]

    @property
    def site(self) -> str:
        return self.pair.split()[-1]

    def kind(self, prompt: int) -> PlacementKind:
        if self.site == self.decode:
            return REUSE if 2 * self.cached >= prompt else LOCAL
        return POOL if self.site.startswith("p") else REMOTE


def candidates(*rows: Row, prompt: int = PROMPT) -> Candidates:
    def column(name: str, dtype: type = float) -> Any:
        return np.array([getattr(row, name) for row in rows], dtype=dtype)

    ready_s = column("start_s") + column("prefill_s") + column("transfer_s")
    ttft_s = np.maximum(ready_s, column("slot_s")) + column("step_s") + column("overhead_s")
    cached = column("cached", np.int64)
    return Candidates(
        decode=tuple(row.decode for row in rows),
        site=tuple(row.site for row in rows),
        kind=np.array([row.kind(prompt) for row in rows], dtype=np.int64),
        uncached_tokens=np.maximum(prompt - 1 - cached, 0),
        decode_cached_tokens=np.where(
            [row.site == row.decode for row in rows], cached, column("decode_cached", np.int64)
        ),
        site_cached_tokens=cached,
        kv_bytes=column("kv_bytes", np.int64),
        start_s=column("start_s"),
        prefill_s=column("prefill_s"),
        transfer_s=column("transfer_s"),
        slot_s=column("slot_s"),
        step_s=column("step_s"),
        overhead_s=column("overhead_s"),
        ttft_s=ttft_s,
        interference_s=column("interference_s"),
        externality_s=np.zeros(len(rows)),
        cost_s=ttft_s + column("interference_s"),
    )


def grid(
    decodes: int = 2, pools: int = 2, remotes: int = 0, prompt: int = PROMPT, **fields: Any
) -> Candidates:
    """Every pair, in the scheduler's order; `fields` are the same in all rows."""
    sites = [f"p{i}" for i in range(pools)] + [f"r{i}" for i in range(remotes)]
    names = [f"d{i}" for i in range(decodes)]
    pairs = [pair for d in names for pair in (d, *(f"{d} {site}" for site in sites))]
    return candidates(*(Row(pair, **fields) for pair in pairs), prompt=prompt)


def view(decodes: int = 8, pools: int = 8, remotes: int = 8, now_s: float = 0.0, **values: Any) -> FleetView:
    """An idle fleet but for `values`: mappings of the view's, for the workers that differ."""
    names = [
        f"{letter}{i}" for letter, n in zip("dpr", (decodes, pools, remotes), strict=True) for i in range(n)
    ]
    defaults: dict[str, Any] = {
        "queued_tokens": 0, "running": 0, "waiting": 0, "free_pages": 1000, "total_pages": 1000,
        "page_tokens": 16, "running_context_tokens": 0, "max_running": 20, "decode_base_s": 0.02,
        "decode_sequence_s": 0.0, "decode_context_s": 0.0, "prefill_ends_s": 0.0, "ready": True,
    }  # fmt: skip
    mappings = {
        key: {**dict.fromkeys(names, value), **values.pop(key, {})} for key, value in defaults.items()
    }
    links = {"pd->pd": 1e12, "far->pd": 1e9}
    roles = {name: "decode" if name.startswith("d") else "prefill" for name in names}
    return FleetView(
        now_s=now_s,
        workers=tuple(names),
        number={name: number for number, name in enumerate(names)},
        cluster={name: "far" if name.startswith("r") else "pd" for name in names},
        role={**roles, **values.pop("role", {})},
        link_bytes_per_s={**links, **values.pop("link_bytes_per_s", {})},
        link_utilisation={**dict.fromkeys(links, 0.0), **values.pop("link_utilisation", {})},
        link_drains_s={**dict.fromkeys(links, 0.0), **values.pop("link_drains_s", {})},
        **mappings,
        **values,
    )


def request(request_id: str = "r", session: str = "", prompt: int = PROMPT) -> RequestView:
    return RequestView(request_id, 0.0, prompt, 64, 1, session)


class Chooser:
    """A policy, and the generator that it draws from."""

    def __init__(self, policy: Any, seed: int = 0) -> None:
        self.policy, self.rng = policy, np.random.default_rng(seed)

    def __call__(
        self, rows: Candidates, seen: FleetView | None = None, asked: RequestView | None = None
    ) -> str:
        """The chosen pair as in `Row.pair`, or `refuse`."""
        index = self.policy.choose(asked or request(), rows, seen or view(), self.rng)
        if index < 0:
            return "refuse"
        decode, site = rows.decode[index], rows.site[index]
        return decode if decode == site else f"{decode} {site}"

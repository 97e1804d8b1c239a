"""Which (decode worker, prefill site) pairs exist, as index arrays: rebuilt when the fleet changes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies.types import Bools, Ints, PlacementKind
from router.core.fleet import Fleet, WorkerState
from router.core.links import LinkState

NO_LINK = 0
"""Row of the link table that local prefill points at; it is never priced."""


@dataclass(frozen=True, slots=True)
class Topology:
    """One row per pair; arrays have shape [rows]."""

    decode: tuple[str, ...]
    site: tuple[str, ...]
    decode_slot: Ints
    site_slot: Ints
    link_row: Ints
    kind: Ints
    """LOCAL (REUSE is decided per request), POOL or REMOTE."""
    local: Bools

    def __len__(self) -> int:
        return len(self.decode)


def build_topology(fleet: Fleet, links: dict[tuple[str, str], LinkState]) -> Topology:
    """Every ready decode worker with itself, and with each ready prefill worker that speaks its KV (equal
    compatibility records) over a known link. Order: as workers joined, local first."""
    decodes = [w for w in fleet if w.ready and w.decodes_here]
    prefills = [w for w in fleet if w.ready and not w.decodes_here]
    rows: list[tuple[WorkerState, WorkerState, int, PlacementKind]] = []
    for decode in decodes:
        rows.append((decode, decode, NO_LINK, PlacementKind.LOCAL))
        for site in prefills:
            link = links.get((site.info.cluster, decode.info.cluster))
            if link is not None and site.info.compat == decode.info.compat:
                near = site.info.cluster == decode.info.cluster
                kind = PlacementKind.POOL if near else PlacementKind.REMOTE
                rows.append((decode, site, link.row, kind))
    kind_of = np.array([kind for _, _, _, kind in rows], dtype=np.int64)
    return Topology(
        decode=tuple(decode.name for decode, _, _, _ in rows),
        site=tuple(site.name for _, site, _, _ in rows),
        decode_slot=np.array([decode.slot for decode, _, _, _ in rows], dtype=np.int64),
        site_slot=np.array([site.slot for _, site, _, _ in rows], dtype=np.int64),
        link_row=np.array([row for _, _, row, _ in rows], dtype=np.int64),
        kind=kind_of,
        local=kind_of == PlacementKind.LOCAL,
    )

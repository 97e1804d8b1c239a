"""Which (decode worker, prefill site) pairs exist: rebuilt when the fleet changes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies.types import Ints, PlacementKind
from router.core.fleet import Fleet, WorkerState
from router.core.links import LinkState

NO_LINK = 0
"""Column of the link table that local prefill points at; it is never priced."""


@dataclass(frozen=True, slots=True)
class Topology:
    """All pairs in one order, those of a decode worker together."""

    decode: tuple[str, ...]
    site: tuple[str, ...]
    pairs: Ints
    """Decode slot, site slot, link column and kind (LOCAL, POOL or REMOTE; REUSE is decided per request);
    shape [4, pairs]."""

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
    pairs = np.array([(decode.slot, site.slot, link, kind) for decode, site, link, kind in rows], np.int64)
    return Topology(
        decode=tuple(decode.name for decode, _, _, _ in rows),
        site=tuple(site.name for _, site, _, _ in rows),
        pairs=np.ascontiguousarray(pairs.reshape(-1, 4).T),
    )

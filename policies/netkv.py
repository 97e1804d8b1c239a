"""The decode worker by what moving the KV to it costs."""

from __future__ import annotations

import numpy as np

from policies.base import BasePolicy, gather, pick
from policies.pairing import Where, decode_requests, same
from policies.types import Candidates, FleetView, Floats, Ints, RequestView

LEAST_FREE = 0.05
"""Share of a link that a new transfer gets at least, however congested it is."""


class NetKV(BasePolicy):
    """Greedy over decode workers by network cost, after the prefill site has been chosen.

    NetKV (arXiv 2606.03910): an oracle gives each (source, target) a cost from its tier and congestion,
    and each request takes the decode worker with the least cost of what it lacks, plus its load:
    bytes / (rate · (1 - utilisation)) + wait for pages and a slot + decode step. The prefill site is the
    one that would be done first: NetKV leaves that choice to others, so a slow link does not keep it from a
    remote site.

    Tiers inside a cluster (rack, pod) are not known here: all pairs of one cluster have one rate. The
    layer-wise overlap of transfer and prefill is ignored, as in its oracle.

    Args:
        where: sites considered (`policies.pairing.Where`).
    """

    def __init__(self, where: str = "prefill") -> None:
        self._where = Where(where)

    def choose(
        self, request: RequestView, candidates: Candidates, view: FleetView, rng: np.random.Generator
    ) -> int:
        sites = gather(view.number, candidates.site)
        rows = self._where.rows(candidates)
        rows = same(sites, rows, pick(rows, rng, candidates.start_s + candidates.prefill_s))
        cost_s = np.zeros(len(candidates))
        wait_s = np.maximum(candidates.start_s, candidates.slot_s) + candidates.step_s
        cost_s[rows] = wait_s[rows] + _network_s(candidates, view, rows)
        return pick(rows, rng, cost_s, decode_requests(candidates, view))


def _network_s(candidates: Candidates, view: FleetView, rows: Ints) -> Floats:
    """Seconds of moving what each row's decode worker lacks; all rows have the same site."""
    source = view.cluster[candidates.site[rows[0]]]
    rates: dict[str, float] = {}
    free = []
    for row in rows.tolist():
        target = view.cluster[candidates.decode[row]]
        if target not in rates:
            link = f"{source}->{target}"
            idle = max(LEAST_FREE, 1 - view.link_utilisation[link])
            rates[target] = view.link_bytes_per_s[link] * idle
        free.append(rates[target])
    seconds: Floats = candidates.kv_bytes[rows] / np.array(free)
    return seconds

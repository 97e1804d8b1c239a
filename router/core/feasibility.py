"""Which pairs can take a request at all, and why not when none can."""

from __future__ import annotations

import numpy as np

from policies.types import Bools, Floats, Ints
from router.core import tables as t
from router.core.costs import Rows
from router.core.decision import NoCapacity
from router.core.events import PlaceRequest
from router.core.fleet import Fleet
from router.core.topology import Topology

NO_WORKER_RETRY_S = 2.0


def feasible_rows(
    request: PlaceRequest, topology: Topology, fleet: Fleet, link_table: Floats, blocks: Ints
) -> Rows:
    """The pairs that can take this request, with their numbers gathered.

    Args:
        blocks: cached blocks of the prompt by worker slot.

    Raises:
        NoCapacity: there is none.
    """
    if not len(topology):
        raise NoCapacity("no_decode_worker", NO_WORKER_RETRY_S, "no decode worker is ready")
    table = fleet.table.values
    d, s = table.take(topology.decode_slot, axis=1), table.take(topology.site_slot, axis=1)
    d_blocks, s_blocks = blocks[topology.decode_slot], blocks[topology.site_slot]
    prompt = request.prompt_tokens - 1
    d_pages = np.ceil((request.prompt_tokens + 1) / d[t.PAGE_TOKENS])
    s_pages = np.ceil(prompt / s[t.PAGE_TOKENS])

    fits = (d_pages <= d[t.TOTAL_PAGES]) & (topology.local | (s_pages <= s[t.TOTAL_PAGES]))
    _require(fits, "prompt_too_long", 0.0, f"{request.prompt_tokens} prompt tokens fit no worker's KV pool")
    # Pages that decode has complete need no prefill site; a grant of no pages would be pointless.
    has_pages = np.minimum(d_blocks, prompt // d[t.PAGE_TOKENS])
    fits &= topology.local | (np.ceil(prompt / d[t.PAGE_TOKENS]) > has_pages)
    queued = (d[t.WAITING] < d[t.MAX_QUEUE]) & (s[t.WAITING] < s[t.MAX_QUEUE])
    fits &= queued
    retry_s = 1.0 if fits.any() else max(1.0, float(s[t.FREE_AT].min()) - request.now_s)
    _require(fits, "queues_full", retry_s, "every worker that fits has a full queue")
    keep = _without_avoided(fits, request.avoid, topology)
    if request.pair is not None:
        keep &= _is_pair(request.pair, topology)
        _require(keep, "pair_unavailable", retry_s, f"{request.pair} cannot take the request now")
    d_wait_s = _page_waits(topology.decode, d_pages, d[t.FREE_PAGES], keep, fleet, request.now_s)
    s_wait_s = _page_waits(
        topology.site, s_pages, s[t.FREE_PAGES], keep & ~topology.local, fleet, request.now_s
    )
    rows = Rows(
        decode=topology.decode,
        site=topology.site,
        kind=topology.kind,
        local=topology.local,
        link_row=topology.link_row,
        d=d,
        s=s,
        link=link_table.take(topology.link_row, axis=1),
        d_blocks=d_blocks,
        s_blocks=s_blocks,
        d_page_wait_s=d_wait_s,
        s_page_wait_s=s_wait_s,
    )
    return rows if keep.all() else _select(rows, np.flatnonzero(keep))


def _require(mask: Bools, reason: str, retry_after_s: float, message: str) -> None:
    if not mask.any():
        raise NoCapacity(reason, retry_after_s, message)


def _without_avoided(mask: Bools, avoid: tuple[str, ...], topology: Topology) -> Bools:
    """`mask` without pairs of which a member is to be avoided; unchanged where that leaves none."""
    if not avoid:
        return mask
    spared = mask & np.array(
        [d not in avoid and s not in avoid for d, s in zip(topology.decode, topology.site, strict=True)]
    )
    return spared if spared.any() else mask


def _is_pair(pair: tuple[str, str], topology: Topology) -> Bools:
    """Where the rows are that pair."""
    return np.array([one == pair for one in zip(topology.decode, topology.site, strict=True)])


def _page_waits(
    names: tuple[str, ...], needed: Floats, free: Floats, mask: Bools, fleet: Fleet, now_s: float
) -> Floats:
    """Seconds until the named workers have the pages, shape [rows]; usually all zero."""
    waits = np.zeros(len(names))
    short = mask & (needed > free)
    if not short.any():
        return waits
    for index in np.flatnonzero(short):
        worker = fleet.get(names[index])
        assert worker is not None, f"topology names {names[index]}, which is not in the fleet"
        waits[index] = worker.pages_at(int(needed[index]), now_s, float(free[index])) - now_s
    return waits


def _select(rows: Rows, keep: Ints) -> Rows:
    return Rows(
        decode=tuple(rows.decode[index] for index in keep),
        site=tuple(rows.site[index] for index in keep),
        kind=rows.kind[keep],
        local=rows.local[keep],
        link_row=rows.link_row[keep],
        d=rows.d[:, keep],
        s=rows.s[:, keep],
        link=rows.link[:, keep],
        d_blocks=rows.d_blocks[keep],
        s_blocks=rows.s_blocks[keep],
        d_page_wait_s=rows.d_page_wait_s[keep],
        s_page_wait_s=rows.s_page_wait_s[keep],
    )

"""Which pairs are priced in a large fleet: pricing all of tens of thousands would take milliseconds.

What a pair costs is nearly the sum of what its two workers cost by themselves: only the transfer belongs to
both. So the best pair is, but for near ties, one of a worker among the best of each kind. Compiled.
"""

from __future__ import annotations

import numpy as np

from policies.types import Bools, Floats, Ints
from router.core import costs as c
from router.core import tables as t
from router.core.compiled import compiled

DECODE, SITE, LINK = range(3)
"""Rows of the pairs' matrix, as in `weigh`."""
FEW_PAIRS = 512
"""As many are always priced."""
NO_PAGES_S = 1.0
"""What waiting for pages on a prefill site is held to take."""


@compiled
def shorten(
    workers: Floats, links: Floats, pairs: Ints, sites: Floats, decodes: Floats, q: Floats, most: int,
    keep: Bools,
) -> None:  # fmt: skip
    """Of the pairs in `keep`, keep those of workers that are good by themselves: the `most` best prefill
    workers behind each link, and of the decode workers that it leads to the `most` best to receive the prompt
    and the `most` / 2 best to compute it.

    Args:
        sites: of `costs.site_numbers`, shape [SITE_NUMBERS, slots].
        decodes: of `costs.decode_numbers`, shape [slots, DECODE_NUMBERS].
    """
    slots, paths = workers.shape[1], links.shape[1]
    site_s, both_s = np.full(slots, np.inf), np.full(slots, np.inf)
    behind = np.zeros((paths, slots), np.bool_)  # prefill workers by the link that they send over
    leads = np.zeros((paths, slots), np.bool_)  # decode workers by the links that lead to them
    for row in range(pairs.shape[1]):
        if not keep[row]:
            continue
        d, s, link = pairs[DECODE, row], pairs[SITE, row], pairs[LINK, row]
        leads[link, d] = True
        if d == s:
            # Its chunks delay each of the running answers.
            beside = 1 + workers[t.RUNNING, d]
            both_s[d] = sites[c.S_QUEUE, d] + beside * sites[c.S_PURE, d] + decodes[d, c.D_FIRST_STEP]
        elif not behind[link, s]:
            behind[link, s] = True
            wait_s = NO_PAGES_S if sites[c.S_PAGES, s] > workers[t.FREE_PAGES, s] else 0.0
            site_s[s] = max(sites[c.S_QUEUE, s], wait_s) + sites[c.S_PURE, s]
    listed = np.zeros(slots, np.bool_)
    for link in range(paths):
        _take_best(site_s, behind[link], most, listed)
        _take_best(both_s, leads[link], most // 2, listed)
        if behind[link].any():
            soonest_s = 2 * links[t.RTT, link] + np.where(behind[link], site_s, np.inf).min()
            receive_s = np.full(slots, np.inf)
            for d in range(slots):
                if leads[link, d]:
                    receive_s[d] = _receive_s(workers, d, links[t.RATE, link], sites, decodes[d], soonest_s)
            _take_best(receive_s, leads[link], most, listed)
    for row in range(pairs.shape[1]):
        keep[row] = keep[row] and listed[pairs[DECODE, row]] and listed[pairs[SITE, row]]


@compiled
def _receive_s(workers: Floats, slot: int, rate: float, sites: Floats, d: Floats, soonest_s: float) -> float:
    """What a decode worker adds to a prompt that is computed elsewhere."""
    moved_s = d[c.D_LACKING] * workers[t.PAGE_BYTES, slot] / rate
    # Its steps carry chunks of others' prompts until those are computed: bear that, or come later.
    chunks_s = min(1.5 * d[c.D_CHUNK_STEP], max(sites[c.S_QUEUE, slot] - soonest_s - moved_s, 0.0))
    return float(max(d[c.D_SLOT], d[c.D_PAGE_WAIT]) + moved_s + d[c.D_FIRST_STEP] + chunks_s)


@compiled
def _take_best(alone_s: Floats, among: Bools, most: int, listed: Bools) -> None:
    """List the `most` workers with the least values; of equal ones the first."""
    left_s = np.where(among, alone_s, np.inf)
    for _ in range(most):
        best = left_s.argmin()
        if left_s[best] == np.inf:
            return
        listed[best] = True
        left_s[best] = np.inf

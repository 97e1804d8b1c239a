"""The compiled heart of a placement: which pairs can take the request, and what each would cost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from policies.types import Bools, Floats, Ints
from router.core import costs as c
from router.core import tables as t
from router.core.compiled import compiled, entry_point, stamp
from router.core.link_share import KNOT_ROWS, activity
from router.core.pools import LOAD, POOL_NUMBERS, RATE, WAIT, close, join
from router.core.shortlist import FEW_PAIRS, shorten
from router.core.tally import grouped, pages_at, tally

# Rows of the pairs' matrix (`topology.Topology.pairs`).
DECODE, SITE, LINK, KIND = range(4)
# Answers of `weigh` where no pair can take the request.
TOO_LONG, QUEUES_FULL, PAIR_UNAVAILABLE = -1, -2, -3


@compiled
def _find_feasible(
    workers: Floats, pairs: Ints, blocks: Ints, q: Floats, avoided: Bools, wanted: Bools, keep: Bools
) -> int:
    """Set `keep` where a pair can take the request; the number of such pairs, or why there is none."""
    tokens, slots = q[c.PROMPT_TOKENS], len(blocks)
    # By worker first: pairs are many.
    holds, computes = np.zeros(slots, np.bool_), np.zeros(slots, np.bool_)
    complete, full = np.zeros(slots, np.bool_), np.zeros(slots, np.bool_)
    for slot in range(slots):
        page, pages = workers[t.PAGE_TOKENS, slot], workers[t.TOTAL_PAGES, slot]
        if page > 0:
            prompt_pages = np.ceil((tokens - 1) / page)
            holds[slot] = np.ceil((tokens + 1) / page) <= pages
            computes[slot] = prompt_pages <= pages
            complete[slot] = prompt_pages <= min(float(blocks[slot]), (tokens - 1) // page)
            full[slot] = workers[t.WAITING, slot] >= workers[t.MAX_QUEUE, slot]
    any_fits, kept = False, 0
    for row in range(pairs.shape[1]):
        d, s = pairs[DECODE, row], pairs[SITE, row]
        local = d == s
        fits = holds[d] and (local or computes[s])
        any_fits = any_fits or fits
        # Pages that decode has complete need no prefill site; a grant of no pages would be pointless.
        keep[row] = fits and (local or not complete[d]) and not full[d] and not full[s]
        kept += keep[row]
    if not any_fits:
        return TOO_LONG
    if kept == 0:
        return QUEUES_FULL
    if len(avoided) > 0:
        kept = _keep_only(keep, avoided, False, kept)
    if len(wanted) > 0:
        only = _keep_only(keep, wanted, True, 0)
        return only if only > 0 else PAIR_UNAVAILABLE
    return kept


@compiled
def _keep_only(keep: Bools, mask: Bools, value: bool, otherwise: int) -> int:
    """Keep only where `mask` is `value`; the number left. Where none would be left, nothing changes and the
    answer is `otherwise`."""
    left = 0
    for row in range(len(keep)):
        left += keep[row] and mask[row] == value
    if left == 0:
        return otherwise
    for row in range(len(keep)):
        keep[row] = keep[row] and mask[row] == value
    return left


@compiled
def _all_activity(bookings: Floats, count: int, links: int, now_s: float) -> tuple[Ints, Floats]:
    """Knots of all links: those of link l are columns 2 * offsets[l] … 2 * offsets[l + 1]."""
    offsets, members = grouped(bookings, count, t.LINK_ROW, t.PREFILLING, links)
    knots = np.empty((KNOT_ROWS, 2 * len(members)))
    for link in range(links):
        begin, end = offsets[link], offsets[link + 1]
        if end > begin:
            activity(bookings, members[begin:end], now_s, knots, 2 * begin)
    return offsets, knots


@compiled
def _gather_pools(pairs: Ints, keep: Bools, sites: Floats, decodes: Floats, links: int) -> Floats:
    """Pools, shape [links + 1, POOL_NUMBERS]: the prefill sites behind each link (behind 0 those that prefill
    locally), and last the decode workers. Rates and loads are means over servers, waits the shortest."""
    pools, last = np.zeros((links + 1, POOL_NUMBERS)), links
    pools[:, WAIT] = np.inf
    seen = np.zeros((links + 1, sites.shape[1]), dtype=np.bool_)
    for row in range(pairs.shape[1]):
        if not keep[row]:
            continue
        d, s, link = pairs[DECODE, row], pairs[SITE, row], pairs[LINK, row]
        if not seen[link, s]:
            seen[link, s] = True
            join(pools[link], sites[c.S_PRESSURE, s], sites[c.S_LOAD, s], sites[c.S_QUEUE, s], 1.0)
        if not seen[last, d]:
            seen[last, d] = True
            wait_s = max(decodes[d, c.D_PAGE_WAIT], decodes[d, c.D_SLOT])
            join(
                pools[last], decodes[d, c.D_PRESSURE], decodes[d, c.D_LOAD], wait_s, 1 / decodes[d, c.D_SHARE]
            )
    for pool in range(links + 1):
        members = max(seen[pool].sum(), 1)
        pools[pool, RATE] /= members
        pools[pool, LOAD] /= members
        close(pools[pool])
    return pools


def _make_weigh(sources: int) -> Callable[..., int]:
    @entry_point
    def weigh(
        workers: Floats, links: Floats, bookings: Floats, count: int, pairs: Ints, blocks: Ints, q: Floats,
        avoided: Bools, wanted: Bools, most: int, keep: Bools, floats: Floats, ints: Ints,
    ) -> int:  # fmt: skip
        """Take stock (`tally`), find the feasible pairs and price them.

        Args:
            pairs: shape [4, pairs]: decode slot, site slot, link column, `PlacementKind`; the pairs of a
                decode worker stand together.
            blocks: cached blocks of the prompt by worker slot.
            q: the request (`costs.NOW` …).
            avoided, wanted: by pair; empty where nothing is avoided, and where any pair will do.
            most: how many workers `shortlist.shorten` may leave of a kind where pairs are many; 0 = all.
            keep: output: which pairs were priced.
            floats, ints: outputs, a column for each pair kept.

        Returns:
            the number of pairs kept, or `TOO_LONG`, `QUEUES_FULL`, `PAIR_UNAVAILABLE`.
        """
        sources  # noqa: B018 - in the closure, see compiled.stamp
        now_s, slots = q[c.NOW], workers.shape[1]
        held_at, held = tally(now_s, q[c.STATUS_FRESH], workers, links, bookings, count)
        kept = _find_feasible(workers, pairs, blocks, q, avoided, wanted, keep)
        if kept <= 0:
            return kept
        sent_at, sent = grouped(bookings, count, t.SITE_SLOT, t.PREFILLING, slots)
        knots_at, knots = _all_activity(bookings, count, links.shape[1], now_s)
        wires = np.ones((links.shape[1], POOL_NUMBERS))
        for link in range(links.shape[1]):
            seen = links[t.LINK_COUNT, link], links[t.LINK_WORK, link], links[t.LINK_AT, link]
            wires[link, RATE], wires[link, LOAD] = c.pressure(seen[0], seen[1], seen[2], q)
            wires[link, WAIT] = max(links[t.DRAINED_AT, link] - now_s, 0.0)
            close(wires[link])
        sites = np.empty((c.SITE_NUMBERS, slots))
        decodes = np.empty((slots, c.DECODE_NUMBERS))
        for slot in range(len(blocks)):
            if workers[t.CHUNK, slot] > 0:
                c.site_numbers(workers, slot, blocks[slot], q, sites)
        decode = -1
        for row in range(pairs.shape[1]):
            d = pairs[DECODE, row]
            if not keep[row] or d == decode:
                continue
            decode = d
            c.decode_numbers(workers, d, blocks[d], q, decodes[d])
            needed, free = (
                np.ceil((q[c.PROMPT_TOKENS] + 1) / workers[t.PAGE_TOKENS, d]),
                workers[t.FREE_PAGES, d],
            )
            decodes[d, c.D_PAGE_WAIT] = 0.0
            if needed > free:
                mine, others = held[held_at[d] : held_at[d + 1]], sent[sent_at[d] : sent_at[d + 1]]
                decodes[d, c.D_PAGE_WAIT] = pages_at(needed, now_s, free, bookings, mine, others) - now_s
        pools = _gather_pools(pairs, keep, sites, decodes, links.shape[1])
        if most > 0 and kept > FEW_PAIRS:
            shorten(workers, links, pairs, sites, decodes, q, most, keep)
        q[c.LEAST_COST] = np.inf
        column = 0
        for row in range(pairs.shape[1]):
            if not keep[row]:
                continue
            d, s, link = pairs[DECODE, row], pairs[SITE, row], pairs[LINK, row]
            if d != s and sites[c.S_PAGE_WAIT, s] < 0:
                needed, free = sites[c.S_PAGES, s], workers[t.FREE_PAGES, s]
                sites[c.S_PAGE_WAIT, s] = 0.0
                if needed > free:
                    mine, others = held[held_at[s] : held_at[s + 1]], sent[sent_at[s] : sent_at[s + 1]]
                    sites[c.S_PAGE_WAIT, s] = pages_at(needed, now_s, free, bookings, mine, others) - now_s
            on_link = knots[:, 2 * knots_at[link] : 2 * knots_at[link + 1]]
            c.price(
                workers, d, s, pairs[KIND, row], sites, decodes[d], links, link, wires[link], pools[link],
                pools[-1], on_link, q, column, floats, ints,
            )  # fmt: skip
            q[c.LEAST_COST] = min(q[c.LEAST_COST], floats[c.COST, column])
            column += 1
        return column

    return weigh


weigh = _make_weigh(stamp())
_NO_PAIRS: Ints = np.zeros((4, 0), np.int64)
_NO_BLOCKS: Ints = np.zeros(0, np.int64)
_ANY: Bools = np.zeros(0, np.bool_)


def take_stock(workers: Floats, links: Floats, bookings: Floats, count: int, q: Floats, now_s: float) -> None:
    """`tally` as of `now_s`, for whoever wants to read the tables between placements."""
    q[c.NOW] = now_s
    no_floats, no_ints = np.zeros((c.FLOAT_ROWS, 0)), np.zeros((c.INT_ROWS, 0), np.int64)
    weigh(
        workers, links, bookings, count, _NO_PAIRS, _NO_BLOCKS, q, _ANY, _ANY, 0, _ANY.copy(), no_floats,
        no_ints,
    )  # fmt: skip

"""What workers and links have to do as of now: derived anew from statuses and bookings in one compiled pass,
whenever it is to be read. Nothing is summed up incrementally, so nothing can drift.
"""

from __future__ import annotations

import numpy as np

from policies.types import Floats, Ints
from router.core import tables as t
from router.core.compiled import compiled, sort

FOREIGN_WAIT_S = 1.0
"""Guess where a worker is full of what this router has not placed."""
GRANT_SPREAD_S = 0.5
"""Grants of requests placed at the same time reach a site within this."""
OVERDUE_SHARE = 0.25
"""An overdue answer is given this share of its length again."""


@compiled
def grouped(bookings: Floats, count: int, column: int, flag: int, groups: int) -> tuple[Ints, Ints]:
    """Bookings whose `flag` is set by the slot in `column`, oldest first: those of group g are
    `members[offsets[g] : offsets[g + 1]]`. Slots below 0 belong to none."""
    offsets = np.zeros(groups + 1, dtype=np.int64)
    for row in range(count):
        if bookings[row, flag] > 0 and bookings[row, column] >= 0:
            offsets[int(bookings[row, column]) + 1] += 1
    for group in range(groups):
        offsets[group + 1] += offsets[group]
    members = np.empty(offsets[groups], dtype=np.int64)
    place = offsets.copy()
    for row in range(count):
        if bookings[row, flag] > 0 and bookings[row, column] >= 0:
            group = int(bookings[row, column])
            members[place[group]] = row
            place[group] += 1
    return offsets, members


@compiled
def answer_end(bookings: Floats, row: int, now_s: float) -> float:
    """Expected end of a booked answer; an overdue one is given a part of its length again."""
    end_s = bookings[row, t.END_AT]
    if end_s > now_s:
        return float(end_s)
    return now_s + OVERDUE_SHARE * float(max(end_s - bookings[row, t.BOOKED_AT], 0.1))


@compiled
def _sum_up(now_s: float, workers: Floats, links: Floats, bookings: Floats, count: int) -> None:
    """Add each booking to its workers' and its link's working space."""
    for slot in range(workers.shape[1]):
        for quantity in range(t.SHOWN_TOKENS, t.PINNED_UNSEEN + 1):
            workers[quantity, slot] = 0.0
        workers[t.RUNNING, slot] = workers[t.RUNNING_CONTEXT, slot] = 0.0
        workers[t.QUEUED_TOKENS, slot] = 0.0
    for link in range(links.shape[1]):
        links[t.DRAINED_AT, link] = 0.0
    for row in range(count):
        held, prefilling = bookings[row, t.HELD] > 0, bookings[row, t.PREFILLING] > 0
        if not held:
            continue
        d, s = int(bookings[row, t.DECODE_SLOT]), int(bookings[row, t.SITE_SLOT])
        visible_s = bookings[row, t.VISIBLE_AT]
        workers[t.DECODES, d] += 1
        pages = bookings[row, t.DECODE_PAGES]
        workers[t.PINNED, d] += pages
        if visible_s > workers[t.STATUS_AT, d]:
            workers[t.PINNED_UNSEEN, d] += pages
        if bookings[row, t.DECODING] > 0:
            workers[t.RUNNING, d] += 1
            workers[t.RUNNING_CONTEXT, d] += bookings[row, t.CONTEXT]
        elif s != d:
            workers[t.AWAITING_KV, d] += 1
        if not prefilling:
            continue
        tokens = bookings[row, t.TOKENS]
        workers[t.PREFILLS, s] += 1
        workers[t.QUEUED_TOKENS, s] += tokens
        shown = visible_s <= workers[t.STATUS_AT, s]
        if shown:
            workers[t.SHOWN_TOKENS, s] += tokens
            workers[t.SHOWN_WORK, s] += bookings[row, t.WORK]
        else:
            workers[t.UNSHOWN_TOKENS, s] += tokens
        workers[t.PINNED, s] += bookings[row, t.SITE_PAGES]
        if not shown:
            workers[t.PINNED_UNSEEN, s] += bookings[row, t.SITE_PAGES]
        if s != d:
            begin_s, end_s = bookings[row, t.TRANSFER_BEGIN], bookings[row, t.TRANSFER_END]
            if begin_s > now_s + GRANT_SPREAD_S:
                continue  # it waits for pages or its prefill's turn: the link does not
            left = (end_s - now_s) / max(end_s - begin_s, 1e-9)
            link = int(bookings[row, t.LINK_ROW])
            links[t.DRAINED_AT, link] += bookings[row, t.KV_BYTES] * min(max(left, 0.0), 1.0)


@compiled
def _prefill_base(workers: Floats, slot: int) -> float:
    """When what the worker says it has left of prefill work ends, by the bookings that it may know."""
    said = workers[t.STATUS_PREFILL_TOKENS, slot]
    shown = workers[t.SHOWN_TOKENS, slot]
    # What the worker has beyond the shown bookings may be unseen ones that it has by now.
    left = said - min(max(0.0, said - shown), workers[t.UNSHOWN_TOKENS, slot])
    if shown > 0:
        token_s = workers[t.SHOWN_WORK, slot] / shown
    else:
        chunk = workers[t.CHUNK, slot]
        attention_s = chunk / 2 * workers[t.PREFILL_CONTEXT, slot]
        token_s = workers[t.PREFILL_BASE, slot] / chunk + workers[t.PREFILL_TOKEN, slot] + attention_s
    return float(workers[t.STATUS_AT, slot] + left * token_s)


@compiled
def _slot_at(
    now_s: float, workers: Floats, slot: int, bookings: Floats, offsets: Ints, members: Ints
) -> float:
    """When one more sequence may decode on the worker; 0 = now."""
    full_by = int(max(workers[t.RUNNING, slot], workers[t.DECODES, slot]) - workers[t.MAX_RUNNING, slot])
    if full_by < 0:
        return 0.0
    mine = members[offsets[slot] : offsets[slot + 1]].copy()
    if len(mine) == 0:
        return now_s + FOREIGN_WAIT_S
    ends_s = np.empty(len(mine))
    for i in range(len(mine)):
        ends_s[i] = answer_end(bookings, mine[i], now_s)
    sort(ends_s, mine)
    return float(ends_s[min(full_by, len(mine) - 1)])


@compiled
def tally(
    now_s: float, status_fresh_s: float, workers: Floats, links: Floats, bookings: Floats, count: int
) -> tuple[Ints, Ints]:
    """Write the rows that `tables` calls "as of the last tally".

    A status older than `status_fresh_s` is not used; a fresh one rules, except for what it cannot know.

    Args:
        workers, links: tables, shape [quantity, column].
        bookings: shape [at least count, quantity], oldest first.

    Returns:
        booked answers by worker, see `grouped`.
    """
    _sum_up(now_s, workers, links, bookings, count)
    columns = workers.shape[1]
    for slot in range(columns):
        fresh = now_s - workers[t.STATUS_AT, slot] <= status_fresh_s
        workers[t.FREE_AT, slot] = _prefill_base(workers, slot) if fresh else 0.0
        waiting = workers[t.PREFILLS, slot] + workers[t.AWAITING_KV, slot]
        if fresh and workers[t.STATUS_AT, slot] > workers[t.DECODES_CHANGED_AT, slot]:
            local = workers[t.DECODES, slot] - workers[t.RUNNING, slot] - workers[t.AWAITING_KV, slot]
            running = workers[t.STATUS_RUNNING, slot] - local
            workers[t.RUNNING, slot] = max(workers[t.RUNNING, slot], running)
            context = max(workers[t.RUNNING_CONTEXT, slot], workers[t.STATUS_CONTEXT, slot])
            workers[t.RUNNING_CONTEXT, slot] = context
        if workers[t.RUNNING, slot] == 0:
            workers[t.RUNNING_CONTEXT, slot] = 0.0
        # By our bookings, which count those that wait for pages too; the worker's word where it has less.
        free = workers[t.TOTAL_PAGES, slot] - workers[t.PINNED, slot]
        if fresh and workers[t.STATUS_PAGES, slot] > 0:
            free = min(free, workers[t.STATUS_FREE_PAGES, slot] - workers[t.PINNED_UNSEEN, slot])
        workers[t.FREE_PAGES, slot] = free
        workers[t.WAITING, slot] = max(waiting, workers[t.STATUS_WAITING, slot]) if fresh else waiting
    for row in range(count):
        if bookings[row, t.PREFILLING] > 0:
            slot = int(bookings[row, t.SITE_SLOT])
            status_at_s = workers[t.STATUS_AT, slot]
            stale = now_s - status_at_s > status_fresh_s
            if stale or bookings[row, t.VISIBLE_AT] > status_at_s:
                arrive_s, free_s = bookings[row, t.ARRIVE_AT], workers[t.FREE_AT, slot]
                # One that waits for pages on its decode worker is not ahead of a request granted by now.
                if arrive_s <= max(free_s, now_s) + GRANT_SPREAD_S:
                    workers[t.FREE_AT, slot] = max(free_s, arrive_s) + bookings[row, t.WORK]
    offsets, members = grouped(bookings, count, t.DECODE_SLOT, t.HELD, columns)
    for slot in range(columns):
        workers[t.SLOT_AT, slot] = _slot_at(now_s, workers, slot, bookings, offsets, members)
    for link in range(links.shape[1]):
        links[t.DRAINED_AT, link] = now_s + links[t.DRAINED_AT, link] / max(links[t.RATE, link], 1e-9)
    return offsets, members


@compiled
def pages_at(
    needed: float, now_s: float, free: float, bookings: Floats, held: Ints, prefilling: Ints
) -> float:
    """When `needed` pages are free on the worker, taking bookings to end as predicted.

    Args:
        held, prefilling: rows of the answers booked on it, and of the prompts that it prefills.
    """
    total = len(held) + len(prefilling)
    ends_s, pages = np.empty(total), np.empty(total, dtype=np.int64)
    for i in range(len(held)):
        ends_s[i] = answer_end(bookings, held[i], now_s)
        pages[i] = int(bookings[held[i], t.DECODE_PAGES])
    for i in range(len(prefilling)):
        ends_s[len(held) + i] = max(bookings[prefilling[i], t.TRANSFER_END], now_s)
        pages[len(held) + i] = int(bookings[prefilling[i], t.SITE_PAGES])
    sort(ends_s, pages)
    at_s = now_s
    for i in range(total):
        if free >= needed:
            break
        at_s = ends_s[i]
        free += pages[i]
    return at_s if free >= needed else at_s + FOREIGN_WAIT_S

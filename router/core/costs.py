"""Prices every candidate placement of one request in seconds, all at once; docs/cost.md has the formulas.

Arrays have one entry per candidate. `d_…` belongs to its decode worker, `s_…` to its prefill site. Local
prefill points at link row `NO_LINK`, whose results are masked out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from policies.types import Bools, Candidates, Floats, Ints, PlacementKind
from router.core import tables as t
from router.core.config import SchedulerConfig
from router.core.links import LinkState

SITE_ARRIVALS = slice(t.PREFILL_COUNT, t.PREFILL_AT + 1)
LINK_ARRIVALS = slice(t.LINK_COUNT, t.LINK_AT + 1)
DECODE_ARRIVALS = slice(t.DECODE_COUNT, t.DECODE_AT + 1)
OVERDUE_S = 0.1
"""A booked transfer that should be over is held to last this much longer."""


@dataclass(slots=True)
class Rows:
    """Candidates before pricing: names, gathered numbers, cached prefixes."""

    decode: tuple[str, ...]
    site: tuple[str, ...]
    kind: Ints
    local: Bools
    link_row: Ints
    d: Floats
    """Worker table of the decode workers, [quantity, candidate]."""
    s: Floats
    """The same of the prefill sites."""
    link: Floats
    """Link table, [quantity, candidate]."""
    d_blocks: Ints
    """Cached blocks of the prompt, by the index."""
    s_blocks: Ints
    d_page_wait_s: Floats
    """Until the decode worker has pages for the prompt."""
    s_page_wait_s: Floats


@dataclass(slots=True)
class Priced:
    """Candidates and the intermediate numbers that a booking needs, one entry per candidate."""

    candidates: Candidates
    granted_s: Floats
    """When the site hears of it, relative to now."""
    transfer_begin_s: Floats
    """Relative to now."""
    link_seconds: Floats
    """Bytes over the link's whole rate."""
    decode_share: Floats
    """Seconds of the whole decode worker that this request takes: share of it times time held."""
    mixed_step_s: Floats


@dataclass(slots=True)
class _Chunks:
    """Prefill at the site: bounds of its first chunk with anything to send, and its last chunk."""

    first: Floats
    """Tokens computed before it."""
    first_end: Floats
    size: Floats
    last: Floats
    """Tokens computed before the last chunk."""
    n: Floats
    at: Floats
    """Seconds until `first`, `first_end`, the end of the chunk after it, `last` and `n`; shape [5, rows]."""


def _chunks(s: Floats, n: Floats, s_cached: Floats, d_cached: Floats) -> _Chunks:
    """Time the chunk boundaries: attention terms add up to x·(c + x/2), only the base counts chunks."""
    size = s[t.CHUNK]
    first = np.floor(np.maximum(d_cached - s_cached, 0.0) / size) * size
    first_end = np.minimum(first + size, n)
    last = np.maximum(np.ceil(n / size) - 1, 0.0) * size
    x = np.array((first, first_end, np.minimum(first_end + size, n), last, n))
    attention = (s_cached + x / 2) * s[t.PREFILL_CONTEXT]
    at = np.ceil(x / size) * s[t.PREFILL_BASE] + x * (s[t.PREFILL_TOKEN] + attention)
    return _Chunks(first, first_end, size, last, n, at)


def price(
    rows: Rows,
    *,
    prompt_tokens: int,
    now_s: float,
    elapsed_s: float,
    path_overhead_s: Floats,
    output_tokens: float,
    links: Iterable[LinkState],
    config: SchedulerConfig,
) -> Priced:
    """Price every candidate.

    Args:
        prompt_tokens: L; L-1 of them are prefilled, the last is the first decode step's input.
        elapsed_s: since the request's arrival.
        path_overhead_s: measured overhead by `PlacementKind`, shape [4].
        output_tokens: expected length of the answer.
    """
    d, s, local = rows.d, rows.s, rows.local
    prompt = prompt_tokens - 1
    page = d[t.PAGE_TOKENS]
    d_cached = np.minimum(rows.d_blocks, prompt // page) * page
    s_cached = np.minimum(rows.s_blocks, prompt // s[t.PAGE_TOKENS]) * s[t.PAGE_TOKENS]
    n = prompt - s_cached
    chunks = _chunks(s, n, s_cached, d_cached)
    pure_s = chunks.at[4]
    running, step_s = d[t.RUNNING], _step_s(d)
    steps = np.ceil(n / s[t.CHUNK])
    # A chunk that shares its step with running decodes does not pay the step's base a second time.
    shared_s = np.where(local & (running > 0), np.minimum(s[t.PREFILL_BASE], d[t.DECODE_BASE]), 0.0)
    mixed_step_s = np.where(local, step_s, 0.0) - shared_s
    prefill_s = pure_s + steps * mixed_step_s

    queue_s = np.maximum(s[t.FREE_AT] - now_s, 0.0)
    granted_s = rows.d_page_wait_s + np.where(local, 0.0, rows.link[t.RTT] / 2)
    start_s = np.where(n > 0, np.maximum(np.maximum(queue_s, granted_s), rows.s_page_wait_s), granted_s)

    page_bytes = d[t.PAGE_BYTES]
    kv_bytes = np.where(local, 0.0, (np.ceil(prompt / page) - d_cached / page) * page_bytes)
    link_s = kv_bytes / rows.link[t.RATE]
    share = _link_share(rows, start_s, np.maximum(prefill_s, link_s), now_s, links)
    hot_bytes = np.maximum(s_cached - d_cached, 0.0) / page * page_bytes
    ready_s = _ready_s(
        chunks, start_s, granted_s, kv_bytes, hot_bytes, d_cached - s_cached, s[t.LAYERS], share
    )
    ready_s += config.link_ramp_s + 1.5 * rows.link[t.RTT]
    transfer_s = np.where(local, 0.0, np.maximum(ready_s - start_s - prefill_s, 0.0))

    ready_s = start_s + prefill_s + transfer_s
    slot_s = np.maximum(d[t.SLOT_AT] - now_s, 0.0)
    first_step_s = _first_step_s(d, prompt_tokens, np.maximum(ready_s, slot_s), step_s, local, now_s)
    kind = np.where(local & (2 * d_cached >= prompt_tokens), int(PlacementKind.REUSE), rows.kind)
    explained_s = np.maximum(ready_s, slot_s) + first_step_s
    # A negative overhead means that the terms are too high; it may not eat up a small request's.
    overhead_s = elapsed_s + np.maximum(path_overhead_s[kind], -0.5 * explained_s)
    ttft_s = explained_s + overhead_s

    interference_s = np.where(local, running * (pure_s - steps * shared_s), 0.0)
    pages, share_of_decode = _decode_share(d, prompt_tokens)
    decode_share_s = share_of_decode * (ttft_s + output_tokens * first_step_s)
    idle_s = np.array((queue_s, rows.link[t.DRAINED_AT] - now_s, d[t.PAGES_IDLE_AT] - now_s))
    arrivals = np.array((s[SITE_ARRIVALS], rows.link[LINK_ARRIVALS], d[DECODE_ARRIVALS]))
    imposed_s = _imposed_s(np.array((prefill_s, link_s, decode_share_s)), idle_s, arrivals, now_s, config)
    slower_s = 0.5 * running * output_tokens * (d[t.DECODE_SEQUENCE] + prompt_tokens * d[t.DECODE_CONTEXT])
    full = _full_probability(d, pages, share_of_decode)
    externality_s = imposed_s[0] + imposed_s[1] + full * imposed_s[2] + slower_s
    candidates = Candidates(
        decode=rows.decode,
        site=rows.site,
        kind=kind,
        uncached_tokens=n.astype(np.int64),
        decode_cached_tokens=d_cached.astype(np.int64),
        site_cached_tokens=s_cached.astype(np.int64),
        kv_bytes=kv_bytes.astype(np.int64),
        start_s=start_s,
        prefill_s=prefill_s,
        transfer_s=transfer_s,
        slot_s=slot_s,
        step_s=first_step_s,
        overhead_s=overhead_s,
        ttft_s=ttft_s,
        interference_s=interference_s,
        externality_s=externality_s,
        cost_s=ttft_s + interference_s + externality_s,
    )
    begin_s = np.where(hot_bytes > 0, granted_s, start_s)
    return Priced(candidates, granted_s, begin_s, link_s, decode_share_s, mixed_step_s)


def _step_s(d: Floats) -> Floats:
    """One decode step of the batch running now; 0 where none runs."""
    step_s = d[t.DECODE_BASE] + d[t.RUNNING] * d[t.DECODE_SEQUENCE]
    step_s += d[t.RUNNING_CONTEXT] * d[t.DECODE_CONTEXT]
    running_s: Floats = np.where(d[t.RUNNING] > 0, step_s, 0.0)
    return running_s


def _first_step_s(
    d: Floats, prompt_tokens: int, ready_s: Floats, running_step_s: Floats, local: Bools, now_s: float
) -> Floats:
    """The request's own first step, after what is left (half, on average) of the step it arrives in.

    Where the worker still prefills others' prompts by then, both steps carry a chunk (one from the middle
    of a prompt as long as this one stands for it). FIFO: a local prefill has nothing ahead of it any more.
    """
    own_s = (
        d[t.DECODE_BASE]
        + (d[t.RUNNING] + 1) * d[t.DECODE_SEQUENCE]
        + (d[t.RUNNING_CONTEXT] + prompt_tokens) * d[t.DECODE_CONTEXT]
    )
    chunk = d[t.CHUNK]
    chunk_s = d[t.PREFILL_BASE] + chunk * (d[t.PREFILL_TOKEN] + prompt_tokens / 2 * d[t.PREFILL_CONTEXT])
    busy = ~local & (d[t.FREE_AT] - now_s > ready_s)
    step_s: Floats = own_s + 0.5 * running_step_s + np.where(busy, 1.5 * chunk_s, 0.0)
    return step_s


def _ready_s(
    chunks: _Chunks,
    start_s: Floats,
    granted_s: Floats,
    kv_bytes: Floats,
    hot_bytes: Floats,
    ahead: Floats,
    layers: Floats,
    share: Floats,
) -> Floats:
    """max_k(r_k + Σ_{i≥k} b_i/B) without landing time, over pieces k = (chunk, layer) and the cached bytes.

    Chunks take ever longer and carry equal bytes, so r_k + Σ_{i≥k} b_i/B is convex over full chunks: its
    maximum is at either end. Only the first may carry fewer bytes (of it, decode has `ahead` tokens more
    than the site has cached) and only the last be shorter, so it is at one of: the first layer of the
    first chunk, both sides of that chunk's end, both sides of the last chunk's begin, the last layer.
    """
    computed = kv_bytes - hot_bytes
    per_token = computed / np.maximum(chunks.n - np.maximum(ahead, 0.0), 1.0)
    before_first, after_first, after_second, before_last, end = chunks.at
    left = (chunks.n - chunks.first_end) * per_token
    last_bytes = np.minimum((chunks.n - chunks.last) * per_token, computed)
    before_bytes = np.minimum(chunks.size * per_token, computed - last_bytes)
    released = (
        before_first + (after_first - before_first) / layers,
        after_first,
        after_first + (after_second - after_first) / layers,
        before_last,
        before_last + (end - before_last) / layers,
        end,
    )
    remaining = (
        computed,
        (computed - left) / layers + left,
        left,
        before_bytes / layers + last_bytes,
        last_bytes,
        last_bytes / layers,
    )
    computed_s = start_s + (np.array(released) + np.array(remaining) / share).max(axis=0)
    ready_s: Floats = np.where(
        hot_bytes > 0, np.maximum(computed_s, granted_s + kv_bytes / share), computed_s
    )
    return ready_s


def _link_share(
    rows: Rows, begin_s: Floats, length_s: Floats, now_s: float, links: Iterable[LinkState]
) -> Floats:
    """Bytes per second left to this transfer by those booked on the link while it lasts.

    Max-min fair sharing with capped streams: a stream that its prefill limits to r takes r, so
    max(C - Σ w·r, C / (1 + Σ w)), w being the part of the window in which the other is active: exact when
    all others are capped below the fair share or all above it, a lower bound between.
    """
    rate: Floats = rows.link[t.RATE]
    booked = [link.booked for link in links if link.transfers]
    if not booked:
        return rate
    begins, ends, size, row = np.concatenate(booked, axis=1)[:, :, None]
    begins, ends = begins - now_s, np.maximum(ends - now_s, OVERDUE_S)
    until_s = begin_s + np.maximum(length_s, 1e-6)
    overlap = np.minimum(ends, until_s) - np.maximum(begins, begin_s)
    weight = np.maximum(overlap, 0.0) / (until_s - begin_s) * (row == rows.link_row)
    taken = (weight * (size / np.maximum(ends - begins, 1e-6))).sum(axis=0)
    share: Floats = np.maximum(rate - taken, rate / (1 + weight.sum(axis=0)))
    return share


def _imposed_s(
    x: Floats, backlog_s: Floats, arrivals: Floats, now_s: float, config: SchedulerConfig
) -> Floats:
    """Delay that x seconds of work impose on later arrivals of one FIFO server, summed over them.

    They wait x longer until the backlog's busy period ends, then ever less: λ·x·(W + x/2)/(1-load).

    Args:
        x: shape [servers, rows], like `backlog_s` (W; below 0 counts as 0).
        arrivals: decayed count, decayed work and time of the last one, shape [servers, 3, rows].
    """
    weight = np.exp((arrivals[:, 2] - now_s) / config.rate_window_s) / config.rate_window_s
    load = np.minimum(arrivals[:, 1] * weight, config.max_load)
    busy_s = np.minimum((np.maximum(backlog_s, 0.0) + x / 2) / (1 - load), config.busy_horizon_s)
    imposed_s: Floats = arrivals[:, 0] * weight * x * busy_s
    return imposed_s


def _decode_share(d: Floats, prompt_tokens: int) -> tuple[Floats, Floats]:
    """(pages that the prompt takes, its dominant share of the decode worker: of pages or of slots)."""
    pages = np.ceil((prompt_tokens + 1) / d[t.PAGE_TOKENS])
    return pages, np.maximum(pages / d[t.TOTAL_PAGES], 1 / d[t.MAX_RUNNING])


def _full_probability(d: Floats, pages: Floats, share: Floats) -> Floats:
    """How likely a later arrival waits for the decode worker: many requests fit at once, so the FIFO price
    is due only where it is full. Sakasegawa's u^(√(2(c+1))-1) for c = 1/share places."""
    used_pages = 1 - (d[t.FREE_PAGES] - pages) / d[t.TOTAL_PAGES]
    used = np.maximum(used_pages, (d[t.RUNNING] + 1) / d[t.MAX_RUNNING])
    full: Floats = np.minimum(used, 1.0) ** (np.sqrt(2 / share + 2) - 1)
    return full

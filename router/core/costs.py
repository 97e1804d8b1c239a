"""Prices one candidate placement in seconds; docs/cost.md has the formulas. Compiled, a candidate at a time.

What depends on one worker alone is reckoned once per request and worker (`site_numbers`, `decode_numbers`).
"""

from __future__ import annotations

import math

import numpy as np

from policies.types import Floats, Ints
from router.core import tables as t
from router.core.compiled import compiled
from router.core.config import SchedulerConfig
from router.core.link_share import link_share
from router.core.pools import imposed_s

LOCAL, POOL, REMOTE, REUSE = 1, 2, 3, 0
"""`policies.types.PlacementKind`, as compiled code sees it."""

# Rows of the float output: the terms in the order of `policies.types.TERM_NAMES`, then what a booking needs.
(
    START, PREFILL, TRANSFER, SLOT, STEP, OVERHEAD, TTFT, INTERFERENCE, EXTERNALITY, COST,
    GRANTED,         # when the site hears of it, relative to now
    TRANSFER_BEGIN,  # relative to now
    LINK_SECONDS,    # bytes over the link's whole rate
    DECODE_SHARE,    # seconds of the whole decode worker: this request's share of it times the time held
    MIXED_STEP,      # decode step that each local prefill chunk carries along, less what both share
    TOKEN_STEP,      # seconds of one decode step with this request in the batch
) = range(16)  # fmt: skip
FLOAT_ROWS = 16
# Rows of the whole-number output, in the order of `policies.types.Candidates`.
KIND, UNCACHED, DECODE_CACHED, SITE_CACHED, KV_BYTES = range(5)
INT_ROWS = 5

# One request and the constants of pricing, as a vector.
(
    NOW,             # seconds, absolute
    PROMPT_TOKENS,   # L; L-1 of them are prefilled, the last is the first decode step's input
    ELAPSED,         # seconds since the request's arrival
    OUTPUT_TOKENS,   # expected length of the answer
    RATE_WINDOW, MAX_LOAD, BUSY_HORIZON, LINK_RAMP, STATUS_FRESH,  # of SchedulerConfig
    OVERHEAD_REUSE, OVERHEAD_LOCAL, OVERHEAD_POOL, OVERHEAD_REMOTE,  # measured, by PlacementKind
    LEAST_COST,      # written by `weigh`: of all candidates
) = range(14)  # fmt: skip
REQUEST_NUMBERS = 14

# Rows of what `site_numbers` finds, per worker as a prefill site.
S_CACHED, S_NEW, S_PURE, S_STEPS, S_QUEUE, S_PRESSURE, S_LOAD, S_PAGES, S_PAGE_WAIT = range(9)
SITE_NUMBERS = 9
# What `decode_numbers` finds, of one decode worker.
(
    D_CACHED, D_LACKING, D_STEP, D_FIRST_STEP, D_TOKEN_STEP, D_CHUNK_STEP, D_SLOT, D_SHARE,
    D_PRESSURE, D_LOAD, D_PAGE_WAIT,
) = range(11)  # fmt: skip
DECODE_NUMBERS = 11


@compiled
def pressure(count: float, work: float, at_s: float, q: Floats) -> tuple[float, float]:
    """(arrivals per second, load) of a server by its decayed count and work as they were at `at_s`."""
    weight = math.exp((at_s - q[NOW]) / q[RATE_WINDOW]) / q[RATE_WINDOW]
    return count * weight, min(work * weight, q[MAX_LOAD])


@compiled
def chunks_s(x: float, cached: float, workers: Floats, slot: int) -> float:
    """Seconds until x tokens after `cached` are computed. The chunks' attention terms add up to
    x·(c + x/2), so only the base counts chunks."""
    attention_s = (cached + x / 2) * workers[t.PREFILL_CONTEXT, slot]
    base_s = math.ceil(x / workers[t.CHUNK, slot]) * workers[t.PREFILL_BASE, slot]
    return float(base_s + x * (workers[t.PREFILL_TOKEN, slot] + attention_s))


@compiled
def cached_tokens(workers: Floats, slot: int, blocks: int, prompt: float) -> float:
    """Tokens in full cached pages; never the last prompt token, which is decode's first input."""
    page = workers[t.PAGE_TOKENS, slot]
    return float(min(float(blocks), prompt // page) * page)


@compiled
def site_numbers(workers: Floats, slot: int, blocks: int, q: Floats, out: Floats) -> None:
    """Fill `out[:, slot]` for the worker as a prefill site."""
    prompt = q[PROMPT_TOKENS] - 1
    cached = cached_tokens(workers, slot, blocks, prompt)
    new = prompt - cached
    count, work = workers[t.PREFILL_COUNT, slot], workers[t.PREFILL_WORK, slot]
    out[S_CACHED, slot] = cached
    out[S_NEW, slot] = new
    out[S_PURE, slot] = chunks_s(new, cached, workers, slot)
    out[S_STEPS, slot] = math.ceil(new / workers[t.CHUNK, slot])
    out[S_QUEUE, slot] = max(workers[t.FREE_AT, slot] - q[NOW], 0.0)
    out[S_PRESSURE, slot], out[S_LOAD, slot] = pressure(count, work, workers[t.PREFILL_AT, slot], q)
    out[S_PAGES, slot] = math.ceil(prompt / workers[t.PAGE_TOKENS, slot])
    out[S_PAGE_WAIT, slot] = -1.0  # not asked yet


@compiled
def decode_numbers(workers: Floats, slot: int, blocks: int, q: Floats, d: Floats) -> None:
    """Fill `d` (all but `D_PAGE_WAIT`) for the decode worker in `slot`."""
    tokens = q[PROMPT_TOKENS]
    page = workers[t.PAGE_TOKENS, slot]
    running, context = workers[t.RUNNING, slot], workers[t.RUNNING_CONTEXT, slot]
    base_s, sequence_s = workers[t.DECODE_BASE, slot], workers[t.DECODE_SEQUENCE, slot]
    context_s = workers[t.DECODE_CONTEXT, slot]
    d[D_CACHED] = cached_tokens(workers, slot, blocks, tokens - 1)
    d[D_LACKING] = math.ceil((tokens - 1) / page) - d[D_CACHED] / page
    step_s = base_s + running * sequence_s + context * context_s if running > 0 else 0.0
    own_s = base_s + (running + 1) * sequence_s + (context + tokens) * context_s
    # After half (on average) of the step that it arrives in.
    d[D_STEP], d[D_FIRST_STEP], d[D_TOKEN_STEP] = step_s, own_s + 0.5 * step_s, own_s
    # Of others' prompts: a chunk from the middle of one as long as this one stands for it.
    token_s = workers[t.PREFILL_TOKEN, slot] + tokens / 2 * workers[t.PREFILL_CONTEXT, slot]
    d[D_CHUNK_STEP] = workers[t.PREFILL_BASE, slot] + workers[t.CHUNK, slot] * token_s
    d[D_SLOT] = max(workers[t.SLOT_AT, slot] - q[NOW], 0.0)
    pages = math.ceil((tokens + 1) / page)
    share = max(pages / workers[t.TOTAL_PAGES, slot], 1 / workers[t.MAX_RUNNING, slot])
    d[D_SHARE] = share
    count, work = workers[t.DECODE_COUNT, slot], workers[t.DECODE_WORK, slot]
    d[D_PRESSURE], d[D_LOAD] = pressure(count, work, workers[t.DECODE_AT, slot], q)


@compiled
def computed_ready_s(
    workers: Floats, s: int, cached: float, new: float, ahead: float, page_bytes: float, state_bytes: float,
    share: float,
) -> float:  # fmt: skip
    """max_k(r_k + Σ_{i≥k} b_i/B) over pieces k = (chunk, layer) of what the site computes, from its start.

    Chunks take ever longer and carry equal bytes, so r_k + Σ_{i≥k} b_i/B is convex over full chunks: its
    maximum is at either end. Only the first may carry fewer bytes (of it, decode has `ahead` tokens more
    than the site has cached) and only the last be shorter, so it is at one of: the first layer of the
    first chunk, both sides of that chunk's end, both sides of the last chunk's begin, the last layer. The
    fixed state is released with the last layer and follows every piece.

    Args:
        page_bytes: of all computed pages that cross; `state_bytes`: what follows them.
    """
    size, layers = workers[t.CHUNK, s], workers[t.LAYERS, s]
    first = math.floor(max(ahead, 0.0) / size) * size
    first_end = min(first + size, new)
    last = max(math.ceil(new / size) - 1, 0.0) * size
    before_first_s = chunks_s(first, cached, workers, s)
    after_first_s = chunks_s(first_end, cached, workers, s)
    after_second_s = chunks_s(min(first_end + size, new), cached, workers, s)
    before_last_s = chunks_s(last, cached, workers, s)
    end_s = chunks_s(new, cached, workers, s)
    per_token = page_bytes / max(new - max(ahead, 0.0), 1.0)
    left = (new - first_end) * per_token
    last_bytes = min((new - last) * per_token, page_bytes)
    before_bytes = min(size * per_token, page_bytes - last_bytes)
    ready_s = before_first_s + (after_first_s - before_first_s) / layers + (page_bytes + state_bytes) / share
    ready_s = max(ready_s, after_first_s + ((page_bytes - left) / layers + left + state_bytes) / share)
    second_s = (after_second_s - after_first_s) / layers
    ready_s = max(ready_s, after_first_s + second_s + (left + state_bytes) / share)
    ready_s = max(ready_s, before_last_s + (before_bytes / layers + last_bytes + state_bytes) / share)
    first_layer_s = (end_s - before_last_s) / layers
    ready_s = max(ready_s, before_last_s + first_layer_s + (last_bytes + state_bytes) / share)
    return float(max(ready_s, end_s + (last_bytes / layers + state_bytes) / share))


@compiled
def price(
    workers: Floats, decode: int, site: int, kind: int, sites: Floats, d: Floats, links: Floats, link: int,
    wire: Floats, site_pool: Floats, decode_pool: Floats, knots: Floats, q: Floats, row: int,
    floats: Floats, ints: Ints,
) -> None:  # fmt: skip
    """Price the pair of the workers in slots `decode` and `site`; write column `row` of the outputs.

    Args:
        sites, d: of `site_numbers` and `decode_numbers`, with page waits.
        link: column in `links`; ignored for a local pair.
        wire, site_pool, decode_pool: what stands in for the link, the site and the decode worker
            (`pools.imposed_s`); a link is a pool of one.
        knots: of the link's booked transfers (`link_share.activity`).
    """
    local, now_s = decode == site, q[NOW]
    s_cached, new = sites[S_CACHED, site], sites[S_NEW, site]
    pure_s, queue_s = sites[S_PURE, site], sites[S_QUEUE, site]
    running, steps, d_cached = workers[t.RUNNING, decode], sites[S_STEPS, site], d[D_CACHED]
    mixed_step_s = interference_s = transfer_s = link_s = kv_bytes = externality_s = 0.0
    granted_s = d[D_PAGE_WAIT]
    if local:
        # A chunk that shares its step with running decodes does not pay the step's base a second time.
        shared_s = min(workers[t.PREFILL_BASE, site], workers[t.DECODE_BASE, decode]) if running > 0 else 0.0
        mixed_step_s = d[D_STEP] - shared_s
        interference_s = running * (pure_s - steps * shared_s)
    else:
        granted_s += links[t.RTT, link] / 2
    prefill_s = pure_s + steps * mixed_step_s
    start_s = granted_s
    if new > 0:
        start_s = max(queue_s, granted_s, 0.0 if local else sites[S_PAGE_WAIT, site])
    begin_s = start_s
    if not local:
        page_bytes, state_bytes = workers[t.PAGE_BYTES, decode], workers[t.STATE_BYTES, decode]
        kv_bytes = d[D_LACKING] * page_bytes + state_bytes
        link_s = kv_bytes / links[t.RATE, link]
        share = link_share(links[t.RATE, link], knots, start_s, max(prefill_s, link_s))
        hot_bytes = max(s_cached - d_cached, 0.0) / workers[t.PAGE_TOKENS, decode] * page_bytes
        computed_bytes = kv_bytes - state_bytes - hot_bytes
        arrived_s = start_s + computed_ready_s(
            workers, site, s_cached, new, d_cached - s_cached, computed_bytes, state_bytes, share
        )
        if hot_bytes > 0:
            begin_s = granted_s
            arrived_s = max(arrived_s, granted_s + kv_bytes / share)
        arrived_s += q[LINK_RAMP] + 1.5 * links[t.RTT, link]
        transfer_s = max(arrived_s - start_s - prefill_s, 0.0)
        externality_s = imposed_s(link_s, wire, q[BUSY_HORIZON])

    ready_s = max(start_s + prefill_s + transfer_s, d[D_SLOT])
    step_s = d[D_FIRST_STEP]
    # Where the worker still prefills others' prompts by then, this step and the one before carry a chunk.
    # FIFO: a local prefill has nothing ahead of it any more.
    if not local and workers[t.FREE_AT, decode] - now_s > ready_s:
        step_s += 1.5 * d[D_CHUNK_STEP]
    if local and 2 * d_cached >= q[PROMPT_TOKENS]:
        kind = REUSE
    # A negative overhead means that the terms are too high; it may not eat up a small request's.
    overhead_s = q[ELAPSED] + max(q[OVERHEAD_REUSE + kind], -0.5 * (ready_s + step_s))
    ttft_s = ready_s + step_s + overhead_s
    decode_share_s = d[D_SHARE] * (ttft_s + q[OUTPUT_TOKENS] * d[D_TOKEN_STEP])
    externality_s += imposed_s(prefill_s, site_pool, q[BUSY_HORIZON])
    externality_s += imposed_s(decode_share_s, decode_pool, q[BUSY_HORIZON])

    ints[KIND, row], ints[UNCACHED, row], ints[KV_BYTES, row] = kind, int(new), int(kv_bytes)
    ints[DECODE_CACHED, row], ints[SITE_CACHED, row] = int(d_cached), int(s_cached)
    floats[START, row], floats[PREFILL, row], floats[TRANSFER, row] = start_s, prefill_s, transfer_s
    floats[SLOT, row], floats[STEP, row], floats[OVERHEAD, row] = d[D_SLOT], step_s, overhead_s
    floats[TTFT, row], floats[INTERFERENCE, row] = ttft_s, interference_s
    floats[EXTERNALITY, row], floats[COST, row] = externality_s, ttft_s + interference_s + externality_s
    floats[GRANTED, row], floats[TRANSFER_BEGIN, row], floats[LINK_SECONDS, row] = granted_s, begin_s, link_s
    floats[DECODE_SHARE, row], floats[MIXED_STEP, row] = decode_share_s, mixed_step_s
    floats[TOKEN_STEP, row] = d[D_TOKEN_STEP]


def request_numbers(config: SchedulerConfig) -> Floats:
    """The vector of one request, its constants filled in."""
    numbers = np.zeros(REQUEST_NUMBERS)
    numbers[RATE_WINDOW : STATUS_FRESH + 1] = (
        config.rate_window_s,
        config.max_load,
        config.busy_horizon_s,
        config.link_ramp_s,
        config.status_fresh_s,
    )
    return numbers

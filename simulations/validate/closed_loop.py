"""TTFT and TPOT of a fixed number of clients that each send again as soon as they are answered.

Closed form, from step times alone. N clients, of which b hold a slot; one prefill alone takes p in k chunks;
a decode step of the mean batch takes d. A step that carries a chunk and decodes pays the shared base once, so
a prefill costs the worker e = q - k·shared beside its decode steps, with q = p, or a prompt's share of a full
chunk where short prompts queue. A worker that is never idle spends, while one request lives, b prefills and
one decode step per token of an answer of m tokens:

    W = b·e + m·d

How W divides into the wait for the first token and the tokens after it depends on whether clients send at
the same time:

    apart:    TPOT = d / (1 - u),  TTFT = p + k·(d - shared) + d/2 + u·e / (2·(1 - u)),  u = (b - 1)·e / W
    in step:  TPOT = d + (b - g)·e / (2·m),  TTFT = (b + g)·q / 2,  at least p

(g = prompts that share a chunk: all of them get their first token at its end).

Benchmarks begin with all clients at once; then they spread, because prefills end one after the other.
`in_step` is the share of requests that meet such a wave: 0.1 where ten requests are sent per client. With
workers of their own for prefill, decodes are not disturbed, and a prefill waits for those of its worker only.
Transfers are not modelled: what they take is in `request_overhead_s`. Clients beyond what the KV pool holds
(at half an answer each: engines do not reserve) wait for a slot: W·(N - b)/b more.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulations.hardware.table_times import TableStepTimes
from simulations.validate.points import Point

CHUNK_TOKENS = 8192
_ITERATIONS = 6


@dataclass(frozen=True, slots=True)
class Overheads:
    """What the tables lack; the first four are fields of a fleet's hardware."""

    prefill_scale: float = 1.0
    decode_scale: float = 1.0
    step_overhead_s: float = 0.0
    request_overhead_s: float = 0.0
    in_step: float = 0.0


@dataclass(frozen=True, slots=True)
class Bare:
    """A point with what its tables say, looked up once."""

    point: Point
    prefill: TableStepTimes
    decode: TableStepTimes
    prefill_s: float
    bulk_s: float
    """A prompt's share of a full chunk, where several share it; never more than `prefill_s`."""
    per_chunk: float
    """Prompts that share a full chunk, at least 1."""
    chunks: int
    slots: int
    """Clients that the KV pool holds together."""


def bare(point: Point, prefill: TableStepTimes, decode: TableStepTimes, kv_tokens: int) -> Bare:
    """`kv_tokens`: what one decode worker holds."""
    per_client = point.input_tokens + point.output_tokens / 2
    slots = max(1, int(kv_tokens * point.decode_attention_dp / per_client)) * point.decode_workers
    prefill_s = prefill.prefill_s(point.input_tokens, 0)
    return Bare(
        point=point,
        prefill=prefill,
        decode=decode,
        prefill_s=prefill_s,
        bulk_s=min(prefill_s, prefill.chunk_s(CHUNK_TOKENS, 0) * point.input_tokens / CHUNK_TOKENS),
        per_chunk=max(1.0, CHUNK_TOKENS / point.input_tokens),
        chunks=-(-point.input_tokens // CHUNK_TOKENS),
        slots=min(point.clients, slots),
    )


def predict(case: Bare, overheads: Overheads) -> tuple[float, float]:
    """(TTFT, TPOT) in seconds."""
    if case.point.mode == "agg":
        return _together(case, overheads)
    return _apart(case, overheads)


def _step_s(case: Bare, batch: float, overheads: Overheads) -> float:
    """A decode step of `batch` sequences halfway through their answers."""
    whole = max(1, round(batch))
    context = whole * (case.point.input_tokens + case.point.output_tokens / 2)
    line = case.decode.decode_line(whole, context)
    return (line.base_s + line.slope_s * context) * overheads.decode_scale + overheads.step_overhead_s


def _together(case: Bare, overheads: Overheads) -> tuple[float, float]:
    point, slots = case.point, case.slots
    answer = point.output_tokens
    prefill_s = case.prefill_s * overheads.prefill_scale + case.chunks * overheads.step_overhead_s
    shared_s = case.decode.shared_base_s() * overheads.decode_scale + overheads.step_overhead_s
    bulk_s = case.bulk_s * overheads.prefill_scale + case.chunks * overheads.step_overhead_s
    extra_s = max(bulk_s - case.chunks * shared_s, 0.1 * bulk_s)
    batch = float(slots)
    ttft_s = tpot_s = cycle_s = 0.0
    for _ in range(_ITERATIONS):
        step_s = _step_s(case, batch, overheads)
        cycle_s = slots * extra_s + answer * step_s
        load = (slots - 1) * extra_s / cycle_s
        apart_ttft_s = (
            prefill_s
            + case.chunks * max(step_s - shared_s, 0.0)
            + step_s / 2
            + min(load / (2 * (1 - load)), (slots - 1) / 2) * extra_s
        )
        ttft_s = _mix(apart_ttft_s, _in_step_s(case, slots, prefill_s, bulk_s), overheads.in_step)
        delayed_s = max(slots - case.per_chunk, 0.0) / 2 * extra_s
        tpot_s = _mix(step_s / (1 - load), step_s + delayed_s / answer, overheads.in_step)
        batch = slots * answer * tpot_s / (ttft_s + answer * tpot_s)
    waiting_s = cycle_s * (point.clients - slots) / slots
    return overheads.request_overhead_s + ttft_s + waiting_s, tpot_s


def _apart(case: Bare, overheads: Overheads) -> tuple[float, float]:
    point, slots = case.point, case.slots
    answer = point.output_tokens
    prefill_s = case.prefill_s * overheads.prefill_scale + case.chunks * overheads.step_overhead_s
    bulk_s = case.bulk_s * overheads.prefill_scale + case.chunks * overheads.step_overhead_s
    per_worker = max(slots / point.prefill_workers, 1.0)
    batch = slots / point.decode_workers
    ttft_s = tpot_s = 0.0
    for _ in range(4 * _ITERATIONS):
        tpot_s = _step_s(case, batch, overheads)
        decode_s = answer * tpot_s
        load = min(per_worker * bulk_s / (prefill_s + decode_s), 0.95)
        crowded_s = (
            per_worker * bulk_s - decode_s
        )  # prefill workers never idle: whoever does not decode waits
        alone_s = prefill_s + bulk_s * min(load / (2 * (1 - load)), per_worker - 1)
        in_step_s = _in_step_s(case, per_worker, prefill_s, bulk_s)
        ttft_s = _mix(max(alone_s, crowded_s), max(in_step_s, crowded_s), overheads.in_step)
        found = slots / point.decode_workers * decode_s / (ttft_s + overheads.request_overhead_s + decode_s)
        batch = (batch + found) / 2  # damped: more time in decode means a larger batch, and longer steps
    waiting_s = (ttft_s + answer * tpot_s) * (point.clients - slots) / slots
    return overheads.request_overhead_s + ttft_s + waiting_s, tpot_s


def _in_step_s(case: Bare, together: float, prefill_s: float, bulk_s: float) -> float:
    """Mean TTFT where `together` clients send at once."""
    return max((together + min(together, case.per_chunk)) / 2 * bulk_s, prefill_s)


def _mix(apart: float, in_step: float, share: float) -> float:
    return (1.0 - share) * apart + share * in_step

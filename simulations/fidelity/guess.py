"""What a decision log alone lets one say of a fleet: names, roles, rates; and guesses, named, of the rest."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from prfaas.engine.interface import StepProfile
from prfaas.errors import ConfigError
from prfaas.kv.layout import CacheGroup, CompatRecord, KVLayout
from prfaas.protocol.messages import WorkerInfo
from router.core.events import LinkConfigured
from simulations.fidelity.recording import Recording, Row

_PAGE_SIZE = 32
"""Where no prefix was ever reused."""
_CHUNK_TOKENS = 256
_LEAST_TOKENS = 64
"""Shorter prefills say more about fixed costs than about a rate."""
_CONTEXT_LENGTH = 131_072
_MAX_RUNNING = 256
_KV_TOKENS = 1_000_000
_RTT_S = 0.01
_RATE = 1e9
_BYTES_PER_TOKEN = 1024
"""Where nothing ever crossed."""

GUESSED = (
    "pages per worker, max_running, chunk size, layers and round trips are guesses: the decision log does "
    "not tell them, the journal (`gateway.journal`, --journal) does"
)


def guessed_recording(source: str, rows: list[Row]) -> Recording:
    """A recording made of a decision log's rows.

    Clusters are called after their part: a site that was reached over a link is remote, all else is in the
    cluster of the decode workers. Which prompts share a prefix is derived from how much of each was found
    cached: with the latest earlier prompt that is long enough.

    Raises:
        ConfigError: no row has a report.
    """
    complete = [row for row in rows if row.complete and row.report is not None]
    if not complete:
        raise ConfigError(f"{source}: no request has a prefill report")
    page_size = _page_size(complete)
    bytes_per_token = _bytes_per_token(complete)
    _name_blocks(rows, page_size)
    decodes = sorted({row.decode for row in rows if row.decode})
    sites = sorted({row.site for row in rows if row.site} - set(decodes))
    remote = {row.site for row in rows if row.kind == "remote"}
    roles = {**dict.fromkeys(decodes, "decode"), **dict.fromkeys(sites, "prefill")}
    infos = {
        name: _info(name, role, "remote" if name in remote else "pd", page_size, bytes_per_token)
        for name, role in roles.items()
    }
    return Recording(
        source=source,
        rows=rows,
        workers=infos,
        profiles={name: _profile(name, complete) for name in roles},
        links=_links(complete, bool(remote)),
    )


def _page_size(rows: Sequence[Row]) -> int:
    """The largest number that divides every count of cached tokens."""
    counts = [
        n for row in rows if row.report for n in (row.report.cached_tokens, row.report.decode_cached_tokens)
    ]
    return math.gcd(*counts) or _PAGE_SIZE


def _bytes_per_token(rows: Sequence[Row]) -> int:
    ratios = [
        row.report.kv_bytes / max(1, row.prompt_tokens - 1 - row.report.decode_cached_tokens)
        for row in rows
        if row.report is not None and row.report.kv_bytes
    ]
    # Pages cross whole, so short prompts send more than their tokens: the least is nearest.
    return max(4, round(min(ratios) / 4) * 4) if ratios else _BYTES_PER_TOKEN


def _name_blocks(rows: Sequence[Row], page_size: int) -> None:
    """Give rows block ids that make the simulator find about as much in caches as was found live."""
    fresh = 0
    earlier: list[Row] = []
    for row in rows:
        full = max(0, row.prompt_tokens - 1) // page_size
        report = row.report
        cached = 0 if report is None else max(report.cached_tokens, report.decode_cached_tokens) // page_size
        donor = next((other for other in reversed(earlier) if len(other.blocks) >= cached), None)
        shared = donor.blocks[: min(cached, full)] if donor is not None else ()
        own = full - len(shared)
        row.blocks = (*shared, *range(fresh, fresh + own))
        fresh += own
        earlier.append(row)


def _profile(worker: str, rows: Sequence[Row]) -> StepProfile:
    """One rate of prefill and one time per decode step, medians of what was measured on this worker, or on
    all where it has nothing."""
    rates = [
        (row.site, row.report.prefill_s / row.report.computed_tokens)
        for row in rows
        if row.report is not None and row.report.computed_tokens >= _LEAST_TOKENS
    ]
    steps = [(row.decode, row.tpot_s) for row in rows if row.tpot_s > 0]
    return StepProfile(
        chunk_tokens=_CHUNK_TOKENS,
        prefill_base_s=0.0,
        prefill_token_s=_median(worker, rates, 1e-4),
        prefill_context_s=0.0,
        decode_base_s=_median(worker, steps, 0.01),
        decode_sequence_s=0.0,
        decode_context_s=0.0,
    )


def _median(worker: str, samples: Sequence[tuple[str, float]], otherwise: float) -> float:
    own = [value for name, value in samples if name == worker]
    return statistics.median(own or [value for _, value in samples] or [otherwise])


def _info(name: str, role: str, cluster: str, page_size: int, bytes_per_token: int) -> WorkerInfo:
    group = CacheGroup("full", (0,), 1, max(1, bytes_per_token // 4))
    layout = KVLayout((group,), page_size, "bfloat16", _KV_TOKENS // page_size)
    compat = CompatRecord(1, "", "", "gqa", "HND", page_size, "bfloat16", layout.groups)
    return WorkerInfo(
        worker=name,
        cluster=cluster,
        role=role,
        incarnation="",
        model="unknown",
        context_length=_CONTEXT_LENGTH,
        layout=layout,
        compat=compat,
        chunk_tokens=_CHUNK_TOKENS,
        max_running=_MAX_RUNNING,
        max_queue=_MAX_RUNNING,
    )


def _links(rows: Sequence[Row], remote: bool) -> list[LinkConfigured]:
    """One link, as fast as the fastest transfer that was seen."""
    if not remote:
        return []
    rates = [
        row.report.kv_bytes / row.report.transfer_s
        for row in rows
        if row.kind == "remote" and row.report is not None and row.report.transfer_s > 0
    ]
    rate = max(rates, default=0.0) or _RATE
    return [
        LinkConfigured(
            name="link", clusters=("pd", "remote"), capacity_bytes_per_s=rate, rtt_s=_RTT_S, now_s=0.0
        )
    ]

"""Our own recordings: the gateway's journal (`gateway.journal`) or its decision log (`gateway.decision_log`).

A journal has everything: arrivals, prompt lengths, block hashes at the fleet's page size, sessions, answers'
lengths. A decision log lacks the hashes, so nothing of it is ever found in a cache: replay journals where you
can. Calibration requests, and requests without a complete answer, are left out; the trace says how many.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from prfaas.config import Section
from prfaas.errors import ConfigError
from router.core.events import Finished, PlaceRequest, WorkerJoined
from router.core.journal import JournalError, read_journal
from router.decision_log import DecisionRecord
from simulations.workload.builder import TraceBuilder
from simulations.workload.files import numbered_lines, trace_name
from simulations.workload.json_lines import decoded_lines
from simulations.workload.trace import Trace


class Options(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """There is nothing to choose."""


def read(path: Path, options: Options) -> Trace:
    """The requests in a journal or a decision log.

    Raises:
        ConfigError: the first thing wrong with it, by line.
    """
    first = next(numbered_lines(path), (1, b""))[1]
    try:
        is_journal = "request_id" not in msgspec.json.decode(first, type=dict)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}, line 1: {error}") from error
    return _from_journal(path) if is_journal else _from_decisions(path)


@dataclass(slots=True)
class _Seen:
    line: int
    place: PlaceRequest
    ended_s: float = 0.0
    completion_tokens: int = 0


@dataclass(slots=True)
class _Journal:
    requests: dict[str, _Seen] = field(default_factory=dict)
    page_size: int = 0


def _from_journal(path: Path) -> Trace:
    journal = _read_journal(path)
    builder = TraceBuilder(str(path), {"blocks": "block_hashes", "output_tokens": "completion_tokens"})
    last_end_s: dict[str, float] = {}
    dropped = 0
    for seen in sorted(journal.requests.values(), key=lambda seen: (seen.place.arrival_s, seen.line)):
        place = seen.place
        if seen.completion_tokens < 1:
            dropped += 1
            continue
        session = place.session or None
        before_s = last_end_s.get(place.session, place.arrival_s) if session else place.arrival_s
        builder.add(
            seen.line,
            place.arrival_s,
            place.prompt_tokens,
            seen.completion_tokens,
            tuple(map(int, place.block_hashes)),
            session,
            max(0.0, place.arrival_s - before_s),
        )
        if session:
            last_end_s[place.session] = seen.ended_s
    if not journal.page_size:
        raise ConfigError(f"{path}: no worker ever joined, so the page size of its hashes is unknown")
    return _noted(builder.build(trace_name(path), journal.page_size, sort=True), dropped)


def _read_journal(path: Path) -> _Journal:
    journal = _Journal()
    lines = [line for _, line in numbered_lines(path)]
    try:
        _, inputs = read_journal(lines)
        for number, item in enumerate(inputs, start=2):
            if isinstance(item, WorkerJoined):
                journal.page_size = item.info.layout.page_size
            elif isinstance(item, PlaceRequest) and item.pair is None:
                journal.requests.setdefault(item.request_id, _Seen(number, item))
            elif isinstance(item, Finished) and item.ok and item.request_id in journal.requests:
                seen = journal.requests[item.request_id]
                seen.ended_s, seen.completion_tokens = item.now_s, item.completion_tokens
    except JournalError as error:
        raise ConfigError(f"{path}: {error}") from error
    return journal


def _from_decisions(path: Path) -> Trace:
    builder = TraceBuilder(str(path), {"output_tokens": "completion_tokens"})
    arrivals: dict[str, tuple[int, DecisionRecord]] = {}  # first attempts
    ended: dict[str, DecisionRecord] = {}
    for number, record in decoded_lines(path, DecisionRecord):
        if record.calibration:
            continue
        known = arrivals.get(record.request_id)
        if known is None or record.attempt < known[1].attempt:
            arrivals[record.request_id] = number, record
        if record.outcome == "ok" and record.completion_tokens > 0:
            ended[record.request_id] = record
    for request_id, (number, record) in arrivals.items():
        if request_id in ended:
            arrival_s = record.time_unix_s - sum(record.overhead_s.values())
            answer = ended[request_id].completion_tokens
            builder.add(number, arrival_s, record.prompt_tokens, answer)
    return _noted(builder.build(trace_name(path), 1, sort=True), len(arrivals) - len(ended))


def _noted(trace: Trace, dropped: int) -> Trace:
    if not dropped:
        return trace
    return replace(trace, notes=(*trace.notes, f"{dropped} requests without a complete answer left out"))

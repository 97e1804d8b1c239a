"""What a live router recorded: its requests, its workers and links, what was decided and what it took.

Two files tell of it. The **journal** (`gateway.journal`) has everything, since it determines every decision:
replaying it through the scheduler gives the placements. The **decision log** (`gateway.decision_log`) has
placements and times, but neither the workers' pages nor which prompts share a prefix.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from prfaas.engine.interface import StepProfile
from prfaas.errors import ConfigError
from prfaas.protocol.messages import PrefillReport, WorkerInfo
from router.core.config import SchedulerConfig
from router.core.decision import NoCapacity
from router.core.events import (
    Failed,
    Finished,
    FirstToken,
    LinkConfigured,
    PlaceRequest,
    PrefillReported,
    SchedulerInput,
    WorkerJoined,
    WorkerProfile,
)
from router.core.journal import JournalError, read_journal
from router.core.policy_loader import load_policy
from router.core.scheduler import Scheduler
from router.decision_log import DecisionRecord
from simulations.workload.trace import Floats, Ints, Trace

_LEAST_ROWS = 4
"""Fewer requests than this say nothing about a fleet."""


@dataclass(slots=True)
class Row:
    """One request: what was asked, where it went, what it took. Seconds since its arrival."""

    request_id: str
    arrival_s: float
    prompt_tokens: int
    max_tokens: int
    blocks: tuple[int, ...] = ()
    decode: str = ""
    site: str = ""
    kind: str = ""
    predicted_ttft_s: float = float("nan")
    """By the router, when it placed the request."""
    report: PrefillReport | None = None
    ttft_s: float = float("nan")
    end_s: float = float("nan")
    completion_tokens: int = 0
    warm_up: bool = False
    failed: bool = False

    @property
    def complete(self) -> bool:
        """Whether it was answered, and all times are known."""
        return not self.failed and self.completion_tokens > 0 and self.ttft_s == self.ttft_s

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first; NaN for a single one."""
        later = self.completion_tokens - 1
        return (self.end_s - self.ttft_s) / later if later > 0 else float("nan")


@dataclass(slots=True)
class Recording:
    """One life of a router. `rows` are in order of arrival, warm-up requests left out."""

    source: str
    rows: list[Row]
    workers: dict[str, WorkerInfo] = field(default_factory=dict)
    profiles: dict[str, StepProfile] = field(default_factory=dict)
    links: list[LinkConfigured] = field(default_factory=list)
    policy: str = "cost_model"
    parameters: dict[str, object] = field(default_factory=dict)
    config: SchedulerConfig = field(default_factory=SchedulerConfig)
    seed: int = 0

    @property
    def page_size(self) -> int:
        return next(iter(self.workers.values())).layout.page_size

    def trace(self) -> Trace:
        """The requests as a trace; time 0 is the first arrival, answers are as long as they were.

        Pages that an answer filled get their ids from the later prompt that repeats them: the decode worker
        finds them cached then, and a prefill worker elsewhere has to compute them, as live. Such a prompt is
        the next turn of a conversation, for a causal replay: its client had to see the answer first.
        """
        rows = self.rows
        answers = self._answers()
        session, think_s = self._conversations({then: number for number, (then, _) in answers.items()})
        offsets = np.concatenate([[0], np.cumsum([len(row.blocks) for row in rows])]).astype(np.int64)
        return Trace(
            name=Path(self.source).name,
            arrival_s=np.array([row.arrival_s - rows[0].arrival_s for row in rows]),
            prompt_tokens=np.array([max(2, row.prompt_tokens) for row in rows], dtype=np.int64),
            output_tokens=np.array([max(1, row.completion_tokens) for row in rows], dtype=np.int64),
            block_tokens=self.page_size,
            blocks=_signed([block for row in rows for block in row.blocks]),
            block_offsets=offsets,
            session=session,
            think_s=think_s,
            answers={number: _signed(ids) for number, (_, ids) in answers.items()},
        )

    def _answers(self) -> dict[int, tuple[int, list[int]]]:
        """By row: (the next turn, blocks that the answer filled). They are those that a decode worker had of
        a later prompt although no prompt before had them; the last one that it continues wrote them."""
        writer: dict[int, int] = {}
        """Last block of a prompt, or of an answer → the row."""
        asked: set[int] = set()
        found: dict[int, tuple[int, list[int]]] = {}
        for number, row in enumerate(self.rows):
            cached = row.report.decode_cached_tokens // self.page_size if row.report is not None else 0
            fresh = [depth for depth, block in enumerate(row.blocks[:cached]) if block not in asked]
            if fresh and fresh[0] and row.blocks[fresh[0] - 1] in writer:
                found[writer[row.blocks[fresh[0] - 1]]] = number, [row.blocks[depth] for depth in fresh]
            asked.update(row.blocks)
            if row.blocks:
                writer[row.blocks[-1]] = number
        return found

    def _conversations(self, former: dict[int, int]) -> tuple[Ints, Floats]:
        """(conversation of each row, seconds since the answer before it); -1 = stands alone.

        Args:
            former: row → the turn before.
        """
        rows = self.rows
        session = np.full(len(rows), -1, dtype=np.int64)
        think_s = np.zeros(len(rows))
        for number, before in former.items():
            answered_s = rows[before].arrival_s + rows[before].end_s
            if rows[before].complete and answered_s <= rows[number].arrival_s:
                if session[before] < 0:
                    session[before] = before
                session[number] = session[before]
                think_s[number] = rows[number].arrival_s - answered_s
        return session, think_s


def read_recording(journal: str | os.PathLike[str]) -> Recording:
    """What a journal tells. A last line that was cut off (the router was killed) is left out.

    Raises:
        ConfigError: not a journal, damaged in the middle, or with too few requests to learn from.
    """
    path = Path(journal)
    lines = _lines(path)
    try:
        header, inputs = read_journal(lines)
        recording = Recording(
            source=str(path),
            rows=[],
            policy=header.policy,
            parameters=dict(header.parameters),
            config=header.config,
            seed=header.seed,
        )
        scheduler = Scheduler(
            load_policy(header.policy, header.parameters),
            seed=header.seed,
            config=header.config,
            policy_name=header.policy,
        )
        rows: dict[str, Row] = {}
        for item in inputs:
            _take_in(recording, rows, scheduler, item)
    except JournalError as error:
        raise ConfigError(f"{path}: {error}; is this a file of `gateway.journal`?") from error
    recording.rows = sorted((row for row in rows.values() if not row.warm_up), key=lambda r: r.arrival_s)
    _require(recording.rows, path)
    return recording


def _take_in(recording: Recording, rows: dict[str, Row], scheduler: Scheduler, item: SchedulerInput) -> None:
    """One line of the journal: what it says, and what the scheduler makes of it."""
    if isinstance(item, PlaceRequest):
        _placed(rows, scheduler, item)
        return
    scheduler.apply(item)
    match item:
        case WorkerJoined(info=info):
            recording.workers[info.worker] = info
        case WorkerProfile(worker=worker, profile=profile):
            recording.profiles[worker] = profile
        case LinkConfigured():
            recording.links.append(item)
        case PrefillReported(request_id=name, report=report) if name in rows:
            rows[name].report = report
            # What happened counts, should this version of the policy decide otherwise.
            rows[name].site = report.site
        case FirstToken(request_id=name, ttft_s=ttft_s) if name in rows:
            rows[name].ttft_s = ttft_s
        case Finished(request_id=name, completion_tokens=tokens, ok=ok, now_s=now_s) if name in rows:
            row = rows[name]
            row.completion_tokens, row.end_s, row.failed = tokens, now_s - row.arrival_s, not ok
        case Failed(request_id=name) if name in rows:
            rows[name].failed = True  # a later attempt is another experiment
        case _:
            pass


def _placed(rows: dict[str, Row], scheduler: Scheduler, item: PlaceRequest) -> None:
    row = rows.setdefault(
        item.request_id,
        Row(
            request_id=item.request_id,
            arrival_s=item.arrival_s,
            prompt_tokens=item.prompt_tokens,
            max_tokens=item.max_tokens,
            blocks=tuple(int(block) for block in item.block_hashes),
            warm_up=item.pair is not None,
        ),
    )
    try:
        decision = scheduler.place(item)
    except NoCapacity:
        row.failed = True
        return
    row.decode, row.site, row.kind = decision.decode, decision.site, decision.kind.label
    row.predicted_ttft_s = decision.ttft_s


def with_placements(recording: Recording, decided: list[Row]) -> None:
    """Take placements over from the decision log of the same router: they need no replay to be known."""
    by_id = {row.request_id: row for row in decided}
    for row in recording.rows:
        found = by_id.get(row.request_id)
        if found is not None and found.decode in recording.workers and found.site in recording.workers:
            row.decode, row.site, row.kind = found.decode, found.site, found.kind


def read_decisions(path: str | os.PathLike[str]) -> list[Row]:
    """The rows of a decision log, in order of arrival, warm-up requests left out.

    Raises:
        ConfigError: not a decision log, damaged in the middle, or with too few requests to learn from.
    """
    source = Path(path)
    decoder = msgspec.json.Decoder(DecisionRecord)
    rows: dict[str, Row] = {}
    for number, line in enumerate(_lines(source), start=1):
        try:
            record = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"{source}: line {number}: {error}; is this a file of `gateway.decision_log`?"
            ) from error
        rows[record.request_id] = _row(record, record.request_id in rows)
    kept = sorted((row for row in rows.values() if not row.warm_up), key=lambda row: row.arrival_s)
    _require(kept, source)
    return kept


def _row(record: DecisionRecord, again: bool) -> Row:
    nan = float("nan")
    return Row(
        request_id=record.request_id,
        # Placed `start`-overhead after the arrival; on the wall clock, which is enough for gaps.
        arrival_s=record.time_unix_s - sum(record.overhead_s.values()),
        prompt_tokens=record.prompt_tokens,
        max_tokens=record.max_tokens,
        decode=record.decode,
        site=record.site,
        kind=record.kind,
        predicted_ttft_s=record.predicted_ttft_s,
        report=record.report,
        ttft_s=nan if record.ttft_s is None else record.ttft_s,
        end_s=nan if record.total_s is None else record.total_s,
        completion_tokens=record.completion_tokens,
        warm_up=record.calibration,
        failed=again or record.outcome != "ok",
    )


def _lines(path: Path) -> Iterator[bytes]:
    """Lines of a file that a program may have been writing: a last one without an end is left out."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    if not content.strip():
        raise ConfigError(f"{path} is empty; it is written while the router serves")
    *whole, cut_off = content.split(b"\n")
    del cut_off
    if not whole:
        raise ConfigError(f"{path} holds no whole line")
    return iter(whole)


def _require(rows: list[Row], path: Path) -> None:
    complete = sum(row.complete for row in rows)
    if complete < _LEAST_ROWS:
        raise ConfigError(
            f"{path} has {complete} answered requests (and {len(rows) - complete} others) beside warm-up "
            f"requests; at least {_LEAST_ROWS} are needed to learn from"
        )


def _signed(hashes: list[int]) -> Ints:
    """Block hashes as signed numbers, which the trace's columns hold."""
    return np.array(hashes, dtype=np.uint64).view(np.int64)

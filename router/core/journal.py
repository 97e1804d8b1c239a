"""The scheduler's inputs as JSON lines, and their replay: the same inputs give the same decisions.

Line 1 is a `JournalHeader`; each further line is one tagged input (`router.core.events`). Reading and
writing go through file objects that the caller opens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import msgspec
import numpy as np

from policies.types import Policy
from prfaas.errors import PrfaasError
from router.core.config import SchedulerConfig
from router.core.decision import Decision, NoCapacity
from router.core.events import PlaceRequest, SchedulerInput
from router.core.policy_loader import load_policy
from router.core.scheduler import Scheduler

JOURNAL_VERSION = 1


class JournalHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a scheduler was made with."""

    version: int = JOURNAL_VERSION
    seed: int
    policy: str
    """Name for `load_policy`."""
    parameters: dict[str, Any] = {}
    config: SchedulerConfig = SchedulerConfig()


class JournalError(PrfaasError):
    """A journal cannot be read; the message names the line."""


class JournalWriter:
    """Appends inputs to a binary file object; pass the instance as the scheduler's `record`."""

    def __init__(self, file: BinaryIO, header: JournalHeader) -> None:
        self._file = file
        self._encoder = msgspec.json.Encoder(enc_hook=_as_list)
        self._write(header)

    def __call__(self, item: SchedulerInput) -> None:
        self._write(item)

    def _write(self, item: object) -> None:
        self._file.write(self._encoder.encode(item) + b"\n")


def _as_list(item: object) -> object:
    """Block hashes that came as an array."""
    if isinstance(item, np.ndarray):
        return item.view(np.uint64).tolist()
    raise TypeError(f"a journal holds no {type(item).__name__}")


def read_journal(lines: Iterable[bytes]) -> tuple[JournalHeader, Iterator[SchedulerInput]]:
    """(header, inputs in order); inputs are decoded as they are taken.

    Raises:
        JournalError: a line is not what it should be, or the version is another one.
    """
    numbered = enumerate(lines, start=1)
    number, first = next(numbered, (0, b""))
    try:
        header = msgspec.json.decode(first, type=JournalHeader)
    except msgspec.DecodeError as error:
        raise JournalError(f"journal line {number} is not a header: {error}") from error
    if header.version != JOURNAL_VERSION:
        raise JournalError(f"journal has version {header.version}, this program reads {JOURNAL_VERSION}")
    return header, _inputs(numbered)


def replay(lines: Iterable[bytes], policy: Policy | None = None) -> Iterator[Decision | NoCapacity]:
    """The outcome of every placement in a journal, in order.

    Args:
        policy: what to decide with instead of the recorded policy (another policy's own decisions do not
            change the recorded consequences).

    Raises:
        JournalError: the journal is damaged.
        ConfigError: the recorded policy cannot be loaded.
    """
    header, inputs = read_journal(lines)
    scheduler = Scheduler(
        policy or load_policy(header.policy, header.parameters),
        seed=header.seed,
        config=header.config,
        policy_name=header.policy if policy is None else "",
    )
    for item in inputs:
        if isinstance(item, PlaceRequest):
            try:
                yield scheduler.place(item)
            except NoCapacity as refusal:
                yield refusal
        else:
            scheduler.apply(item)


def _inputs(numbered: Iterator[tuple[int, bytes]]) -> Iterator[SchedulerInput]:
    decoder = msgspec.json.Decoder(SchedulerInput)
    for number, line in numbered:
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError as error:
            raise JournalError(f"journal line {number}: {error}") from error

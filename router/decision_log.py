"""Every placement and what became of it: in memory for /debug/decisions, and as JSON lines on request."""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import msgspec

from prfaas.protocol.messages import PrefillReport

logger = logging.getLogger(__name__)
KEPT = 1000
FIRST_TEXT_CHARS = 80


class DecisionRecord(msgspec.Struct, kw_only=True):
    """One attempt: the decision, and (as far as it has come) what happened. Seconds since the request's
    last body byte was read, unless said otherwise."""

    request_id: str
    attempt: int
    time_unix_s: float
    calibration: bool
    prompt_tokens: int
    max_tokens: int
    kind: str
    decode: str
    site: str
    link: str | None
    """Link between the two clusters; None inside one."""
    predicted_ttft_s: float
    decision: dict[str, Any]
    """`Decision.as_record`: every candidate's counts and cost terms."""
    overhead_s: dict[str, float]
    """Time in the gateway itself, by stage."""
    outcome: str = "running"
    """`running`, `ok`, `client_gone`, or a failure reason."""
    error: str = ""
    report: PrefillReport | None = None
    actual: dict[str, float] = {}
    """Cost terms as measured, by the names of the predicted ones."""
    ttft_s: float | None = None
    """Until the first content was written (streams) or had arrived (whole answers)."""
    hidden_fraction: float | None = None
    """1 - tail over the transfer time of these bytes at the link's rate, at least 0; None without a link."""
    first_text: str = ""
    completion_tokens: int = 0
    total_s: float | None = None


class DecisionLog:
    """The last records, newest last, and the file."""

    def __init__(self, path: str = "", kept: int = KEPT) -> None:
        self._records: deque[DecisionRecord] = deque(maxlen=kept)
        self._file: TextIO | None = None
        if path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = Path(path).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def opened(self, record: DecisionRecord) -> None:
        """Show a record while it is still growing."""
        self._records.append(record)

    def closed(self, record: DecisionRecord) -> None:
        """Write a record that will not change any more."""
        if self._file is None:
            return
        try:
            self._file.write(msgspec.json.encode(record).decode() + "\n")
        except OSError as error:
            logger.error("event=decision_log_lost error=%s", error)
            with suppress(OSError):  # closing tries to write what is left once more
                self._file.close()
            self._file = None

    def latest(self, limit: int) -> list[DecisionRecord]:
        """Up to `limit` records, newest first."""
        newest = list(self._records)[-limit:] if limit > 0 else []
        return newest[::-1]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

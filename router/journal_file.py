"""The scheduler's journal on disk. A disk that fails costs the journal, never the service."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from router.core.events import SchedulerInput
from router.core.journal import JournalHeader, JournalWriter

logger = logging.getLogger(__name__)
OLD_SUFFIX = ".old"


class JournalFile:
    """Writes the inputs of one gateway's life; a former life's journal is kept beside it as `<path>.old`.

    An empty path means no journal. After the first error nothing more is written: a journal with a hole
    would replay to other decisions.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: str, header: JournalHeader) -> None:
        self._file: BinaryIO | None = None
        self._writer: JournalWriter | None = None
        if path:
            self._file = _open(Path(path))
            self._writer = JournalWriter(self._file, header)

    def record(self, item: SchedulerInput) -> None:
        """Take down one input; kept in memory until the buffer is full or `flush`."""
        if self._writer is None:
            return
        try:
            self._writer(item)
        except OSError as error:
            self._give_up(error)

    def flush(self) -> None:
        """Hand over to the operating system what is still in memory."""
        if self._file is None:
            return
        try:
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        self.flush()
        self._drop()

    def _give_up(self, error: OSError) -> None:
        logger.error("event=journal_lost error=%s", error)
        self._drop()

    def _drop(self) -> None:
        file, self._file, self._writer = self._file, None, None
        if file is not None:
            with suppress(OSError):  # what could not be written has been reported
                file.close()


def _open(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.stat().st_size:
        path.replace(path.with_name(path.name + OLD_SUFFIX))
    return path.open("wb")

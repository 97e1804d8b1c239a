from __future__ import annotations

from pathlib import Path

import pytest

from router.core.events import Tick
from router.core.journal import JournalHeader, read_journal
from router.journal_file import JournalFile

HEADER = JournalHeader(seed=3, policy="cost_model")


def test_what_was_recorded_can_be_read_and_a_former_life_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "journal.jsonl"
    for now_s in (1.0, 2.0):
        journal = JournalFile(str(path), HEADER)
        journal.record(Tick(now_s=now_s))
        journal.flush()
        journal.close()
    for file, now_s in ((path, 2.0), (path.with_name("journal.jsonl.old"), 1.0)):
        header, inputs = read_journal(file.read_bytes().splitlines())
        assert header == HEADER
        assert list(inputs) == [Tick(now_s=now_s)]


def test_without_a_path_nothing_is_written() -> None:
    journal = JournalFile("", HEADER)
    journal.record(Tick(now_s=1.0))
    journal.flush()
    journal.close()


def test_a_full_disk_costs_the_journal_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    journal = JournalFile("/dev/full", HEADER)
    for number in range(2000):
        journal.record(Tick(now_s=number))
    journal.flush()
    journal.close()
    assert [record.message.split()[0] for record in caplog.records] == ["event=journal_lost"]

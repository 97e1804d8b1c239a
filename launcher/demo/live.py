"""The table that grows while the demo runs; plain lines where there is no terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from launcher.demo.records import Record

KIND_STYLES = {"reuse": "green", "local": "yellow", "pool": "cyan", "remote": "magenta"}
_REFRESH_PER_S = 4
_OTHER_LINES = 8
"""Terminal lines that the table's frame and what stands above it take."""


class LiveTable:
    """Shows records; a context manager. `update` may be called as often as one likes."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._records: Sequence[Record] = ()
        self._printed: set[int] = set()
        self._live = (
            Live(console=console, refresh_per_second=_REFRESH_PER_S, get_renderable=self._table)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> LiveTable:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def update(self, records: Sequence[Record]) -> None:
        """Show `records`; without a terminal, print those that have ended since, once each."""
        self._records = records
        if self._live:
            return
        for record in records:
            if record.number not in self._printed and is_complete(record):
                self._printed.add(record.number)
                self._console.print(plain_line(record), markup=False, soft_wrap=True)

    def _table(self) -> Table:
        rows = max(5, self._console.size.height - _OTHER_LINES)
        return records_table(list(self._records)[-rows:], self._title)


def is_complete(record: Record) -> bool:
    """Ended, and with the decision's final figures (or failed, which may leave none)."""
    if record.state == "error":
        return True
    return record.state == "done" and record.decision is not None and record.decision.total_s is not None


def records_table(records: Sequence[Record], title: str) -> Table:
    """One row per request."""
    table = Table(
        title=title, title_justify="left", expand=True, pad_edge=False, box=None, header_style="bold"
    )
    table.add_column("#", justify="right", width=3)
    table.add_column("work", width=9, no_wrap=True)
    table.add_column("placed", width=6, no_wrap=True)
    table.add_column("cost in seconds, cheapest first", ratio=5, no_wrap=True, overflow="ellipsis")
    table.add_column("tokens", justify="right", width=6)
    table.add_column("KV MB", justify="right", width=5)
    table.add_column("TTFT said", justify="right", width=9)
    table.add_column("was", justify="right", width=6)
    table.add_column("answer", ratio=3, no_wrap=True, overflow="ellipsis")
    for record in records:
        table.add_row(*_cells(record))
    return table


def _cells(record: Record) -> list[Text | str]:
    answer = Text(record.error, style="red") if record.error else Text(_one_line(record.text))
    return [
        str(record.number),
        record.work,
        Text(record.kind or "…", style=KIND_STYLES.get(record.kind, "dim")),
        Text(record.why, style="dim"),
        _number(record.uncached_tokens, "d"),
        _number(record.kv_bytes / 1e6 if record.kv_bytes else None, ".1f"),
        _number(record.predicted_ttft_s, ".2f"),
        _number(record.actual_ttft_s or record.ttft_s, ".2f"),
        answer,
    ]


def plain_line(record: Record) -> str:
    """A record as one line of a log."""
    said, was = _number(record.predicted_ttft_s, ".2f"), _number(record.actual_ttft_s or record.ttft_s, ".2f")
    ending = f"ERROR {record.error}" if record.error else repr(_one_line(record.text)[:60])
    return (
        f"#{record.number:<3} {record.work:<9} {record.kind or '-':<6} "
        f"uncached={_number(record.uncached_tokens, 'd')} kv_mb={record.kv_bytes / 1e6:.1f} "
        f"ttft_said={said} ttft_was={was}  [{record.why}]  {ending}"
    )


def _number(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def _one_line(text: str) -> str:
    return " ".join(text.split())

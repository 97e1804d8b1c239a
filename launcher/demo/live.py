"""The table that grows while the demo runs; plain lines where there is no terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from launcher.demo.records import PLACES, Record, cost_by_place

KIND_STYLES = {"reuse": "green", "local": "yellow", "pool": "cyan", "remote": "magenta"}
_REFRESH_PER_S = 4
_OTHER_LINES = 5
"""Terminal lines that the table's title and heading take, and one or two that keep it from scrolling."""
_COST_FORM = "{:>6} {:>6} {:>6}"
_TTFT_FORM = "{:>5} {:>6}"
_TERMS_WIDTH = 22
_TERMS_FROM_COLUMNS = 112
"""In terminals narrower than this the answers need that room."""


class LiveTable:
    """Shows records; a context manager. `update` may be called as often as one likes."""

    def __init__(self, console: Console, total: int) -> None:
        """`total`: requests that will be sent."""
        self._console = console
        self._total = total
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
        ended = sum(record.state in ("done", "error") for record in self._records)
        running = len(self._records) - ended
        title = f"{ended} of {self._total} requests answered, {running} running"
        wide = self._console.size.width >= _TERMS_FROM_COLUMNS
        return records_table(self._records[-rows:], title, terms=wide)


def is_complete(record: Record) -> bool:
    """Ended, and with the decision's final figures (or failed, which may leave none)."""
    if record.state == "error":
        return True
    return record.state == "done" and record.decision is not None and record.decision.total_s is not None


def records_table(records: Sequence[Record], title: str, *, terms: bool = True) -> Table:
    """One row per request; `terms=False` leaves out the main terms of the cost, for narrow terminals."""
    table = Table(
        title=title,
        title_justify="left",
        expand=True,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        box=None,
        header_style="bold",
    )
    table.add_column("\n#", justify="right", min_width=2)
    table.add_column("\nrequest", min_width=9, no_wrap=True)
    table.add_column("\nplaced", min_width=6, no_wrap=True)
    table.add_column(f"cost in seconds\n{_COST_FORM.format(*PLACES)}", no_wrap=True)
    if terms:
        table.add_column("of which,\nmostly", width=_TERMS_WIDTH, no_wrap=True, overflow="ellipsis")
    table.add_column("uncached\ntokens", justify="right")
    table.add_column("KV MB\nmoved", justify="right")
    table.add_column(f"TTFT, s\n{_TTFT_FORM.format('pred.', 'actual')}", no_wrap=True)
    table.add_column("\nanswer", ratio=1, no_wrap=True, overflow="ellipsis")
    for record in records:
        table.add_row(*_cells(record, terms))
    return table


def _cells(record: Record, terms: bool) -> list[Text | str]:
    answer = Text(record.error, style="red") if record.error else Text(_one_line(record.text))
    return [
        str(record.number),
        record.work,
        Text(record.kind or "…", style=KIND_STYLES.get(record.kind, "dim")),
        _costs(record),
        *([Text(record.main_terms, style="dim")] if terms else []),
        _number(record.uncached_tokens, "d"),
        _number(record.kv_bytes / 1e6 if record.kv_bytes else None, ".1f"),
        _TTFT_FORM.format(*_both_ttfts(record)),
        answer,
    ]


def _costs(record: Record) -> Text:
    """What each place would cost; the one that was chosen stands out."""
    if record.decision is None:
        return Text()
    costs = cost_by_place(record.candidates)
    figures = (_number(costs.get(place), ".2f") for place in PLACES)
    text = Text(_COST_FORM.format(*figures), style="dim")
    width = len(text) // len(PLACES)
    chosen = PLACES.index("local" if record.kind == "reuse" else record.kind)
    text.stylize(f"not dim bold {KIND_STYLES[record.kind]}", chosen * width, (chosen + 1) * width)
    return text


def _both_ttfts(record: Record) -> tuple[str, str]:
    return _number(record.predicted_ttft_s, ".2f"), _number(record.actual_ttft_s or record.ttft_s, ".2f")


def plain_line(record: Record) -> str:
    """A record as one line of a log."""
    predicted, actual = _both_ttfts(record)
    ending = f"ERROR {record.error}" if record.error else repr(_one_line(record.text)[:60])
    return (
        f"#{record.number:<3} {record.work:<9} {record.kind or '-':<6} "
        f"uncached={_number(record.uncached_tokens, 'd')} kv_mb={record.kv_bytes / 1e6:.1f} "
        f"ttft_predicted={predicted} ttft_actual={actual}  [{record.why}]  {ending}"
    )


def _number(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def _one_line(text: str) -> str:
    return " ".join(text.split())

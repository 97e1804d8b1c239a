"""The table of policies, for terminal and page: which columns, in which order, which cells are best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from simulations.report.summary import duration

Summary = dict[str, Any]
Value = Callable[[Summary], float | None]


@dataclass(frozen=True, slots=True)
class Column:
    label: str
    value: Value
    form: Callable[[float | None], str]
    better: int = 0
    """1: more is better, -1: less is, 0: neither."""
    weight: int = 0
    """Where there is not room for all, columns of the least weight go first."""


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    best: bool = False


def _number(digits: int) -> Callable[[float | None], str]:
    return lambda value: "-" if value is None else f"{value:,.{digits}f}"


def _price(value: float | None) -> str:
    return "-" if value is None else f"{value:#.3g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _seconds(value: float | None) -> str:
    return "-" if value is None else duration(value)


COLUMNS = (
    Column("kept\nlevels", lambda s: s["good_share"], _percent, 1, 7),
    Column("goodput\nreq/s", lambda s: s["goodput_rps"], _number(2), 1, 9),
    Column("TTFT\nP50", lambda s: s["ttft_s"]["p50"], _seconds, -1, 4),
    Column("TTFT\nP90", lambda s: s["ttft_s"]["p90"], _seconds, -1, 9),
    Column("TTFT\nP99", lambda s: s["ttft_s"]["p99"], _seconds, -1, 6),
    Column("TPOT\nP90", lambda s: s["tpot_s"]["p90"], _seconds, -1, 8),
    Column("E2E\nP90", lambda s: s["e2e_s"]["p90"], _seconds, -1, 1),
    Column("output\ntokens/s", lambda s: s["output_token_throughput_tps"], _number(0), 1, 2),
    Column("cache\nhits", lambda s: s["prefix_reuse_ratio"], _percent, 1, 3),
    Column("remote\nprefill", lambda s: s["placement"]["remote"], _percent, 0, 5),
    Column("KV moved\nGB", lambda s: s["kv_gbytes"], _number(1), 0, 0),
    Column("price per\nM tokens", lambda s: s["cost"]["per_million_good_tokens"], _price, -1, 2),
    Column("achieved /\nbound", lambda s: s.get("achieved_over_bound"), _percent, 1, 8),
    Column("capacity\nreq/s", lambda s: s.get("capacity_rps"), _number(2), 1, 9),
)


def policy_table(
    summaries: Sequence[Summary], width: int | None = None
) -> tuple[list[str], list[list[Cell]]]:
    """(labels, rows in the order of `summaries`); columns in which nothing is known are left out.

    With `width` (characters), so are those for which there is no room, two blanks between columns counted.

    A cell is its column's best where it reads like the best value and not all of the column do.
    """
    chosen: list[tuple[Column, list[Cell]]] = []
    for column in COLUMNS:
        values = [column.value(summary) for summary in summaries]
        known = [value for value in values if value is not None]
        if not known:
            continue
        texts = [column.form(value) for value in values]
        best = column.form(max(known) if column.better > 0 else min(known))
        marked = column.better != 0 and len(set(texts)) > 1
        chosen.append((column, [Cell(text, marked and text == best) for text in texts]))
    while width is not None and chosen and sum(_width(*pair) for pair in chosen) > width:
        chosen.remove(min(chosen, key=lambda pair: pair[0].weight))
    rows = zip(*(cells for _, cells in chosen), strict=True)
    return [column.label for column, _ in chosen], [list(row) for row in rows]


def _width(column: Column, cells: Sequence[Cell]) -> int:
    return 2 + max(len(text) for text in (*column.label.split("\n"), *(cell.text for cell in cells)))

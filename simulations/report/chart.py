"""A chart as data: what is drawn, not how. The page draws it with plotly, the PNG writer with matplotlib.

Colours are roles (`policy-0`, `kind-remote`, `group-2`, `muted`), which each of the two maps to its theme.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Number = float | None


class Axis(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    label: str
    """With the unit."""
    log: bool = False
    percent: bool = False
    """Values are shares, shown as percent."""
    low: Number = None
    high: Number = None


class Series(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: str
    colour: str
    x: list[float] | list[str]
    y: list[Number]
    dash: int = 0
    """0 solid, 1 dashed, 2 dotted, 3 dash-dot."""


class Mark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A straight line across the chart, e.g. a service level."""

    axis: Literal["x", "y", "diagonal"]
    at: float = 0.0
    label: str = ""


class Chart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`curve`: lines; `area`: stacked shares; `bar`: horizontal bars, stacked where there are several series
    (`y` holds the lengths, `x` the names); `point`: a scatter."""

    key: str
    """Identifies it in the page and names its PNG."""
    title: str
    caption: str
    """One line: what to see."""
    kind: Literal["curve", "area", "bar", "point"]
    x: Axis
    y: Axis
    series: list[Series]
    marks: list[Mark] = []

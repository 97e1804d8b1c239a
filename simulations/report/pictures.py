"""The charts as PNG files, for slides: the same data as the page's, drawn with matplotlib on white."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simulations.report.chart import Axis, Chart, Series

POLICIES = ("#0072b2", "#d55e00", "#009e73", "#cc6699", "#c98a00", "#3aa0dc", "#6b7280")
KINDS = {"reuse": "#8fd4b5", "local": "#3fa7a0", "pool": "#3b6fb6", "remote": "#d0643b"}
_DARK = ("kind-pool", "kind-remote")
INK, SOFT, GRID, MARK = "#16202c", "#5a6675", "#e6e9ed", "#7b8794"
DASHES = ("solid", "dashed", "dotted", "dashdot")
SIZE_INCHES = (8.0, 4.6)
_LEGEND_COLUMNS = 4
DOTS_PER_INCH = 150


def write_pictures(folder: Path, charts: Sequence[Chart]) -> list[str]:
    """One PNG per chart, named by its key; returns the names."""
    from matplotlib.figure import Figure

    names = []
    for chart in charts:
        figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH)
        height = 0.77 - 0.051 * _legend_rows(chart)
        axes = figure.add_axes((_left(chart), 0.13, 0.97 - _left(chart), height))
        _draw(axes, chart)
        name = f"{chart.key}.png"
        figure.savefig(folder / name, metadata={"Software": None})
        names.append(name)
    return names


def _legend_rows(chart: Chart) -> int:
    """Bars of one part each are named on the axis."""
    named = chart.kind == "bar" and not _stacked(chart)
    return 0 if named or len(chart.series) < 2 else -(-len(chart.series) // _LEGEND_COLUMNS)


def _left(chart: Chart) -> float:
    """Room for the labels of the vertical axis, as a share of the width (a layout engine draws all twice)."""
    if chart.kind != "bar":
        return 0.09
    return min(0.4, 0.03 + 0.0105 * max(len(str(name)) for series in chart.series for name in series.x))


def colour(role: str) -> str:
    """The colour of a role on white; see `Series.colour`."""
    family, _, name = role.partition("-")
    return KINDS[name] if family == "kind" else POLICIES[int(name)]


def _draw(axes: Any, chart: Chart) -> None:
    {"curve": _curves, "area": _areas, "bar": _bars, "point": _points}[chart.kind](axes, chart)
    _marks(axes, chart)
    axes.tick_params(colors=SOFT, labelsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MARK)
    axes.set_axisbelow(True)
    axes.grid(axis="x" if chart.kind == "bar" else "both", color=GRID, linewidth=0.8)
    if rows := _legend_rows(chart):
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1.0), ncols=_LEGEND_COLUMNS, frameon=False, fontsize=9,
            borderaxespad=0.2, columnspacing=1.2, handlelength=1.6,
        )  # fmt: skip
    axes.set_title(chart.title, loc="left", fontsize=13, fontweight="bold", color=INK, pad=12 + 17 * rows)


def _stacked(chart: Chart) -> bool:
    """Several parts per bar, rather than one bar per series."""
    names = [tuple(series.x) for series in chart.series]
    return len(names) > 1 and len(set(names)) == 1


def _axis(axes: Any, which: str, spec: Axis) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_label_text(spec.label, color=SOFT, fontsize=10)
    if spec.log:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    if spec.percent:
        axis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=None))
    if spec.low is not None:
        limits = {("left" if which == "x" else "bottom"): spec.low}
        if spec.high is not None:
            limits["right" if which == "x" else "top"] = spec.high * 1.005
        (axes.set_xlim if which == "x" else axes.set_ylim)(**limits)


def _numbers(series: Series) -> list[float]:
    return [float("nan") if value is None else value for value in series.y]


def _curves(axes: Any, chart: Chart) -> None:
    for series in chart.series:
        style = DASHES[series.dash % len(DASHES)]
        axes.plot(
            series.x,
            _numbers(series),
            color=colour(series.colour),
            linestyle=style,
            lw=1.8,
            label=series.name,
        )
    _axis(axes, "x", chart.x)
    _axis(axes, "y", chart.y)


def _areas(axes: Any, chart: Chart) -> None:
    colours = [colour(series.colour) for series in chart.series]
    heights = [_numbers(series) for series in chart.series]
    names = [series.name for series in chart.series]
    axes.stackplot(chart.series[0].x, heights, colors=colours, labels=names, linewidth=0)
    _axis(axes, "x", chart.x)
    _axis(axes, "y", chart.y)


def _points(axes: Any, chart: Chart) -> None:
    for series in chart.series:
        axes.scatter(
            series.x, _numbers(series), s=9, alpha=0.45, color=colour(series.colour), lw=0, label=series.name
        )
    _axis(axes, "x", chart.x)
    _axis(axes, "y", chart.y)


def _bars(axes: Any, chart: Chart) -> None:
    left: dict[Any, float] = {}
    for series in chart.series:
        lengths = [min(value or 0.0, chart.x.high or float("inf")) for value in series.y]
        begins = [left.get(name, 0.0) for name in series.x]
        names, fill = [str(name) for name in series.x], colour(series.colour)
        drawn = axes.barh(names, lengths, left=begins, height=0.6, color=fill, label=series.name)
        texts = [_length(value, chart.x.percent, hide_small=_stacked(chart)) for value in series.y]
        axes.bar_label(drawn, texts, fontsize=9, **_label_style(chart, series))
        for name, length in zip(series.x, lengths, strict=True):
            left[name] = left.get(name, 0.0) + length
    axes.invert_yaxis()
    _axis(axes, "x", chart.x)
    if chart.x.high is None:
        axes.set_xlim(0, 1.15 * max([*left.values(), *(mark.at for mark in chart.marks)], default=0.0) or 1.0)
    _axis(axes, "y", chart.y)


def _label_style(chart: Chart, series: Series) -> dict[str, Any]:
    """Parts of a bar and bars that are cut carry their figure inside, others behind their end."""
    if _stacked(chart):
        return {"label_type": "center", "color": "white" if series.colour in _DARK else INK}
    high = chart.x.high
    if high is not None and any(value is not None and value > high for value in series.y):
        return {"label_type": "center", "color": "white"}
    return {"padding": 4, "color": INK}


def _length(value: float | None, percent: bool, hide_small: bool) -> str:
    if value is None or (hide_small and value < 0.05):
        return ""
    return f"{100 * value:.0f} %" if percent else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _marks(axes: Any, chart: Chart) -> None:
    style = {"color": MARK, "linestyle": "dotted", "lw": 1.3, "zorder": 1}
    for mark in chart.marks:
        if mark.axis == "x":
            axes.axvline(mark.at, **style)
            top = chart.kind == "bar"
            axes.annotate(mark.label, (mark.at, top), xycoords=("data", "axes fraction"),
                          xytext=(4, -11 if top else 5),
                          textcoords="offset points", color=SOFT, fontsize=9)  # fmt: skip
        elif mark.axis == "y":
            axes.axhline(mark.at, **style)
            axes.annotate(mark.label, (0, mark.at), xycoords=("axes fraction", "data"), xytext=(4, 3),
                          textcoords="offset points", color=SOFT, fontsize=9)  # fmt: skip
        else:
            axes.axline((1.0, 1.0), (2.0, 2.0), **style)

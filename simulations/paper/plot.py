"""Pictures of the sweeps: PNG by matplotlib, one self-contained HTML file by plotly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log10
from pathlib import Path

from prfaas.errors import ConfigError, PrfaasError
from simulations.paper.link_sweep import LinkSweep
from simulations.paper.load_sweep import LoadSweep

SUFFIXES = (".png", ".html")


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    dash: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    log_x: bool = False
    levels: Sequence[tuple[float, str, str]] = ()
    """Horizontal lines: (value, what it is, colour)."""
    moments: Sequence[tuple[float, str]] = field(default=())
    """Vertical lines."""


def check_plot_path(path: Path) -> None:
    """
    Raises:
        ConfigError: another suffix than .png or .html, or no such folder; said before any work is done.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--plot {path}: the name must end in {' or '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}")


def link_picture(sweep: LinkSweep) -> Picture:
    """λ_max by link rate, with the homogeneous fleets as lines."""
    rates = [point.link_gbps for point in sweep.points]
    levels = [
        (sweep.homogeneous_lambda_max, "homogeneous, 12 x 8 H20", ORANGE),
        (sweep.equal_cost_lambda_max, "homogeneous at equal cost", GREY),
    ]
    moments = [
        (rate, f"{rate:.1f} Gbit/s: {what}")
        for rate, what in (
            (sweep.pays_from_gbps, "beats 12 x 8 H20"),
            (sweep.pays_at_equal_cost_from_gbps, "beats equal cost"),
            (sweep.unmoved_from_gbps, "link stops mattering"),
        )
        if rates[0] <= rate <= rates[-1]
    ]
    return Picture(
        title="PrfaaS case study: highest request rate by link",
        x_label="link, Gbit/s",
        y_label="Λ max, requests per second",
        lines=[
            Line(
                "PrfaaS-PD, t and split re-optimised",
                rates,
                [p.figures.lambda_max for p in sweep.points],
                BLUE,
            )
        ],
        log_x=True,
        levels=levels,
        moments=moments,
    )


def load_picture(sweep: LoadSweep) -> Picture:
    """TTFT P90 over the unloaded one by load, one line per deployment."""
    colours = {"prfaas_pd": BLUE, "homogeneous": ORANGE, "naive": GREEN}
    lines = []
    for name, colour in colours.items():
        points = [point for point in sweep.points if point.deployment == name]
        lines.append(Line(name, [p.load for p in points], [p.p90_over_unloaded for p in points], colour))
    return Picture(
        title="PrfaaS case study: queueing by load",
        x_label="arrival rate / model's Λ max",
        y_label="TTFT P90 / unloaded P90",
        lines=lines,
        levels=[(2.0, "twice the unloaded P90", GREY)],
    )


BLUE, ORANGE, GREEN, GREY = "#2563eb", "#ea580c", "#059669", "#6b7280"


def write_picture(picture: Picture, path: Path) -> None:
    """
    Raises:
        PrfaasError: the plotting library is not installed.
    """
    try:
        _write_png(picture, path) if path.suffix == ".png" else _write_html(picture, path)
    except ImportError as error:
        raise PrfaasError(f"--plot {path}: {error.name} is missing; pip install 'prfaas[simulate]'") from None


def _write_png(picture: Picture, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.2), layout="constrained")
    axes = figure.subplots()
    for line in picture.lines:
        style = "--" if line.dash else "-"
        axes.plot(line.x, line.y, style, color=line.colour, linewidth=2.2, label=line.name)
    if picture.log_x:
        axes.set_xscale("log")
        ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500) if _within(tick, picture)]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
    axes.set_ylim(bottom=0)
    for value, label, colour in picture.levels:
        axes.axhline(value, color=colour, linestyle="--", linewidth=1.4, label=label)
    for value, label in picture.moments:
        axes.axvline(value, color=GREY, linestyle=":", linewidth=1)
        axes.annotate(
            label, (value, 0.02), xycoords=("data", "axes fraction"), rotation=90, fontsize=8, color=GREY,
            ha="right", va="bottom",
        )  # fmt: skip
    axes.set(xlabel=picture.x_label, ylabel=picture.y_label)
    axes.set_title(picture.title, loc="left", fontweight="bold")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def _write_html(picture: Picture, path: Path) -> None:
    import plotly.graph_objects as go

    figure = go.Figure()
    for line in picture.lines:
        style = {"color": line.colour, "width": 3, "dash": "dash" if line.dash else "solid"}
        figure.add_scatter(x=list(line.x), y=list(line.y), name=line.name, mode="lines", line=style)
    for value, label, colour in picture.levels:
        figure.add_hline(value, line={"color": colour, "dash": "dash"})
        figure.add_annotation(x=1, xref="paper", y=value, text=label, font_color=colour,
                              showarrow=False, xanchor="right", yanchor="bottom")  # fmt: skip
    for value, label in picture.moments:
        figure.add_vline(value, line={"color": GREY, "dash": "dot", "width": 1})
        figure.add_annotation(y=0, yref="paper", x=_at(value, picture.log_x), text=label, font_color=GREY,
                              textangle=-90, showarrow=False, xanchor="right", yanchor="bottom")  # fmt: skip
    figure.update_layout(
        title=picture.title, template="plotly_white", hovermode="x unified",
        font_family="system-ui, sans-serif", showlegend=len(picture.lines) > 1,
    )  # fmt: skip
    figure.update_xaxes(
        title=picture.x_label,
        type="log" if picture.log_x else "linear",
        dtick="D2" if picture.log_x else None,
    )
    figure.update_yaxes(title=picture.y_label, rangemode="tozero")
    figure.write_html(path, include_plotlyjs=True, div_id="picture")


def _at(value: float, log: bool) -> float:
    """Annotations, unlike lines, give the exponent on a logarithmic axis."""
    return log10(value) if log else value


def _within(value: float, picture: Picture) -> bool:
    xs = [x for line in picture.lines for x in line.x]
    return min(xs) <= value * 1.001 and value <= max(xs) * 1.001

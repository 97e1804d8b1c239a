"""Draws the comparison of policies: capacity and TTFT P90 of each as the link narrows.

    python -m benchmarks.plot_policies RESULT.json … PICTURE.svg [--trace mooncake] [--most 6]

Results are those of benchmarks.policies. Where they hold several traces, `--trace` says which is drawn; of
many policies the default and those with the highest mean share of the bound are.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#000000")
"""Okabe and Ito's, told apart by the colour-blind too; the default policy has the first."""
LOAD = "0.8"
SECONDS = (1, 2, 5, 10, 20, 50)
TALLEST_S = 60.0
"""TTFTs beyond are drawn here: the queue grows without end."""


def draw(cells: list[dict[str, Any]], most: int) -> Figure:
    """A column of panels per fleet: capacity ÷ bound, and TTFT P90 at 80 % of the best capacity."""
    fleets: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        fleets.setdefault(cell["cell"].split(" · ")[0], []).append(cell)
    policies = _chosen(cells, most)
    figure = Figure(figsize=(4.2 * len(fleets), 6.4), layout="constrained")
    panels = figure.subplots(2, len(fleets), squeeze=False)
    for column, (fleet, own) in enumerate(fleets.items()):
        own.sort(key=_gbit)
        _lines(panels[0][column], own, policies, lambda row: 100 * row["over_bound"])
        _lines(panels[1][column], own, policies, _ttft)
        panels[0][column].set(title=f"fleet `{fleet}`", ylim=(0, 100))
        panels[1][column].set(xlabel="link, Gbit/s", yscale="log", ylim=(0.8, 1.15 * TALLEST_S))
        panels[1][column].set_yticks(SECONDS, [f"{seconds:g}" for seconds in SECONDS])
        panels[1][column].minorticks_off()
    panels[0][0].set_ylabel("capacity within the service levels,\n% of what any policy could sustain")
    panels[1][0].set_ylabel(f"TTFT P90, s, at {100 * float(LOAD):.0f} %\nof the best capacity")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2 * len(fleets), frameon=False)
    return figure


def _chosen(cells: list[dict[str, Any]], most: int) -> list[str]:
    """The default, which stands first, and those of the others in every cell that sustain most on average."""
    first, *others = [
        name for name in cells[0]["policies"] if all(name in cell["policies"] for cell in cells)
    ]
    shares = {name: mean(cell["policies"][name]["over_bound"] for cell in cells) for name in others}
    return [first, *sorted(others, key=lambda name: -shares[name])[: most - 1]]


def _lines(panel: Axes, cells: list[dict[str, Any]], policies: list[str], value: Any) -> None:
    for index, policy in enumerate(policies):
        values = [value(cell["policies"][policy]) for cell in cells]
        width = 2.6 if index == 0 else 1.6
        panel.plot(
            [_gbit(cell) for cell in cells], values, "o-", color=COLOURS[index % len(COLOURS)], lw=width,
            ms=5, label=policy.split(":")[0],
        )  # fmt: skip
    panel.set_xscale("log")
    panel.set_xticks([_gbit(cell) for cell in cells], [f"{_gbit(cell):.0f}" for cell in cells])
    panel.minorticks_off()
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def _ttft(row: dict[str, Any]) -> float:
    seconds = row["at_load"].get(LOAD, {}).get("ttft_p90_s")
    return TALLEST_S if seconds is None else min(float(seconds), TALLEST_S)


def _gbit(cell: dict[str, Any]) -> float:
    return float(min(cell["link_bytes_per_s"].values())) * 8 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--trace", default="mooncake")
    parser.add_argument("--most", type=int, default=6, help="policies to draw")
    arguments = parser.parse_args()
    found = [cell for path in arguments.results for cell in json.loads(path.read_text())["cells"]]
    cells = [cell for cell in found if cell["cell"].split(" · ")[1] == arguments.trace]
    if not cells:
        sys.exit(f"no cell of trace {arguments.trace!r} in {', '.join(map(str, arguments.results))}")
    matplotlib.rcParams["svg.hashsalt"] = "prfaas"
    metadata = {"Date": None} if arguments.picture.suffix == ".svg" else {}
    draw(cells, arguments.most).savefig(arguments.picture, dpi=150, metadata=metadata)


if __name__ == "__main__":
    main()

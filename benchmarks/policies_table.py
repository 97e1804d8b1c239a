"""Tables in Markdown of what benchmarks.policies found.

    python -m benchmarks.policies_table RESULT.json [RESULT.json …]

A row per cell: the bound and what binds it, the default's capacity, that of the best foreign policy (tuned),
of `dual_timescale`, and at each load the default's TTFT P90 and P99 over the lowest of all.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.policies import DEFAULT, LOADS


def row(cell: dict[str, Any]) -> list[str]:
    policies = cell["policies"]
    own, foreign = policies[DEFAULT], cell["best_foreign"]
    dual = policies.get("dual_timescale")
    over = cell["default_over_best_foreign"]
    found = [
        cell["cell"].replace("offered/link ", ""),
        f"{cell['bound_per_s']:.3g}, {cell['binding'][0] if cell['binding'] else ''}",
        f"{own['capacity_per_s']:.3g} ({own['over_bound']:.0%})",
        f"{foreign['rate_per_s']:.3g} ({policies[foreign['policy']]['setting']})",
        "-" if over is None else f"{over:.2f}",
        "-" if dual is None else f"{dual['over_bound']:.0%}",
    ]
    p90, p99 = "ttft_p90_s", "ttft_p99_s"
    return found + [
        f"{ratio(cell, load, p90)} / {ratio(cell, load, p99)}" for load in map("{:g}".format, LOADS)
    ]


def ratio(cell: dict[str, Any], load: str, figure: str) -> str:
    """The default's figure over the lowest of all policies."""
    values = [p["at_load"].get(load, {}).get(figure) for p in cell["policies"].values()]
    own = cell["policies"][DEFAULT]["at_load"].get(load, {}).get(figure)
    known = [value for value in values if value is not None]
    return "-" if own is None or not known else f"{own / min(known):.2f}"


def print_table(head: list[str], rows: list[list[str]]) -> None:
    for line in [head, ["---"] * len(head), *rows]:
        print("| " + " | ".join(line) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("results", type=Path, nargs="+")
    arguments = parser.parse_args()
    cells = [cell for path in arguments.results for cell in json.loads(path.read_text())["cells"]]
    head = ["cell", "bound req/s, binding", "default (of bound)", "best foreign", "ratio", "`dual_timescale`"]
    head += [f"P90 / P99 over the best at {load}" for load in map("{:.0%}".format, LOADS)]
    print_table(head, [row(cell) for cell in cells])
    print()
    everywhere = [name for name in cells[0]["policies"] if all(name in cell["policies"] for cell in cells)]
    shares = {name: [cell["policies"][name]["over_bound"] for cell in cells] for name in everywhere}
    ranked = sorted(shares.items(), key=lambda item: -statistics.mean(item[1]))
    rows = [[name, f"{statistics.mean(s):.0%}", f"{min(s):.0%}", f"{max(s):.0%}"] for name, s in ranked]
    print_table(["policy", "mean share of the bound", "least", "most"], rows)


if __name__ == "__main__":
    main()

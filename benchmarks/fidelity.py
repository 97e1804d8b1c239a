"""How well the simulator predicts the demo: calibrated on one half of its requests, checked on the other.

    make fidelity                     records the demo (about four minutes), then calibrates and predicts
    make fidelity JOURNAL=FILE        uses a journal recorded before

The demo's engines are real and each has its share of a core; the first half of the requests, by arrival, is
all that calibration sees, and how much they slow each other on the one machine is part of it. The second half
is replayed in the simulator from its arrivals, nine times with arrivals jittered by up to a decode step: a
request's prediction is the median. Bars: of the errors of TTFT, request by request and placed as they were
live, the median at most 10 % and the 90th percentile at most 25 %; the same bars on the errors of the two
percentiles where the policy places anew. Do nothing else on the machine meanwhile: a run beside other work
says what that work did.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from benchmarks.demo_recording import record_demo
from prfaas.errors import PrfaasError
from simulations.commands.calibrate import check_terms, term_table
from simulations.fidelity.calibrate import calibrate
from simulations.fidelity.recording import read_recording

MOST_OF_MEDIAN, MOST_OF_P90 = 0.10, 0.25


def main() -> int:
    arguments = _arguments()
    console = Console(highlight=False)
    journal = Path(arguments.journal) if arguments.journal else _record(arguments)
    recording = read_recording(journal)
    used = len(recording.rows) // 2
    found = calibrate(recording, used, one_machine=True)
    checked = check_terms(recording, found)
    report: dict[str, Any] = {
        "journal": str(journal),
        "requests": len(recording.rows),
        "used": used,
        "prefill_scale": found.prefill_scale,
        "decode_scale": found.decode_scale,
        "overhead_s": found.overhead_s,
        "machine": None if found.machine is None else msgspec.structs.asdict(found.machine),
        "terms": {
            name: {term: error.as_dict() for term, error in terms.items()} for name, terms in checked.items()
        },
    }
    followed, placed = checked["placed_as_recorded"]["ttft_s"], checked["placed_by_policy"]["ttft_s"]
    verdicts = {
        "by_request": (followed.median_error, followed.p90_error),
        "of_percentiles": (abs(placed.of_median), abs(placed.of_p90)),
    }
    report["ttft"] = {
        name: {"median": median, "p90": p90, "within": median <= MOST_OF_MEDIAN and p90 <= MOST_OF_P90}
        for name, (median, p90) in verdicts.items()
    }
    for name, terms in report["terms"].items():
        console.print(term_table(name, terms))
    console.print(f"{len(recording.rows) - used} requests predicted from {used} before them; TTFT:")
    _say(console, "placed as recorded, errors by request", report["ttft"]["by_request"])
    _say(console, "placed by the policy, errors of P50 and P90", report["ttft"]["of_percentiles"])
    router = checked["placed_as_recorded"]["router_ttft_s"]
    console.print(
        "  the live router's own predictions, errors by request: "
        f"{router.median_error:.1%} and {router.p90_error:.1%}"
    )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["ttft"]))
    return 0 if all(verdict["within"] for verdict in report["ttft"].values()) else 1


def _say(console: Console, what: str, verdict: dict[str, Any]) -> None:
    word = "within" if verdict["within"] else "NOT within"
    console.print(
        f"  {what}: {verdict['median']:.1%} and {verdict['p90']:.1%} "
        f"({word} {MOST_OF_MEDIAN:.0%} and {MOST_OF_P90:.0%})"
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fidelity", description=__doc__.split("\n")[0])
    parser.add_argument("--journal", default="", help="of a router that served before; default: run the demo")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state-dir", default="runs", help="folder for the demo's logs")
    parser.add_argument("--json", default="", help="write all figures here")
    return parser.parse_args()


def _record(arguments: argparse.Namespace) -> Path:
    console = Console(stderr=True, highlight=False)
    with console.status("starting") as status:
        recording = record_demo(arguments.requests, arguments.seed, Path(arguments.state_dir), status.update)
    console.print(f"recorded {recording.journal} and {recording.decisions}")
    if recording.errors:
        console.print(f"{recording.errors} requests failed; they are left out", style="yellow")
    return recording.journal


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PrfaasError as error:
        sys.exit(f"fidelity: {error}")

"""A few requests of a run as table rows: the slowest, and evenly spaced ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from simulations.report.summary import KINDS
from simulations.result import RunResult

STATES = ("served", "refused", "failed", "unfinished")
SLOWEST = 20
SPREAD = 30


def sample_rows(run: RunResult) -> list[dict[str, Any]]:
    """Rows in order of arrival; `why` says why a request is among them."""
    total = len(run.state)
    order = np.argsort(np.where(np.isnan(run.ttft_s), -1.0, run.ttft_s), kind="stable")[::-1]
    slowest = {int(index) for index in order[:SLOWEST]}
    spread = {int(index) for index in np.linspace(0, total - 1, min(SPREAD, total)).astype(int)}
    return [
        {**request_row(run, index), "why": "slowest" if index in slowest else "sample"}
        for index in sorted(slowest | spread)
    ]


def request_row(run: RunResult, index: int) -> dict[str, Any]:
    """One request by the names of `--out`; what did not happen is None."""
    kind, decode, site = int(run.kind[index]), int(run.decode[index]), int(run.site[index])
    return {
        "request": index,
        "state": STATES[int(run.state[index])],
        "reason": run.refusal[index],
        "arrival_s": _known(run.arrival_s[index]),
        "prompt_tokens": int(run.prompt_tokens[index]),
        "output_tokens": int(run.output_tokens[index]),
        "kind": KINDS[kind] if kind >= 0 else None,
        "decode": run.workers[decode] if decode >= 0 else None,
        "site": run.workers[site] if site >= 0 else None,
        "decode_cached_tokens": int(run.decode_cached_tokens[index]),
        "site_cached_tokens": int(run.site_cached_tokens[index]),
        "kv_bytes": int(run.kv_bytes[index]),
        "attempts": int(run.attempts[index]),
        "predicted_ttft_s": _known(run.predicted_ttft_s[index]),
        "ttft_s": _known(run.ttft_s[index]),
        "tpot_s": _known(run.tpot_s[index]),
        "end_s": _known(run.end_s[index]),
        "regret_s": _known(run.regret_s[index]),
    }


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)

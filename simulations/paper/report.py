"""The case study's results as one object: what `--json` prints and the tables show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from simulations.paper.case import FITTED, Case
from simulations.paper.model import figures, paper_splits
from simulations.paper.published import PUBLISHED, DeploymentName, Figures

BARS = {
    "lambda_max": 0.02,
    "theta_prfaas": 0.02,
    "theta_pd_p": 0.02,
    "theta_pd_d": 0.02,
    "threshold_tokens": 0.02,
    "n_prfaas": 0.0,
    "n_p": 0.0,
    "n_d": 0.0,
    "offload_share": 0.02,
    "egress_gbps": 0.10,
}
"""Largest relative error with which a figure counts as reproduced. TTFTs have none: theirs is only stated."""

ByDeployment = Mapping[DeploymentName, Figures]


@dataclass(frozen=True, slots=True)
class PaperReport:
    analytic: ByDeployment
    event_driven: ByDeployment
    """Empty where it was not asked for."""
    queue_free: Mapping[DeploymentName, float]
    """The model's λ_max with the simulator's prefill curve: event-driven runs only add queueing."""
    complete: bool = True
    """False: an interrupt ended the event-driven search, which holds what was known by then."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "analytic": _plain(self.analytic),
            "event_driven": _plain(self.event_driven),
            "published": _plain(PUBLISHED),
            "error": {name: relative_errors(found, PUBLISHED[name]) for name, found in self.analytic.items()},
            "fitted": list(FITTED),
            **({} if self.complete else {"complete": False}),
        }


def analytic_figures(case: Case) -> dict[DeploymentName, Figures]:
    """All three deployments at their best split."""
    return {name: figures(case, split) for name, split in paper_splits(case).items()}


def relative_errors(found: Figures, expected: Figures) -> dict[str, float | None]:
    """(found - expected) / expected by figure; None where one of them has none, 0 where both are 0."""
    pairs = zip(asdict(found).items(), asdict(expected).values(), strict=True)
    return {name: relative(ours, theirs) for (name, ours), theirs in pairs}


def relative(found: float | None, expected: float | None) -> float | None:
    if found is None or expected is None:
        return None
    if expected == 0:
        return 0.0 if found == 0 else None
    return (found - expected) / expected


def _plain(rows: ByDeployment) -> dict[str, dict[str, Any]]:
    return {name: asdict(row) for name, row in rows.items()}

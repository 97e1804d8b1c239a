"""What the paper publishes (arXiv 2604.15039, §4): its inputs, and its results for three deployments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from simulations.paper.lengths import TruncatedLogNormal

DeploymentName = Literal["prfaas_pd", "homogeneous", "naive"]
DEPLOYMENTS: tuple[DeploymentName, ...] = get_args(DeploymentName)

MIB = 2.0**20
POINT_TOKENS = (1024, 8192, 32_768, 131_072)
PREFILL_H200_S = (0.44, 0.72, 1.84, 7.40)
"""Of one instance of 8x H200, at `POINT_TOKENS`."""
KV_BYTES = (190.8 * MIB, 308.9 * MIB, 701.3 * MIB, 2316.3 * MIB)
LENGTHS = TruncatedLogNormal(mu=9.90, sigma=1.00, low=128, high=131_072)
OUTPUT_TOKENS = 1024
TOKENS_PER_S = 40.0
"""Service level of one answer: a decode step takes 25 ms."""
LINK_GBPS = 100.0


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one deployment; None where the paper has none, or where there is no such stage."""

    lambda_max: float
    """Requests per second."""
    theta_prfaas: float | None
    """Requests per second that the remote prefill pool sustains, its link included."""
    theta_pd_p: float | None
    """… that the PD cluster's prefill instances sustain."""
    theta_pd_d: float
    """… that its decode instances sustain."""
    threshold_tokens: float | None
    n_prfaas: int
    n_p: int
    n_d: int
    offload_share: float | None
    """Share of the requests prefilled remotely."""
    egress_gbps: float | None
    """KV that leaves the remote pool at `lambda_max`, 10⁹ bits per second."""
    ttft_mean_s: float
    ttft_p90_s: float


PUBLISHED: dict[DeploymentName, Figures] = {
    "prfaas_pd": Figures(3.24, 1.61, 1.64, 3.91, 19_400, 4, 3, 5, 0.496, 13.0, 2.22, 3.51),
    "homogeneous": Figures(2.11, None, 2.11, 2.35, None, 0, 9, 3, None, None, 4.44, 9.73),
    "naive": Figures(2.45, 2.45, None, 6.25, None, 4, 0, 8, None, None, 1.74, 3.51),
}
"""Offload shares of 0 and 1 and the egress of the naive deployment are not printed in the paper."""

EQUAL_COST_GAIN = 1.15
"""λ_max of `prfaas_pd` over that of a homogeneous fleet of the same cost (the paper says ≈15 %)."""

"""The case study's inputs, measured and fitted, as the analytic model takes them.

Two curves run through the paper's four prefill times. Throughputs use a quadratic, whose
expectations give the published stage rates within 1 %. TTFTs use lines from point to point, without which no
P90 of 3.51 s comes out. The H20 instances' profile is not published. It is `slope · T_H200 + offset`, solved
so that the quadratic's expectations give the two published H20 rates; the lines are mapped by the same two.
"""

from __future__ import annotations

from dataclasses import dataclass

from simulations.paper.curves import Curve, joined_by_lines, least_squares
from simulations.paper.lengths import TruncatedLogNormal
from simulations.paper.published import (
    KV_BYTES,
    LENGTHS,
    LINK_GBPS,
    OUTPUT_TOKENS,
    POINT_TOKENS,
    PREFILL_H200_S,
    PUBLISHED,
    TOKENS_PER_S,
)

FITTED = (
    "h20_profile.slope",
    "h20_profile.offset_s",
    "decode.slots",
    "homogeneous.theta_pd_p",
    "homogeneous.lambda_max",
    "prfaas_pd.theta_pd_p",
    "prfaas_pd.theta_pd_d",
)
"""Parameters solved from published figures, and those figures: their agreement is no prediction."""


@dataclass(frozen=True, slots=True)
class Case:
    """Everything the model needs beside the numbers of instances. Times are of one instance."""

    lengths: TruncatedLogNormal
    remote_prefill_s: Curve
    """By uncached tokens, 8x H200; for throughputs."""
    home_prefill_s: Curve
    """8x H20."""
    remote_ttft_s: Curve
    """The same times for TTFTs: lines through the published points."""
    home_ttft_s: Curve
    kv_bytes: Curve
    """What crosses the link for a prompt."""
    output_tokens: int
    decode_slots: int
    """Answers that one decode instance writes at once."""
    decode_step_s: float
    link_bytes_per_s: float

    @property
    def decode_rate_per_s(self) -> float:
        """Answers per second of one decode instance."""
        return self.decode_slots / (self.decode_step_s * self.output_tokens)


@dataclass(frozen=True, slots=True)
class H20Fit:
    slope: float
    offset_s: float


def fit_h20(lengths: TruncatedLogNormal, h200_s: Curve) -> H20Fit:
    """Solve E[slope · T + offset] for the two published H20 rates: of all prompts, and of the short ones."""
    homogeneous, mixed = PUBLISHED["homogeneous"], PUBLISHED["prfaas_pd"]
    assert homogeneous.theta_pd_p
    assert mixed.theta_pd_p
    assert mixed.threshold_tokens
    all_s = homogeneous.n_p / homogeneous.theta_pd_p
    short_s = mixed.n_p / mixed.theta_pd_p
    all_h200_s = lengths.mean(h200_s)
    short_h200_s = lengths.mean(h200_s, up_to=mixed.threshold_tokens)
    slope = (all_s - short_s) / (all_h200_s - short_h200_s)
    return H20Fit(slope, all_s - slope * all_h200_s)


def decode_slots() -> int:
    """The whole number of slots that gives the published decode rate at the service level's step time."""
    mixed = PUBLISHED["prfaas_pd"]
    return round(mixed.theta_pd_d / mixed.n_d * OUTPUT_TOKENS / TOKENS_PER_S)


def paper_case(link_gbps: float = LINK_GBPS) -> Case:
    """The paper's case on a link of `link_gbps`."""
    quadratic = least_squares(POINT_TOKENS, PREFILL_H200_S, degree=2)
    lines = joined_by_lines(POINT_TOKENS, PREFILL_H200_S)
    fit = fit_h20(LENGTHS, quadratic)
    return Case(
        lengths=LENGTHS,
        remote_prefill_s=quadratic,
        home_prefill_s=quadratic.scaled(fit.slope, fit.offset_s),
        remote_ttft_s=lines,
        home_ttft_s=lines.scaled(fit.slope, fit.offset_s),
        kv_bytes=least_squares(POINT_TOKENS, KV_BYTES, degree=1),
        output_tokens=OUTPUT_TOKENS,
        decode_slots=decode_slots(),
        decode_step_s=1 / TOKENS_PER_S,
        link_bytes_per_s=link_gbps * 1e9 / 8,
    )

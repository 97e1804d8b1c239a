"""The paper's steady-state model: stage throughputs, and the threshold and split that balance them.

    Λ = min( N_prfaas / E[T_remote; L>t],  B / E[S_kv; L>t],
             N_p / E[T_home; L≤t],  N_d · slots / (T_step · L_out) )

`E[X; A]` is the expectation over A times its probability, so the first three are the paper's Θ_prfaas / p and
Θ_pd-p / (1-p). There is no queue, round trip, loss or cache in it: Λ is more than a fleet can really do.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from simulations.paper.case import Case
from simulations.paper.published import PUBLISHED, DeploymentName, Figures
from simulations.workload.trace import Floats

STAGES = ("remote", "link", "home", "decode")
"""Remote prefill, the link, prefill in the PD cluster, decode."""
GRID_STEP_TOKENS = 100


@dataclass(frozen=True, slots=True)
class Split:
    """How many instances do what, and which prompts go remote: those longer than `threshold_tokens`."""

    n_prfaas: int
    n_p: int
    n_d: int
    threshold_tokens: float
    """0: every prompt; infinity: none."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What one request asks of each stage on average, by threshold; arrays of shape [thresholds].

    Independent of the fleet's size and link, so that a search over those computes it once.
    """

    threshold_tokens: Floats
    offload_share: Floats
    remote_prefill_s: Floats
    kv_bytes: Floats
    """Over the link."""
    home_prefill_s: Floats


def demand(case: Case, thresholds: Floats) -> Demand:
    lengths = case.lengths
    return Demand(
        threshold_tokens=thresholds,
        offload_share=np.array([lengths.share(above=t) for t in thresholds]),
        remote_prefill_s=np.array([lengths.integral(case.remote_prefill_s, above=t) for t in thresholds]),
        kv_bytes=np.array([lengths.integral(case.kv_bytes, above=t) for t in thresholds]),
        home_prefill_s=np.array([lengths.integral(case.home_prefill_s, up_to=t) for t in thresholds]),
    )


def grid(case: Case) -> Demand:
    """Demand at every threshold that the search tries: 0 (all remote) to infinity (none)."""
    steps = np.arange(0.0, case.lengths.high, GRID_STEP_TOKENS)
    return demand(case, np.append(steps, inf))


def stage_rates(case: Case, asked: Demand, n_prfaas: int, n_p: int, n_d: int) -> Floats:
    """Requests per second, of all kinds together, that each stage allows; shape [STAGES, thresholds]."""
    return np.stack(
        [
            _over(n_prfaas, asked.remote_prefill_s),
            _over(case.link_bytes_per_s, asked.kv_bytes),
            _over(n_p, asked.home_prefill_s),
            np.full(len(asked.threshold_tokens), n_d * case.decode_rate_per_s),
        ]
    )


def best_split(case: Case, n_prfaas: int, n_pd: int, asked: Demand | None = None) -> Split:
    """The threshold and the split of `n_pd` instances with the highest Λ, by trying all.

    Among equals the one that sends least over the link, then the one with most decode instances.
    """
    asked = asked or grid(case)
    best, best_rate = Split(n_prfaas, 0, n_pd, inf), -1.0
    for n_p in range(n_pd + 1):
        rates = stage_rates(case, asked, n_prfaas, n_p, n_pd - n_p).min(axis=0)
        peak = len(rates) - 1 - int(np.argmax(rates[::-1]))
        if rates[peak] > best_rate * (1 + 1e-12):
            best_rate = float(rates[peak])
            best = Split(n_prfaas, n_p, n_pd - n_p, float(asked.threshold_tokens[peak]))
    return best


def figures(case: Case, split: Split) -> Figures:
    """The model's figures for one fleet."""
    asked = demand(case, np.array([split.threshold_tokens]))
    remote, link, home, decode = stage_rates(case, asked, split.n_prfaas, split.n_p, split.n_d)[:, 0]
    share = float(asked.offload_share[0])
    lambda_max = float(min(remote, link, home, decode))
    mean_s, p90_s = _ttft(case, split.threshold_tokens)
    return Figures(
        lambda_max=lambda_max,
        theta_prfaas=float(min(remote, link)) * share if share > 0 else None,
        theta_pd_p=float(home) * (1 - share) if share < 1 else None,
        theta_pd_d=float(decode),
        threshold_tokens=split.threshold_tokens if 0 < split.threshold_tokens < inf else None,
        n_prfaas=split.n_prfaas,
        n_p=split.n_p,
        n_d=split.n_d,
        offload_share=share,
        egress_gbps=lambda_max * float(asked.kv_bytes[0]) * 8e-9,
        ttft_mean_s=mean_s,
        ttft_p90_s=p90_s,
    )


def binding_stages(case: Case, split: Split) -> str:
    """The stages that limit Λ, joined by `+`: an optimum balances two where it can (to within 1 %)."""
    asked = demand(case, np.array([split.threshold_tokens]))
    rates = stage_rates(case, asked, split.n_prfaas, split.n_p, split.n_d)[:, 0]
    return "+".join(stage for stage, rate in zip(STAGES, rates, strict=True) if rate <= rates.min() * 1.01)


def paper_splits(case: Case) -> dict[DeploymentName, Split]:
    """Each deployment's best split. The naive one has every prompt remote and every PD instance decoding."""
    sizes = {name: (row.n_prfaas, row.n_p + row.n_d) for name, row in PUBLISHED.items()}
    n_prfaas, n_d = sizes["naive"]
    return {
        "prfaas_pd": best_split(case, *sizes["prfaas_pd"]),
        "homogeneous": best_split(case, *sizes["homogeneous"]),
        "naive": Split(n_prfaas, 0, n_d, 0.0),
    }


def _over(capacity: float, asked: Floats) -> Floats:
    """capacity / asked; a stage of which nothing is asked limits nothing."""
    result: Floats = np.divide(capacity, asked, out=np.full(asked.shape, inf), where=asked > 0)
    return result


def _ttft(case: Case, threshold_tokens: float) -> tuple[float, float]:
    """Mean and 90th percentile of the prefill time alone: what the paper calls TTFT."""
    mean_s = case.lengths.integral(case.remote_ttft_s, above=threshold_tokens)
    mean_s += case.lengths.integral(case.home_ttft_s, up_to=threshold_tokens)
    return mean_s, _ttft_quantile(case, threshold_tokens, 0.9)


def _ttft_quantile(case: Case, threshold_tokens: float, quantile: float) -> float:
    """Bisection on P(TTFT ≤ x) = quantile; both curves rise with the length."""
    low_s = 0.0
    high_s = float(max(case.remote_ttft_s(case.lengths.high), case.home_ttft_s(case.lengths.high)))
    while high_s - low_s > 1e-6:
        middle_s = (low_s + high_s) / 2
        home = min(case.home_ttft_s.inverse(middle_s), threshold_tokens)
        remote = case.remote_ttft_s.inverse(middle_s)
        share = case.lengths.share(up_to=home) + case.lengths.share(above=threshold_tokens, up_to=remote)
        low_s, high_s = (low_s, middle_s) if share >= quantile else (middle_s, high_s)
    return high_s

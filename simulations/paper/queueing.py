"""Waiting times by formula: a second opinion on the event-driven runs.

Arrivals are Poisson, and so are those of each stage, because prompts are sorted by their length alone. A
stage with c equal instances is M/G/c; its mean wait is about that of M/M/c times (1 + cv²) / 2 (Lee and
Longton 1959; exact for c = 1).
"""

from __future__ import annotations

from math import inf

from simulations.paper.case import Case
from simulations.paper.curves import Curve
from simulations.paper.model import Split


def erlang_c(servers: int, erlangs: float) -> float:
    """Probability that an arrival has to wait in M/M/c; 1 from `erlangs` = `servers` on."""
    if erlangs >= servers:
        return 1.0
    blocked = 1.0
    for server in range(1, servers + 1):  # Erlang B by its recursion, which cannot overflow
        blocked = erlangs * blocked / (server + erlangs * blocked)
    return blocked / (1 - erlangs / servers * (1 - blocked))


def mean_wait_s(rate_per_s: float, service_s: float, service_square_s2: float, servers: int) -> float:
    """Mean wait in M/G/c with mean service time and mean squared service time; infinite when overloaded."""
    erlangs = rate_per_s * service_s
    if erlangs >= servers:
        return inf
    if erlangs <= 0:
        return 0.0
    exponential_s = erlang_c(servers, erlangs) * service_s / (servers - erlangs)
    return exponential_s * service_square_s2 / service_s**2 / 2


def ttft_mean_s(case: Case, split: Split, rate_per_s: float) -> float:
    """Mean wait for a prefill instance plus mean prefill, over both sites; no decode slots, link or steps."""
    t = split.threshold_tokens
    sites = (
        (case.remote_ttft_s, t, inf, split.n_prfaas),
        (case.home_ttft_s, 0.0, t, split.n_p),
    )
    total_s = 0.0
    for curve, above, up_to, servers in sites:
        share = case.lengths.share(above, up_to)
        if share > 0:
            service_s = case.lengths.mean(curve, above, up_to)
            square_s2 = case.lengths.mean(squared(curve), above, up_to)
            total_s += share * (service_s + mean_wait_s(share * rate_per_s, service_s, square_s2, servers))
    return total_s


def squared(curve: Curve) -> Curve:
    """The curve whose value is this one's, squared."""
    pieces = []
    for piece in curve.pieces:
        product = [0.0] * (2 * len(piece) - 1)
        for i, left in enumerate(piece):
            for j, right in enumerate(piece):
                product[i + j] += left * right
        pieces.append(tuple(product))
    return Curve(curve.knots, tuple(pieces))

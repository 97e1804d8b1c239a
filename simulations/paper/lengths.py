"""Log-normal prompt lengths cut off on both sides, with exact expectations over any range of lengths."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import erf, exp, inf, log, sqrt
from statistics import NormalDist

import numpy as np

from simulations.paper.curves import Curve
from simulations.workload.trace import Ints


@dataclass(frozen=True, slots=True)
class TruncatedLogNormal:
    """exp(N(mu, sigma²)), given that it lies in [low, high] (tokens)."""

    mu: float
    sigma: float
    low: float
    high: float

    def share(self, above: float = 0.0, up_to: float = inf) -> float:
        """P(above < L ≤ up_to)."""
        return self._moment(0, above, up_to)

    def integral(self, curve: Curve, above: float = 0.0, up_to: float = inf) -> float:
        """E[curve(L); above < L ≤ up_to]: the expectation over that range times the range's share.

        Exact: every piece of `curve` is a polynomial, and a log-normal's partial moments are known,
        E[L^k; L ≤ x] = exp(k·mu + k²·sigma²/2) · Φ((ln x - mu)/sigma - k·sigma).
        """
        borders = (0.0, *curve.knots, inf)
        total = 0.0
        for (left, right), piece in zip(pairwise(borders), curve.pieces, strict=True):
            begin, end = max(left, above), min(right, up_to)
            if begin < end:
                total += sum(c * self._moment(power, begin, end) for power, c in enumerate(piece))
        return total

    def mean(self, curve: Curve, above: float = 0.0, up_to: float = inf) -> float:
        """E[curve(L) | above < L ≤ up_to]; NaN where no length lies there."""
        share = self.share(above, up_to)
        return self.integral(curve, above, up_to) / share if share > 0 else float("nan")

    def quantile(self, share: float) -> float:
        """The length that this share of the prompts does not exceed."""
        normal = NormalDist(self.mu, self.sigma)
        below, until = normal.cdf(log(self.low)), normal.cdf(log(self.high))
        inside = below + share * (until - below)
        return min(max(exp(normal.inv_cdf(inside)), self.low), self.high)

    def sample(self, count: int, rng: np.random.Generator) -> Ints:
        """`count` lengths in whole tokens, by inversion: the same uniforms give the same lengths."""
        return np.rint([self.quantile(u) for u in rng.random(count)]).astype(np.int64)

    def stratified(self, count: int, rng: np.random.Generator) -> Ints:
        """Like `sample`, but one length from each of `count` equally likely ranges, in random order."""
        shares = (rng.permutation(count) + rng.random(count)) / count
        return np.rint([self.quantile(share) for share in shares]).astype(np.int64)

    def _moment(self, power: int, above: float, up_to: float) -> float:
        """E[L^power; above < L ≤ up_to] under the truncated distribution."""
        low, high = max(above, self.low), min(up_to, self.high)
        if low >= high:
            return 0.0
        scale = exp(power * self.mu + (power * self.sigma) ** 2 / 2)
        whole = self._below(self.high, 0) - self._below(self.low, 0)
        return scale * (self._below(high, power) - self._below(low, power)) / whole

    def _below(self, tokens: float, power: int) -> float:
        return (1 + erf(((log(tokens) - self.mu) / self.sigma - power * self.sigma) / sqrt(2))) / 2

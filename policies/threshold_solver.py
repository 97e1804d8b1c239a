"""The PrfaaS throughput model solved on samples: which threshold and which prefill:decode split serve most.

The model of arXiv 2604.15039, section 3: stages in series, each with a rate, no queueing. Its

    Λ = min(Θ_prfaas / p, Θ_pd-p / (1 - p), Θ_pd-d)
    Θ_prfaas = min(N_prfaas / E[T | l > t], B / E[S | l > t]),  Θ_pd-p = N_p / E[T | l ≤ t]

needs no distribution: E[T | l > t]·p is the mean over all requests of the seconds of those that go, so each
stage's rate is its capacity over the mean work per request; one sort gives these means for every threshold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from policies.types import Floats, Ints


@dataclass(frozen=True, slots=True)
class Samples:
    """What each of n requests would cost in either place, whichever it took; arrays of shape [n]."""

    length_tokens: Ints
    """What the threshold is compared with."""
    home_s: Floats
    """Prefill seconds in the PD cluster."""
    away_s: Floats
    """Prefill seconds across the link."""
    kv_bytes: Floats
    """Bytes that would cross the link."""

    def __len__(self) -> int:
        return len(self.length_tokens)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What there is to serve with, apart from the split of the PD cluster."""

    away_workers: float
    link_bytes_per_s: float
    decode_rate: float = math.inf
    """Requests per second that one decode worker sustains."""


@dataclass(frozen=True, slots=True)
class Solution:
    threshold_tokens: int
    """Lengths up to here stay in the PD cluster."""
    rate: float
    """Λ, requests per second."""
    offload_share: float
    """Requests that go."""
    away_rate: float
    """Requests per second of all kinds at which the remote prefill workers are full: N/E[T; l > t]."""
    link_rate: float
    home_rate: float
    decode_rate: float

    @property
    def link_bound(self) -> float:
        """Seconds of link over seconds of remote compute per request: above 1 the link binds first."""
        return self.away_rate / self.link_rate if self.link_rate > 0 else math.inf


class ThresholdProblem:
    """All thresholds of one set of samples; `solve` is cheap, so that many splits can be tried.

    Raises:
        ValueError: there are no samples.
    """

    def __init__(self, samples: Samples, capacity: Capacity) -> None:
        if not len(samples):
            raise ValueError("no samples to solve a threshold from")
        order = np.argsort(samples.length_tokens, kind="stable")
        self._lengths = samples.length_tokens[order]
        self._capacity = capacity
        # Equal lengths fall on the same side: k requests stay, for each k that splits no group of equals.
        borders = np.flatnonzero(np.diff(self._lengths) > 0) + 1
        self._stay = np.concatenate(([0], borders, [len(samples)]))
        n = len(samples)
        self._home_s = _before(samples.home_s[order])[self._stay] / n
        self._away_rate = _rate(capacity.away_workers, _after(samples.away_s[order])[self._stay] / n)
        self._link_rate = _rate(capacity.link_bytes_per_s, _after(samples.kv_bytes[order])[self._stay] / n)

    def solve(self, home_workers: float, decode_workers: float) -> Solution:
        """The threshold that gives most prefill with these workers. Where decode binds, many thresholds
        serve the same; the one that balances the prefill stages is taken, as in the paper."""
        home_rate = _rate(home_workers, self._home_s)
        prefill_rate = np.minimum(np.minimum(self._away_rate, self._link_rate), home_rate)
        best = int(np.argmax(prefill_rate))
        decode_rate = decode_workers * self._capacity.decode_rate if decode_workers else 0.0
        stay, n = int(self._stay[best]), len(self._lengths)
        return Solution(
            threshold_tokens=self._between(stay),
            rate=min(float(prefill_rate[best]), decode_rate),
            offload_share=1 - stay / n,
            away_rate=float(self._away_rate[best]),
            link_rate=float(self._link_rate[best]),
            home_rate=float(home_rate[best]),
            decode_rate=decode_rate,
        )

    def best_split(self, workers: int) -> tuple[int, Solution]:
        """(prefill workers, solution) of the split of `workers` that serves most; at least one of each.

        Raises:
            ValueError: fewer than two workers cannot be split.
        """
        if workers < 2:
            raise ValueError(f"{workers} worker cannot be split in prefill and decode")
        solutions = [(home, self.solve(home, workers - home)) for home in range(1, workers)]
        return max(solutions, key=lambda solved: solved[1].rate)

    def _between(self, stay: int) -> int:
        """A threshold that keeps just the `stay` shortest: half way to the next longer one."""
        if stay == 0:
            return max(0, int(self._lengths[0]) - 1)
        longest = int(self._lengths[stay - 1])
        if stay == len(self._lengths):
            return longest
        return (longest + int(self._lengths[stay])) // 2


def _before(values: Floats) -> Floats:
    """Sums of the first k values, k = 0 … n."""
    sums: Floats = np.concatenate(([0.0], np.cumsum(values)))
    return sums


def _after(values: Floats) -> Floats:
    """Sums of all but the first k values, k = 0 … n; exactly 0 for k = n."""
    return _before(values[::-1])[::-1]


def _rate(capacity: float, work: Floats) -> Floats:
    """capacity / work; without work there is no limit."""
    rate: Floats = np.full(len(work), math.inf)
    np.divide(capacity, work, out=rate, where=work > 0)
    return rate

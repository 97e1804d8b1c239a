"""Routers that look at load alone, or at nothing: what every other policy should beat."""

from __future__ import annotations

import numpy as np

from policies.base import BasePolicy, gather, pick
from policies.pairing import (
    Where,
    decode_requests,
    same,
    site_requests,
    site_then_decode,
)
from policies.types import Candidates, FleetView, Floats, Ints, RequestView

LOADS = ("requests", "tokens")


class Random(BasePolicy):
    """Any feasible placement, each equally likely.

    Args:
        where: sites considered (`policies.pairing.Where`).
    """

    def __init__(self, where: str = "all") -> None:
        self._where = Where(where)

    def choose(
        self, request: RequestView, candidates: Candidates, view: FleetView, rng: np.random.Generator
    ) -> int:
        rows = self._where.rows(candidates)
        return int(rows[rng.integers(len(rows))])


class LeastLoad(BasePolicy):
    """The prefill site with the least load, then the decode worker with the fewest requests.

    As `least_load` of SGLang's and vLLM's routers in prefill/decode mode, which pick both sides by
    their own load. Caches and links are not looked at.

    Args:
        by: load of a site in `requests` (queued or running) or in prefill `tokens` queued.
        where: sites considered (`policies.pairing.Where`).

    Raises:
        ValueError: `by` or `where` is another word.
    """

    def __init__(self, by: str = "requests", where: str = "prefill") -> None:
        if by not in LOADS:
            raise ValueError(f"by must be one of {', '.join(LOADS)}, is `{by}`")
        self._tokens = by == "tokens"
        self._where = Where(where)

    def choose(
        self, request: RequestView, candidates: Candidates, view: FleetView, rng: np.random.Generator
    ) -> int:
        load = self._load(candidates, view)
        rows = self._where.rows(candidates)
        return site_then_decode(load, decode_requests(candidates, view), candidates, view, rng, rows)

    def _load(self, candidates: Candidates, view: FleetView) -> Floats:
        if self._tokens:
            return gather(view.queued_tokens, candidates.site)
        return site_requests(candidates, view)


class PowerOfTwo(BasePolicy):
    """Two sites by chance, the less loaded of them; then two decode workers likewise.

    Mitzenmacher's two choices, `power_of_two` of SGLang's and vLLM's routers: nearly as even as the least
    load, and robust to old load figures, as not everybody runs to the one that looks idle.

    Args:
        where: sites considered (`policies.pairing.Where`).
    """

    def __init__(self, where: str = "prefill") -> None:
        self._where = Where(where)

    def choose(
        self, request: RequestView, candidates: Candidates, view: FleetView, rng: np.random.Generator
    ) -> int:
        sites, decodes = gather(view.number, candidates.site), gather(view.number, candidates.decode)
        rows = self._where.rows(candidates)
        site = pick(_two(sites, rows, rng), rng, site_requests(candidates, view))
        rows = same(sites, rows, site)
        return pick(_two(decodes, rows, rng), rng, decode_requests(candidates, view))


def _two(numbers: Floats, rows: Ints, rng: np.random.Generator) -> Ints:
    """Two of `rows`, by chance, of different workers; one where all are of the same."""
    first = rows[rng.integers(len(rows))]
    others = rows[numbers[rows] != numbers[first]]
    return np.array([first, others[rng.integers(len(others))]] if len(others) else [first])

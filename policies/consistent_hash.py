"""A conversation always meets the same workers, whatever they are doing."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from policies.base import BasePolicy, gather
from policies.pairing import Where, same
from policies.types import Candidates, FleetView, Floats, Ints, RequestView


class ConsistentHash(BasePolicy):
    """Prefill site and decode worker by hash of the session, so that its prefix is cached at both.

    `consistent_hash` of SGLang's and vLLM's routers. They walk a ring with virtual nodes; this takes the
    worker with the highest hash of (worker, key), which moves just as few sessions when workers come and
    go (rendezvous hashing, Thaler and Ravishankar 1998). Requests without a session are spread by their
    id. Load is not looked at: theirs can skip overloaded workers, this cannot.

    Args:
        where: sites considered (`policies.pairing.Where`).
    """

    def __init__(self, where: str = "prefill") -> None:
        self._where = Where(where)

    def choose(
        self, request: RequestView, candidates: Candidates, view: FleetView, rng: np.random.Generator
    ) -> int:
        key = (request.session or request.request_id).encode()
        rows = self._where.rows(candidates)
        sites, decodes = gather(view.number, candidates.site), gather(view.number, candidates.decode)
        rows = same(sites, rows, _highest(candidates.site, _one_each(sites, rows), key))
        return _highest(candidates.decode, _one_each(decodes, rows), key)


def _one_each(numbers: Floats, rows: Ints) -> list[int]:
    """The first of `rows` of each worker."""
    _, first = np.unique(numbers[rows], return_index=True)
    each: list[int] = rows[first].tolist()
    return each


def _highest(names: tuple[str, ...], rows: list[int], key: bytes) -> int:
    return max(rows, key=lambda row: _rank(names[row], key))


def _rank(name: str, key: bytes) -> tuple[bytes, str]:
    return blake2b(key, digest_size=8, key=name.encode()[:64]).digest(), name

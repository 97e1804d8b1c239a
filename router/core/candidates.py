"""From the compiled code's output to what policies and bookings see of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from policies.types import TERM_NAMES, Bools, Candidates, Floats, Ints
from router.core.block_table import Hashes
from router.core.decision import COUNT_NAMES
from router.core.topology import Topology


@dataclass(slots=True)
class Weighed:
    """What `weigh` found for one request, in arrays of its own: they stay valid after later placements."""

    floats: Floats
    """A column for each candidate, rows as in `costs`."""
    ints: Ints
    hashes: Hashes
    """The prompt's blocks."""
    candidates: Candidates
    least_cost_s: float


class CandidateMatrix(Candidates):
    """`Candidates` whose columns are rows of two matrices, made into arrays when asked for: a policy looks at
    few of them. Use `make`; a call makes plain ones, as `dataclasses.replace` does."""

    __slots__ = ("_floats", "_ints", "_names")
    _floats: Floats
    _ints: Ints
    _names: tuple[tuple[str, ...], tuple[str, ...]]

    def __new__(cls, *args: Any, **columns: Any) -> Any:
        return Candidates(*args, **columns)

    @classmethod
    def make(
        cls, decode: tuple[str, ...], site: tuple[str, ...], floats: Floats, ints: Ints
    ) -> CandidateMatrix:
        made: CandidateMatrix = object.__new__(cls)
        put = object.__setattr__  # frozen for policies, not for us
        put(made, "_names", (decode, site))
        put(made, "_floats", floats)
        put(made, "_ints", ints)
        return made


def _name(row: int) -> property:
    return property(lambda self: self._names[row])


def _count(row: int) -> property:
    return property(lambda self: self._ints[row])


def _term(row: int) -> property:
    return property(lambda self: self._floats[row])


def _show(names: Sequence[str], column: Callable[[int], property]) -> None:
    for row, name in enumerate(names):
        setattr(CandidateMatrix, name, column(row))


_show(("decode", "site"), _name)
_show(("kind", *COUNT_NAMES), _count)
_show(TERM_NAMES, _term)


def candidates_of(topology: Topology, keep: Bools, floats: Floats, ints: Ints) -> Candidates:
    """The pairs of the topology that are kept, as policies see them."""
    decode, site = topology.decode, topology.site
    if floats.shape[1] < len(decode):
        rows = keep.nonzero()[0].tolist()
        decode, site = tuple([decode[row] for row in rows]), tuple([site[row] for row in rows])
    return CandidateMatrix.make(decode, site, floats, ints)

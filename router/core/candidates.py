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
    """`Candidates` whose columns are rows of two matrices, and whose names are looked up, when asked for: a
    policy looks at few of them. Use `make`; a call makes plain ones, as `dataclasses.replace` does."""

    __slots__ = ("_floats", "_ints", "_kept", "_names", "_topology")
    _floats: Floats
    _ints: Ints
    _kept: Ints | None
    """Pairs of the topology that are candidates; None = all."""
    _names: tuple[tuple[str, ...], tuple[str, ...]] | None
    _topology: Topology

    def __new__(cls, *args: Any, **columns: Any) -> Any:
        return Candidates(*args, **columns)

    @classmethod
    def make(cls, topology: Topology, kept: Ints | None, floats: Floats, ints: Ints) -> CandidateMatrix:
        made: CandidateMatrix = object.__new__(cls)
        _put(made, "_topology", topology)
        _put(made, "_kept", kept)
        _put(made, "_names", (topology.decode, topology.site) if kept is None else None)
        _put(made, "_floats", floats)
        _put(made, "_ints", ints)
        return made

    def __len__(self) -> int:
        return int(self._floats.shape[1])

    def pair(self, index: int) -> tuple[str, str]:
        row = index if self._kept is None else self._kept.item(index)
        return self._topology.decode[row], self._topology.site[row]

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(decode workers, prefill sites), one of each per candidate."""
        if self._names is None:
            assert self._kept is not None
            rows, topology = self._kept.tolist(), self._topology
            found = tuple([topology.decode[row] for row in rows]), tuple([topology.site[row] for row in rows])
            _put(self, "_names", found)
            return found
        return self._names


_put = object.__setattr__  # frozen for policies, not for us


def _name(row: int) -> property:
    return property(lambda self: self.names()[row])


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
    kept = keep.nonzero()[0] if floats.shape[1] < len(topology) else None
    return CandidateMatrix.make(topology, kept, floats, ints)

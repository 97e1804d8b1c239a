"""Machine code for the inner loops of the brain: plain typed Python functions, compiled by numba.

No fast-math and no threads: the same inputs give the same bits, in a live router and in a replay.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from numba import njit

from policies.types import Floats, Ints

Function = TypeVar("Function", bound=Callable[..., object])
SOURCES = (
    "compiled.py",
    "tables.py",
    "tally.py",
    "costs.py",
    "weigh.py",
    "book.py",
    "link_share.py",
    "pools.py",
    "shortlist.py",
    "block_kernels.py",
)


def compiled(function: Function) -> Function:
    """Compile `function` as part of those that call it."""
    made: Function = njit(error_model="numpy")(function)
    return made


def entry_point(function: Function) -> Function:
    """Compile `function`, which Python calls, when it is first called; the machine code is kept on disk
    beside the source, else in the user's cache directory (`NUMBA_CACHE_DIR` names another)."""
    try:
        made: Function = njit(cache=True, error_model="numpy")(function)
    except RuntimeError:  # no directory can be written: compile once per process
        made = njit(error_model="numpy")(function)
    return made


@lru_cache(maxsize=1)
def stamp() -> int:
    """A number that changes with any source of compiled code. An entry point refers to it from its closure:
    closures are part of the cache's key, while the sources of callees and constants are not."""
    here = Path(__file__).parent
    digest = hashlib.sha256(b"".join((here / name).read_bytes() for name in SOURCES))
    return int.from_bytes(digest.digest()[:6], "big")


@compiled
def sort(keys: Floats, carried: Ints) -> None:
    """Sort `keys` ascending, in place, `carried` with them: Shell's sort, which compiles in no time and does
    well for the few hundred entries that it is used for."""
    gap = 1
    while gap < len(keys) // 3:
        gap = 3 * gap + 1
    while gap > 0:
        for i in range(gap, len(keys)):
            key, other = keys[i], carried[i]
            j = i
            while j >= gap and keys[j - gap] > key:
                keys[j], carried[j] = keys[j - gap], carried[j - gap]
                j -= gap
            keys[j], carried[j] = key, other
        gap //= 3

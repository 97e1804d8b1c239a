"""The best that a prefix cache can do for a trace: infinite, shared by all, filled in order of arrival."""

from __future__ import annotations

import numpy as np

from simulations.workload.trace import Ints, Trace


def full_blocks(trace: Trace) -> tuple[Ints, Ints]:
    """(ids of the full blocks of every prompt, one request after the other; request of each).

    Full blocks are those of `Trace.block_hashes`: of the prompt without its last token.
    """
    count = len(trace)
    if len(trace.block_offsets) <= 1:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    begin = trace.block_offsets[:-1]
    full = np.minimum((trace.prompt_tokens - 1) // trace.block_tokens, np.diff(trace.block_offsets))
    owner = np.repeat(np.arange(count), full)
    depth = np.arange(len(owner)) - np.repeat(np.cumsum(full) - full, full)
    return trace.blocks[np.repeat(begin, full) + depth], owner


def seen_before(trace: Trace) -> Ints:
    """Tokens of each prompt that some earlier request's prompt begins with too, in full blocks.

    Ids are chained: whoever shares a block shares all before it, so seen blocks come first.
    """
    blocks, owner = full_blocks(trace)
    seen = np.ones(len(blocks), dtype=np.bool_)
    seen[np.unique(blocks, return_index=True)[1]] = False
    return np.bincount(owner, weights=seen, minlength=len(trace)).astype(np.int64) * trace.block_tokens


def found_beyond(trace: Trace, cached: Ints, page_size: int, first: int = 0) -> int:
    """Tokens that a run found in caches beyond `seen_before`: 0 where the bound's assumption holds exactly.

    Args:
        cached: tokens found, by request from `first` on: the better of decode worker and site.
    """
    return int(np.maximum(cached - seen_before(trace.repaged(page_size))[first:], 0).sum())

"""Checksums of KV pages, for the test mode that proves that what arrived is what was sent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from prfaas.kv.layout import KVLayout


def page_checksums(pool: npt.NDArray[np.uint8], layout: KVLayout, page_ids: Sequence[int]) -> list[int]:
    """XXH3-64 of every (layer, page), layer-major: entry `layer · len(page_ids) + i` is of `page_ids[i]`.

    Args:
        pool: uint8, shape (layout.pool_bytes,).
    """
    pages = pool.reshape(layout.num_layers, layout.num_pages, layout.page_bytes)
    return [
        xxhash.xxh3_64_intdigest(pages[layer, page].data)
        for layer in range(layout.num_layers)
        for page in page_ids
    ]

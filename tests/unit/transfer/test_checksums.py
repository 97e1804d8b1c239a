from __future__ import annotations

import numpy as np
import pytest

from prfaas.kv.layout import CacheGroup, KVLayout
from prfaas.transfer.checksums import page_checksums

LAYOUT = KVLayout((CacheGroup("full", (0, 1, 2), 2, 4),), page_size=4, dtype="float32", num_pages=5)


@pytest.mark.parametrize(("layer", "page"), [(0, 1), (1, 4), (2, 1)])
def test_one_changed_byte_changes_the_checksum_of_its_layer_and_page_alone(layer: int, page: int) -> None:
    pool = np.random.default_rng(0).integers(0, 256, LAYOUT.pool_bytes, dtype=np.uint8)
    wanted = [4, 1]
    before = page_checksums(pool, LAYOUT, wanted)
    pool[LAYOUT.descriptor_index(layer, page) * LAYOUT.page_bytes + 7] ^= 1
    after = page_checksums(pool, LAYOUT, wanted)
    changed = [index for index, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    assert changed == [layer * len(wanted) + wanted.index(page)]


def test_equal_pages_at_other_places_have_equal_checksums() -> None:
    ours, theirs = (np.zeros(LAYOUT.pool_bytes, dtype=np.uint8) for _ in range(2))
    for layer in range(LAYOUT.num_layers):
        for pool, page in ((ours, 0), (theirs, 3)):
            start = LAYOUT.descriptor_index(layer, page) * LAYOUT.page_bytes
            pool[start : start + LAYOUT.page_bytes] = layer + 1
    assert page_checksums(ours, LAYOUT, [0]) == page_checksums(theirs, LAYOUT, [3])

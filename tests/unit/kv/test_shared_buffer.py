"""Shared memory: one content through two mappings, nothing left behind."""

from __future__ import annotations

import ctypes
import gc
import os

import pytest

from prfaas.kv.shared_buffer import SharedBuffer, SharedLayerCounter


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_both_mappings_see_the_same_bytes_and_the_address_points_at_them() -> None:
    ours = SharedBuffer(8192)
    theirs = SharedBuffer.attach(os.dup(ours.fd), 8192)
    assert not ours.array.any()
    theirs.array[4096] = 7
    assert ours.array[4096] == 7
    assert ctypes.c_uint8.from_address(ours.address + 4096).value == 7
    ours.close()
    assert theirs.array[4096] == 7, "a mapping outlives the other one"
    theirs.close()


def test_a_wrong_size_is_refused() -> None:
    ours = SharedBuffer(4096)
    with pytest.raises(ValueError, match="has 4096 bytes, expected 8192"):
        SharedBuffer.attach(ours.fd, 8192)
    ours.close()


def test_closing_twice_is_harmless_and_leaves_no_descriptor() -> None:
    gc.collect()
    before = open_descriptors()
    buffer, counter = SharedBuffer(4096), SharedLayerCounter()
    view = buffer.array[:16]
    for closable in (buffer, counter, buffer, counter):
        closable.close()
    assert view.sum() == 0, "views stay readable"
    del view
    gc.collect()
    assert open_descriptors() == before


def test_the_counter_is_seen_by_the_other_side_and_stays_after_close() -> None:
    reader = SharedLayerCounter()
    writer = SharedLayerCounter.attach(os.dup(reader.fd))
    assert reader.value() == 0
    for _ in range(300):
        writer.increment()
    assert reader.value() == 300
    reader.close()
    writer.increment()
    assert reader.value() == 300
    writer.close()

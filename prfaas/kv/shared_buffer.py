"""Memory that the control process and its runner processes share.

A memfd has no name in the file system: it lives as long as somebody maps it or holds its descriptor, so
nothing is left behind however a process ends.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
from numpy.typing import NDArray

from prfaas.engine.interface import LayerCounter


class SharedBuffer:
    """`nbytes` of zeroed shared memory; create it in one process, `attach` to its `fd` in another.

    Attributes:
        fd: descriptor to hand to a child (`pass_fds`); belongs to this object.
        nbytes: size in bytes.
        array: the bytes, shape [nbytes], uint8, writable.
        address: where they lie in this process; what NIXL registers.
    """

    def __init__(self, nbytes: int, name: str = "prfaas") -> None:
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
            self._map(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> SharedBuffer:
        """Map the buffer behind an inherited descriptor, and take over the descriptor.

        Raises:
            ValueError: the descriptor's file is not `nbytes` long.
        """
        actual = os.fstat(fd).st_size
        if actual != nbytes:
            raise ValueError(f"shared buffer behind descriptor {fd} has {actual} bytes, expected {nbytes}")
        buffer = cls.__new__(cls)
        buffer._map(fd, nbytes)
        return buffer

    def _map(self, fd: int, nbytes: int) -> None:
        self.array: NDArray[np.uint8] = np.frombuffer(mmap.mmap(fd, nbytes), dtype=np.uint8)
        self.address = self.array.ctypes.data
        self.nbytes = nbytes
        self.fd = fd

    def close(self) -> None:
        """Give up descriptor and mapping. The memory goes when the last view of `array` does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.array = np.empty(0, dtype=np.uint8)
            self.address = 0


class SharedLayerCounter(LayerCounter):
    """The layer counter in shared memory: one writer (the runner), any number of readers.

    An aligned 8-byte load or store is one memory access; on x86-64 stores become visible in order, so a
    reader that sees the count also sees the KV written before it.
    """

    NBYTES = mmap.PAGESIZE

    def __init__(self, buffer: SharedBuffer | None = None) -> None:
        self._buffer = buffer or SharedBuffer(self.NBYTES, "prfaas-layers")
        self._count = self._buffer.array.data.cast("Q")

    @classmethod
    def attach(cls, fd: int) -> SharedLayerCounter:
        """The counter behind an inherited descriptor."""
        return cls(SharedBuffer.attach(fd, cls.NBYTES))

    @property
    def fd(self) -> int:
        """Descriptor to hand to a child."""
        return self._buffer.fd

    def value(self) -> int:
        return self._count[0]

    def increment(self) -> None:
        """One more layer is done; only the one writer may call this."""
        self._count[0] += 1

    def close(self) -> None:
        """Give up descriptor and mapping; `value` keeps answering the last count."""
        last = self.value()
        self._count = memoryview(bytearray(last.to_bytes(8, "little"))).cast("Q")
        self._buffer.close()

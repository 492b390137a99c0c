"""Memory that this process and its helper both see, and that is no file anywhere."""

from __future__ import annotations

import mmap
import os

STEP = 2 << 20
"""An image grows by multiples of so many bytes."""


class Image:
    """Memory shared with another process by its file descriptor. It only grows, and then lies elsewhere.

    It counts as memory of this process's control group, and against no limit of a file system such as /dev/shm.

    Args:
        fd: the descriptor that another process has given; None: make a new one.

    Raises:
        OSError: there is no such memory here.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("det_core-checkpoint", os.MFD_CLOEXEC) if fd is None else fd
        self._size = 0
        self._map: mmap.mmap | None = None

    def memory(self, size: int) -> mmap.mmap:
        """At least ``size`` bytes of it; the same object until it has to grow.

        Raises:
            OSError: there is no memory for that.
        """
        if self._map is None or size > self._size:
            wanted = -(-max(size, 1) // STEP) * STEP
            if os.fstat(self.fd).st_size < wanted:
                os.ftruncate(self.fd, wanted)
            self._map = mmap.mmap(self.fd, wanted)
            self._size = wanted
        return self._map

    def close(self) -> None:
        """Give it back; the memory itself goes when nobody has it mapped any more."""
        self._map = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

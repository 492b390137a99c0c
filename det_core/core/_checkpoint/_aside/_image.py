"""Memory that this process and its helper both see, and that is no file anywhere."""

from __future__ import annotations

import itertools
import mmap
import os

STEP = 2 << 20
"""An image grows by multiples of so many bytes."""


class Image:
    """Memory shared with another process by its file descriptor. It only grows, and then lies elsewhere.

    It counts as memory of this process's control group, and against no limit of a file system such as /dev/shm.

    Args:
        fd: the descriptor that another process has given; None: make a new one.

    Attributes:
        number: tells it from all others that this process has made.
        fd: the descriptor; None: the kernel gives none, so this process has the memory alone.
    """

    _numbers = itertools.count(1)

    def __init__(self, fd: int | None = None) -> None:
        self.number = next(self._numbers)
        self.fd = fd if fd is not None else _new()
        self._size = 0
        self._map: mmap.mmap | None = None

    def memory(self, size: int) -> mmap.mmap:
        """At least ``size`` bytes of it; the same object until it has to grow.

        Raises:
            OSError: there is no memory for that.
        """
        if self._map is None or size > self._size:
            wanted = -(-max(size, 1) // STEP) * STEP
            if self.fd is not None and os.fstat(self.fd).st_size < wanted:
                os.ftruncate(self.fd, wanted)
            self._map = mmap.mmap(-1 if self.fd is None else self.fd, wanted)
            self._size = wanted
        return self._map

    def close(self) -> None:
        """Give it back; the memory itself goes when nobody has it mapped any more."""
        self._map = None
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def _new() -> int | None:
    try:
        return os.memfd_create("det_core-checkpoint", os.MFD_CLOEXEC)
    except OSError:  # a sandbox may forbid it
        return None

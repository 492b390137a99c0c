"""Every system call the journal makes on its own files, so that a test can fail the N-th of them."""

from __future__ import annotations

import os


class Doors:
    """The calls of :mod:`os` that a journal uses; a test overrides what it wants to fail."""

    open = staticmethod(os.open)
    write = staticmethod(os.write)
    pread = staticmethod(os.pread)
    fsync = staticmethod(os.fsync)
    fstat = staticmethod(os.fstat)
    close = staticmethod(os.close)
    unlink = staticmethod(os.unlink)
    makedirs = staticmethod(os.makedirs)

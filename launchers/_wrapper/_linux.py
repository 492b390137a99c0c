"""The two Linux calls that Python does not offer."""

from __future__ import annotations

import ctypes
import os

_SET_PDEATHSIG = 1  # <linux/prctl.h>
_SET_CHILD_SUBREAPER = 36


def signal_at_parents_death(signum: int) -> None:
    """Have the kernel send ``signum`` to this process when the thread that forked it ends; 0: no signal."""
    _prctl(_SET_PDEATHSIG, signum)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that they can be found and ended."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


_LIBC = ctypes.CDLL(None, use_errno=True)

"""The Linux calls that Python does not offer."""

from __future__ import annotations

import ctypes
import os

NEW_NAMESPACE, NEW_USERS = 0x00020000, 0x10000000  # <linux/sched.h>
NO_SUID, NO_DEVICES, BIND, MOVE, RECURSIVE, DOWNSTREAM = 2, 4, 4096, 8192, 16384, 1 << 19  # <linux/mount.h>
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
_LIBC = ctypes.CDLL(None, use_errno=True)


def set_parent_death_signal(signum: int) -> None:
    """Have the kernel send ``signum`` to this process when the thread that forked it ends."""
    _check(_LIBC.prctl(_SET_PDEATHSIG, ctypes.c_ulong(signum), 0, 0, 0), "prctl")


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that it can be found and ended."""
    _check(_LIBC.prctl(_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0), "prctl")


def unshare(flags: int) -> None:
    """Leave the namespaces that ``flags`` name for new ones."""
    _check(_LIBC.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount; as mount(2)."""
    words = [os.fsencode(word) for word in (source, target, kind)]
    _check(_LIBC.mount(*words, ctypes.c_ulong(flags), options.encode()), f"mount {target}")


def _check(answer: int, call: str) -> None:
    if answer != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{call}: {os.strerror(error)}")

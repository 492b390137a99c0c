"""End of everything that a test starts: the test process adopts every orphan, and ends all that a test has left.

A process that a test starts may fork, leave its session and lose its parent; as a child subreaper (``prctl(2)``) the
test process stays its ancestor all the same. Servers that live longer than a test are named by :func:`keep`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None, use_errno=True)
_kept: dict[int, bool] = {}  # pid: whether what it starts is kept too


def adopt_orphans() -> None:
    """Make this process the one that orphans below it are given to."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_with_parent() -> None:
    """Let a new process end with the one that runs the tests, also if that is killed."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def keep(pid: int, *, children: bool = True) -> None:
    """Leave a server alone until the process ends it itself; with what it starts, or without."""
    _kept[pid] = children


@contextlib.contextmanager
def nested() -> Iterator[None]:
    """End what the block has started, at once and whatever it is."""
    before = running()
    try:
        yield
    finally:
        end_all_but(before)


def running() -> set[int]:
    """Return all that runs below this process and is not kept."""
    return _below(os.getpid(), set())


def end_all_but(before: set[int]) -> None:
    """End all that runs below this process, but for what was there before and what is kept."""
    ended: set[int] = set()
    while found := _below(os.getpid(), before):
        for pid in found - ended:  # none of them starts another one while the others are looked for
            _signal(pid, signal.SIGSTOP)
        if not found - ended:
            for pid in found:
                _signal(pid, signal.SIGKILL)
            time.sleep(0.001)
        ended |= found
    for pid in ended:  # the adopted ones; those that Popen has started it waits for itself
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _below(pid: int, before: set[int]) -> set[int]:
    """Return the descendants of a process, except zombies."""
    # Two walks: one may miss a process that is just being adopted.
    return _walk(pid, before) | _walk(pid, before)


def _walk(pid: int, before: set[int]) -> set[int]:
    found: set[int] = set()
    todo = [pid]
    while todo:
        parent = todo.pop()
        for child in children_of(parent):
            if _kept.get(child):
                continue
            todo.append(child)
            if child not in before and child not in _kept and runs(child):
                found.add(child)
    return found


def children_of(pid: int) -> list[int]:
    """Return the children of all threads of a process."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    return found


def runs(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)

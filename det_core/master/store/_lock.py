"""One master a SQLite file: a lock beside it that goes away with its holder, however that ends."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from det_core import _clock
from det_core.errors import StoreLocked

WAIT = 1.0
"""Seconds to wait for a holder that is about to end, or for a child that it was just forking."""


def taken_within(seconds: float, take: Callable[[], bool]) -> bool:
    """Try to take a lock until it is taken, or until ``seconds`` have passed; whether it is."""
    deadline = _clock.monotonic() + seconds
    while not take():
        if _clock.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class FileLock:
    """The right to use a database file.

    Raises:
        StoreLocked: another process has it; the message names host and pid.
        OSError: the folder cannot be written.
    """

    def __init__(self, database: Path) -> None:
        path = database.with_name(database.name + ".lock")
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not taken_within(WAIT, self._take):
                who = _holder(self._fd)
                raise StoreLocked(f"another master uses {database} ({who}): stop that one, or work with it")
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps({"host": os.uname().nodename, "pid": os.getpid()}).encode(), 0)
        except BaseException:
            self.release()
            raise

    def _take(self) -> bool:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return False
        return True

    def release(self) -> None:
        """Give it back. Twice is fine."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _holder(fd: int) -> str:
    try:
        who = json.loads(os.pread(fd, 4096, 0))
        return f"pid {int(who['pid'])} on {who['host']}"
    except (ValueError, LookupError, TypeError):
        return "which has not said its pid"

"""One writer a run: a lock on a file that goes away with its holder, however it dies, and says who holds it.

It is an open-file-description lock: unlike ``flock`` it can be asked about without being taken, and unlike a
POSIX record lock it is not lost when some other part of the process reads the file. It works on NFS and on
Lustre.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import struct
import time
import weakref
from pathlib import Path

from det_core import _clock
from det_core.errors import RunLocked

LOG = logging.getLogger("det_core")
ORPHAN_WAIT = 2.0
"""Seconds to wait when the holder is dead: a child it was just forking may not have let go yet."""
_FLOCK = "hhqqi4x"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class WriterLock:
    """The right to write a run. A forked child does not inherit it.

    Raises:
        RunLocked: another process has it; the message names host and pid.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if not self._take(path):
                raise RunLocked(_locked(path, run_id))
        except BaseException:
            self.release()
            raise
        holder = {"host": os.uname().nodename, "pid": os.getpid(), "time": _clock.now()}
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(holder).encode(), 0)
        _LOCKS.add(self)

    def _take(self, path: Path) -> bool:
        deadline = _clock.monotonic() + ORPHAN_WAIT
        while True:
            try:
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _region(fcntl.F_WRLCK))
                return True
            except OSError as e:
                if e.errno in _NO_LOCKS:
                    LOG.warning("%s cannot be locked (%s): a second process could write this run too", path, e.strerror)
                    return True
                if e.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            if _holder_lives(path) or _clock.monotonic() > deadline:
                return False
            time.sleep(0.01)

    def release(self) -> None:
        """Give it back. Twice is fine."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def held(path: Path) -> bool:
    """Whether some process holds the lock at ``path``; takes nothing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _region(fcntl.F_WRLCK))
        return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
    except OSError:
        return False
    finally:
        os.close(fd)


def _holder(path: Path) -> tuple[str, int] | None:
    """Host and pid, as far as the file says."""
    try:
        who = json.loads(path.read_bytes())
        return str(who["host"]), int(who["pid"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _holder_lives(path: Path) -> bool:
    """False where the holder is known to be dead."""
    who = _holder(path)
    if who is None or who[0] != os.uname().nodename:
        return True
    try:
        os.kill(who[1], 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _locked(path: Path, run_id: str) -> str:
    who = _holder(path)
    by = f"pid {who[1]} on {who[0]}" if who else "another process"
    return f"run {run_id} is being written by {by}; wait for it to end, stop it, or start a new run (without resume)"


def _region(kind: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0)


_LOCKS: weakref.WeakSet[WriterLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_LOCKS):
        lock.release()


os.register_at_fork(after_in_child=_after_fork)

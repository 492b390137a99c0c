"""Disks that fail on purpose, at a call that a test chooses, and a real one that is small."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from det_core.storage import Disk
from det_core.storage._names import STAGING_DIR
from support.hosts import skip_or_fail

T = TypeVar("T")


class FaultyDisk(Disk):
    """A door whose ``at``-th call (from 1) fails.

    Args:
        store: how messages name it.
        at: which call.
        how: ``EIO`` or ``ENOSPC``: it raises; ``short``: a write takes half of the bytes and raises at the next one;
            ``dead``: it and all after it raise; ``exit``: the process ends without a word.
    """

    def __init__(self, store: str, at: int = 0, how: str = "EIO") -> None:
        super().__init__(store)
        self.at = at
        self.how = how
        self.calls = 0
        self.struck = ""
        """The operation that failed."""
        self._lock = threading.Lock()

    def do(self, operation: str, path: str, function: Callable[..., T], *args: Any) -> T:
        with self._lock:
            self.calls += 1
            number = self.calls
        if number != self.at and not (number > self.at > 0 and self.how == "dead"):
            return super().do(operation, path, function, *args)
        if self.how == "exit":
            os._exit(77)
        self.struck = self.struck or operation
        if self.how == "short" and function is os.pwrite:
            fd, view, offset = args
            self.at, self.how = number + 1, "ENOSPC"
            return super().do(operation, path, function, fd, view[: len(view) // 2], offset)
        return super().do(operation, path, self._refuse, operation, function, *args)

    def _refuse(self, operation: str, function: Callable[..., Any], *args: Any) -> Any:
        if operation == "close":
            function(*args)  # a close that fails has closed all the same
        code = errno.ENOSPC if self.how in ("ENOSPC", "short") else errno.EIO
        raise OSError(code, os.strerror(code))


class Gate(Disk):
    """A disk on which one operation waits until it is let through.

    Args:
        operation: which, as messages name it, such as ``sync``.
        shut: whether it begins shut.
    """

    def __init__(self, operation: str = "sync", *, shut: bool = True) -> None:
        super().__init__("behind a gate")
        self.operation = operation
        self.opened_up = threading.Event()
        self.reached = threading.Event()
        if not shut:
            self.opened_up.set()

    def do(self, operation: str, path: str, function: Callable[..., T], *args: Any) -> T:
        if operation == self.operation and f"/{STAGING_DIR}/" in path and "/part-" not in path:
            self.reached.set()
            assert self.opened_up.wait(), "the gate was never opened"
        return super().do(operation, path, function, *args)


class Counting(Disk):
    """Disk that records operations by path, and fails one of them.

    Args:
        fail: which one, from 0; None: none.
    """

    def __init__(self, fail: int | None = None) -> None:
        super().__init__("store")
        self.done: list[tuple[str, str]] = []
        self.fail = fail

    def do(self, operation: str, path: str, function: Any, *args: Any) -> Any:
        self.done.append((operation, path))
        if len(self.done) - 1 == self.fail:
            if operation == "close":
                function(*args)
            raise self.error(operation, path, OSError(5, "Input/output error"))
        return super().do(operation, path, function, *args)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system of its own in ``folder``, which is created, during the block.

    Args:
        folder: where.
        size: as ``mount`` takes it: ``256k``.
    """
    if os.geteuid() != 0:
        skip_or_fail("file systems can only be mounted by root")
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        skip_or_fail(f"a file system cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Take all the room that a small disk has left; returns the file that holds it."""
    path = folder / "filler"
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    assert os.statvfs(folder).f_bfree == 0
    return path

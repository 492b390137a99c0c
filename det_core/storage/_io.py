"""The one door between a directory store and the file system."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from det_core.errors import StorageError

T = TypeVar("T")
OPEN = 64
"""Files that are open at a time to be synced."""
SYNC_FILE_RANGE_WRITE = 2
"""<linux/fs.h>; Python has no name for it."""


class Opened:
    """A file descriptor that a ``with`` closes. Many are opened for each checkpoint, so this is no generator.

    Args:
        disk: the door.
        path: what is open.
        fd: the descriptor.
    """

    __slots__ = ("_disk", "_fd", "_path")

    def __init__(self, disk: Disk, path: str, fd: int) -> None:
        self._disk, self._path, self._fd = disk, path, fd

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._disk.do("close", self._path, os.close, self._fd)
        else:
            os.close(self._fd)


class Disk:
    """Every system call of a store, so that errors are named in one place and a test can fail any one of them.

    Args:
        store: how messages name the store.
    """

    def __init__(self, store: str) -> None:
        self.store = store

    def do(self, operation: str, path: str, function: Callable[..., T], *args: object) -> T:
        """Return ``function(*args)``.

        Raises:
            StorageError: it raised OSError; the message names store, path and operation, ``errno`` is kept.
        """
        try:
            return function(*args)
        except OSError as e:
            raise self.error(operation, path, e) from e

    def error(self, operation: str, path: str, cause: OSError) -> StorageError:
        """The StorageError that names what was refused."""
        text = f"checkpoint store {self.store}: cannot {operation} {path}: {cause.strerror or cause}"
        return StorageError(cause.errno, text)

    # The few compounds that everything else is made of.

    def opened(self, path: str, flags: int, mode: int = 0o666) -> Opened:
        """An open file descriptor, closed at the end of a ``with`` whatever happens."""
        return Opened(self, path, self.do("open", path, os.open, path, flags | os.O_CLOEXEC, mode))

    def write_all(self, fd: int, path: str, data: memoryview | bytes, offset: int = 0) -> None:
        """Write all of ``data`` at ``offset``, however many calls it takes."""
        view = memoryview(data)
        while view:
            n = self.do("write", path, os.pwrite, fd, view, offset)
            view, offset = view[n:], offset + n

    def read_file(self, path: str) -> bytes:
        """The content of a small file."""
        parts = []
        with self.opened(path, os.O_RDONLY) as fd:
            while part := self.do("read", path, os.read, fd, 1 << 20):
                parts.append(part)
        return b"".join(parts)

    def create(self, path: str) -> int:
        """An open file that did not exist."""
        return self.do("open", path, os.open, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write_file(self, path: str, data: bytes, *, sync: bool = True) -> None:
        """Write a small file, and sync it; it must not exist."""
        with self.opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
            self.write_all(fd, path, data)
            if sync:
                self.do("sync", path, os.fsync, fd)

    def replace_file(self, path: str, data: bytes) -> None:
        """Put a small file in place of one that may exist, in one step; its folder is synced."""
        aside = f"{path}.new"
        self.remove_file(aside)
        self.write_file(aside, data)
        self.do("rename", path, os.rename, aside, path)
        self.sync_folder(os.path.dirname(path))

    def sync_all(self, files: Sequence[str], folders: Sequence[str]) -> None:
        """Make files and folders durable: many files are on their way to the disk before the first is waited for."""
        for begin in range(0, len(files), OPEN):
            self._sync_together(files[begin : begin + OPEN])
        for folder in folders:
            self.sync_folder(folder)

    def _sync_together(self, paths: Sequence[str]) -> None:
        descriptors: list[int] = []
        try:
            for path in paths:
                descriptors.append(self.do("open", path, os.open, path, os.O_RDONLY | os.O_CLOEXEC))
                start_writing(descriptors[-1])
            for path, fd in zip(paths, descriptors, strict=True):
                self.do("sync", path, os.fsync, fd)
        finally:
            for fd in descriptors:
                os.close(fd)

    def sync_folder(self, path: str) -> None:
        """Make a folder's entries durable."""
        with self.opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            self.do("sync", path, os.fsync, fd)

    def make_folders(self, path: str) -> None:
        """Make a folder and those above it that are missing."""
        self.do("make folder", path, _make_folders, path)

    def make_durable_folder(self, path: str) -> None:
        """Make a folder and those above it, each an entry that is on disk; nothing if it is there."""
        if not self.is_folder(os.path.realpath(path)):
            above = os.path.dirname(path)
            self.make_durable_folder(above)
            self.make_folders(path)
            self.sync_folder(above)

    def entries(self, path: str) -> list[os.DirEntry[str]]:
        """What lies in a folder, sorted by name."""
        return self.do("list", path, lambda: sorted(os.scandir(path), key=lambda e: e.name))

    def exists(self, path: str) -> bool:
        """Whether anything (a dangling link, too) is there."""
        return self._lstat(path) is not None

    def is_folder(self, path: str) -> bool:
        """Whether a folder is there; a link to one is none."""
        found = self._lstat(path)
        return found is not None and stat.S_ISDIR(found.st_mode)

    def modified(self, path: str) -> float | None:
        """When a file was changed last, in seconds since the epoch; None: it is gone."""
        found = self._lstat(path)
        return None if found is None else found.st_mtime

    def _lstat(self, path: str) -> os.stat_result | None:
        return self.do("look at", path, _lstat, path)

    def remove_file(self, path: str) -> None:
        """Remove a file or a link; one that is gone is no error."""
        try:
            self.do("remove", path, os.unlink, path)
        except StorageError as e:
            if e.errno != errno.ENOENT:
                raise

    def remove_tree(self, path: str) -> None:
        """Remove a folder and all in it, following no link; what another process removes meanwhile is no error.

        A network file system may show a file that is removed while someone has it open under another name for a
        while, so a folder that is not empty is tried again.
        """
        for pause in (0.01, 0.05, 0.2, 1.0, None):
            try:
                self._empty(path)
                return self.do("remove folder", path, os.rmdir, path)
            except StorageError as e:
                if e.errno == errno.ENOENT:
                    return
                if e.errno != errno.ENOTEMPTY or pause is None:
                    raise
                time.sleep(pause)

    def _empty(self, path: str) -> None:
        for entry in self.entries(path):
            if entry.is_dir(follow_symlinks=False):
                self.remove_tree(entry.path)
            else:
                self.remove_file(entry.path)


def _make_folders(path: str) -> None:
    try:
        os.mkdir(path)  # mostly it is the one that is missing
    except OSError:
        if not os.path.isdir(path):
            os.makedirs(path, exist_ok=True)


def _lstat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def start_writing(fd: int, offset: int = 0, size: int = 0) -> None:
    """Have the kernel write a part of a file (size 0: all that follows) out now, so that a sync has less to wait for.

    It is advice: where it is not understood the sync does all the work, and an error of the disk is told there.
    """
    if (function := _sync_file_range()) is not None:
        function(fd, offset, size, SYNC_FILE_RANGE_WRITE)


def leave_memory(fd: int) -> None:
    """Have the kernel give back the memory in which it keeps a file that is on the disk.

    A checkpoint is seldom read soon, and does not push what training reads, its dataset, out of memory then; the memory
    serves for the next one. It is advice, too.
    """
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    import ctypes

    try:
        function = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function

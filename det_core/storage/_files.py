"""The local file system, through few enough calls that each error has a context and a test can fail each of them."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from det_core.errors import StorageError

T = TypeVar("T")


class Disk:
    """Every system call of a store passes through :meth:`do`. Stateless and thread-safe.

    Args:
        store: name of the store in messages.
    """

    def __init__(self, store: str) -> None:
        self.store = store

    def do(self, operation: str, path: str, function: Callable[..., T], *args: object) -> T:
        """Return ``function(*args)``.

        Raises:
            StorageError: If it raised OSError; the message has store, path and operation, ``errno`` is kept.
        """
        try:
            return function(*args)
        except OSError as e:
            raise self.error(operation, path, e) from e

    def error(self, operation: str, path: str, cause: OSError) -> StorageError:
        """Return the StorageError for an operation that failed."""
        text = f"checkpoint store {self.store}: cannot {operation} {path}: {cause.strerror or cause}"
        return StorageError(cause.errno, text)

    # Files.

    @contextmanager
    def open_fd(self, path: str, flags: int, mode: int = 0o666) -> Iterator[int]:
        """Yield a file descriptor, and close it at the end of the block."""
        fd = self.do("open", path, os.open, path, flags | os.O_CLOEXEC, mode)
        try:
            yield fd
        except BaseException:
            os.close(fd)
            raise
        self.do("close", path, os.close, fd)  # NFS reports a failed write here

    def write_all(self, fd: int, path: str, data: memoryview | bytes, offset: int = 0) -> None:
        """Write all of ``data`` at ``offset``, in as many calls as it takes."""
        view = memoryview(data)
        while view:
            written = self.do("write", path, os.pwrite, fd, view, offset)
            view = view[written:]
            offset += written

    def write_file(self, path: str, data: bytes, *, sync: bool = True, mode: int = 0o666) -> None:
        """Create a small file, and sync it."""
        with self.open_fd(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as fd:
            self.write_all(fd, path, data)
            if sync:
                self.do("sync", path, os.fsync, fd)

    def remove_file(self, path: str) -> None:
        """Remove a file or a link; a missing one is not an error."""
        try:
            self.do("remove", path, os.unlink, path)
        except StorageError as e:
            if e.errno != errno.ENOENT:
                raise

    def make_read_only(self, path: str, fd: int, mode: int) -> None:
        """Remove the write permissions of an open file, if its file system and its owner allow it.

        They guard against a script that writes into a stored checkpoint by mistake.
        """
        if mode & 0o222:
            try:
                self.do("set the permissions of", path, os.fchmod, fd, mode & 0o555)
            except StorageError as e:
                # Another user's file, or a file system without permissions: the checkpoint is as good without.
                if e.errno not in (errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise

    # Folders.

    def sync_folder(self, path: str) -> None:
        """Make the entries of a directory durable."""
        with self.open_fd(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            self.do("sync", path, os.fsync, fd)

    def make_folders(self, path: str, below: Iterable[str] = ()) -> None:
        """Create a directory and its missing parents, and directories ``below`` it, whose names may end in a slash."""
        for folder in (path, *(f"{path}/{name.rstrip('/')}" for name in sorted(below))):
            self.do("make folder", folder, _make_folders, folder)

    def make_durable_folder(self, path: str) -> None:
        """Create a directory and its missing parents, and sync each new entry."""
        if not self.is_folder(os.path.realpath(path)):
            above = os.path.dirname(path)
            self.make_durable_folder(above)
            self.make_folders(path)
            self.sync_folder(above)

    def entries(self, path: str) -> list[os.DirEntry[str]]:
        """Return the entries of a directory, sorted by name."""
        return self.do("list", path, lambda: sorted(os.scandir(path), key=lambda e: e.name))

    def remove_tree(self, path: str) -> None:
        """Remove a directory and its content, without following links. Several processes may remove it at once."""
        # NFS renames a file that is removed while it is open: for a while its directory is not empty.
        for pause in (0.01, 0.05, 0.2, 1.0, None):
            try:
                return self._remove_tree(path)
            except StorageError as e:
                if e.errno != errno.ENOTEMPTY or pause is None:
                    raise
                time.sleep(pause)

    def _remove_tree(self, path: str) -> None:
        left = [path]  # not recursive: Python's stack ends at some 500 nested directories
        emptied = []
        while left:
            folder = left.pop()
            try:
                entries = self.entries(folder)
            except StorageError as e:
                if e.errno != errno.ENOENT:
                    raise
                continue
            emptied.append(folder)
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)
                else:
                    self.remove_file(entry.path)
        for folder in reversed(emptied):
            try:
                self.do("remove folder", folder, os.rmdir, folder)
            except StorageError as e:
                if e.errno != errno.ENOENT:
                    raise

    # What is there.

    def exists(self, path: str) -> bool:
        """Return whether the path exists; a dangling link does."""
        return self.status(path) is not None

    def is_folder(self, path: str) -> bool:
        """Return whether the path is a directory; a link to one is not."""
        found = self.status(path)
        return found is not None and stat.S_ISDIR(found.st_mode)

    def status(self, path: str) -> os.stat_result | None:
        """Return the result of ``lstat``, or None if the path does not exist."""
        return self.do("look at", path, _lstat, path)


def _make_folders(path: str) -> None:
    try:
        os.mkdir(path)  # usually only the last one is missing, and makedirs() would look at all
    except OSError:
        if not os.path.isdir(path):
            os.makedirs(path, exist_ok=True)


def _lstat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def directory_advice(root: str) -> str:
    """Return the remedy for a directory that cannot be a store."""
    above = root
    while not os.path.lexists(above) and above != "/":
        above = os.path.dirname(above)
    if not os.path.isdir(above):
        return f"{above} is not a directory; pass another one as checkpoint_storage"
    return f"let this process (user {os.geteuid()}) write to {above}, or pass another directory as checkpoint_storage"

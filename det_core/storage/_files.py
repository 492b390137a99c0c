"""The file system of this machine, by few enough calls that each error is named and a test can fail any of them."""

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
    """Every system call of a store goes through :meth:`do`. Stateless, so any thread may use it.

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

    # Files.

    @contextmanager
    def open_fd(self, path: str, flags: int, mode: int = 0o666) -> Iterator[int]:
        """An open file descriptor, closed at the end of a ``with`` whatever happens."""
        fd = self.do("open", path, os.open, path, flags | os.O_CLOEXEC, mode)
        try:
            yield fd
        except BaseException:
            os.close(fd)
            raise
        self.do("close", path, os.close, fd)

    def write_all(self, fd: int, path: str, data: memoryview | bytes, offset: int = 0) -> None:
        """Write all of ``data`` at ``offset``, however many calls it takes."""
        view = memoryview(data)
        while view:
            n = self.do("write", path, os.pwrite, fd, view, offset)
            view, offset = view[n:], offset + n

    def write_file(self, path: str, data: bytes, *, sync: bool = True, mode: int = 0o666) -> None:
        """Write a small file, and sync it; it must not exist."""
        with self.open_fd(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as fd:
            self.write_all(fd, path, data)
            if sync:
                self.do("sync", path, os.fsync, fd)

    def remove_file(self, path: str) -> None:
        """Remove a file or a link; one that is gone is no error."""
        try:
            self.do("remove", path, os.unlink, path)
        except StorageError as e:
            if e.errno != errno.ENOENT:
                raise

    def make_read_only(self, path: str, fd: int, mode: int) -> None:
        """Take the write permissions from an open file.

        It guards against a script that writes into a stored checkpoint by mistake. Where the file is somebody else's,
        or the file system has no permissions, the checkpoint is as good without.
        """
        if mode & 0o222:
            try:
                self.do("set the permissions of", path, os.fchmod, fd, mode & 0o555)
            except StorageError as e:
                if e.errno not in (errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise

    # Folders.

    def sync_folder(self, path: str) -> None:
        """Make a folder's entries durable."""
        with self.open_fd(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            self.do("sync", path, os.fsync, fd)

    def make_folders(self, path: str, below: Iterable[str] = ()) -> None:
        """Make a folder, those above it that are missing, and folders ``below`` it, whose names may end in a slash."""
        for folder in (path, *(f"{path}/{name.rstrip('/')}" for name in sorted(below))):
            self.do("make folder", folder, _make_folders, folder)

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

    def remove_tree(self, path: str) -> None:
        """Remove a folder and all in it, following no link; what another process removes meanwhile is no error.

        A network file system may show a file that is removed while someone has it open under another name for a
        while, so a folder that is not empty is tried again.
        """
        for pause in (0.01, 0.05, 0.2, 1.0, None):
            try:
                return self._remove_tree(path)
            except StorageError as e:
                if e.errno != errno.ENOTEMPTY or pause is None:
                    raise
                time.sleep(pause)

    def _remove_tree(self, path: str) -> None:
        left = [path]  # a stack of ours: Python's own ends at some 500 folders in one another
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
        """Whether anything (a dangling link, too) is there."""
        return self.status(path) is not None

    def is_folder(self, path: str) -> bool:
        """Whether a folder is there; a link to one is none."""
        found = self.status(path)
        return found is not None and stat.S_ISDIR(found.st_mode)

    def status(self, path: str) -> os.stat_result | None:
        """What ``lstat`` says; None: nothing is there."""
        return self.do("look at", path, _lstat, path)


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


def directory_advice(root: str) -> str:
    """What to do about a directory that cannot be a store: the part of the message that errno's text does not have."""
    above = root
    while not os.path.lexists(above) and above != "/":
        above = os.path.dirname(above)
    if not os.path.isdir(above):
        return f"{above} is no directory; name another one as checkpoint_storage"
    return f"let this process (user {os.geteuid()}) write into {above}, or name another directory as checkpoint_storage"

"""Whether a directory can be a checkpoint store, tried before training starts."""

from __future__ import annotations

import contextlib
import errno
import os

from det_core.errors import StorageError
from det_core.storage._io import Disk

PROBE = "probe."
"""How the name of what is written begins."""
_TEXT = b"det_core writes this to see whether it can, and removes it\n"


def probe(disk: Disk, folder: str) -> None:
    """Write a file into a folder, read it back, list it and remove it."""
    name = f"{PROBE}{os.urandom(8).hex()}"
    path = f"{folder}/{name}"
    try:
        disk.write_file(path, _TEXT)
        if disk.read_file(path) != _TEXT:
            raise disk.error("read back", path, OSError(errno.EIO, "other bytes came back than were written"))
        if name not in {entry.name for entry in disk.entries(folder)}:
            raise disk.error("list", path, OSError(errno.EIO, "a file that was just written is not in its folder"))
    except BaseException:
        with contextlib.suppress(StorageError):  # what is under way says more
            disk.remove_file(path)
        raise
    disk.remove_file(path)


def explained(disk: Disk, root: str, error: StorageError) -> StorageError:
    """``error`` of a probe, as one line that says what to do."""
    return StorageError(error.errno, f"{error.args[-1]}: {_advice(root, error.errno)}")


def _advice(root: str, number: int | None) -> str:
    above = root
    while not os.path.lexists(above) and above != "/":
        above = os.path.dirname(above)
    if not os.path.isdir(above):
        return f"{above} is no directory; name another one as checkpoint_storage"
    if number in (errno.EACCES, errno.EPERM):
        return f"this process (user {os.geteuid()}) may not write below {above}; give it permission, or name another"
    if number == errno.EROFS:
        return f"{above} is mounted read-only; mount it for writing, or name another directory as checkpoint_storage"
    if number in (errno.ENOSPC, errno.EDQUOT):
        return f"{_left(above)}; free some, or name another directory as checkpoint_storage"
    return "name a directory that can be written to as checkpoint_storage, or repair this one"


def _left(folder: str) -> str:
    try:
        found = os.statvfs(folder)
    except OSError:
        return f"there is no room left in {folder}"
    return f"there is no room left in {folder} ({found.f_bavail * found.f_frsize >> 20} MiB, {found.f_favail} files)"

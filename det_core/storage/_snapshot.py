"""A user's files in a staging folder at once: cloned by the file system, else copied, or given up by their owner."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from det_core.errors import StorageError
from det_core.storage._copy import Copier, Job
from det_core.storage._io import Disk
from det_core.storage._scan import Listing

log = logging.getLogger("det_core.storage")
FICLONE = 0x40049409
"""<linux/fs.h>; Python has no name for it before 3.12."""
REAL = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ENOENT)
"""What is wrong with the disk or the file; any other number says that it cannot be done this way."""


def copy_in(disk: Disk, listing: Listing, folder: str) -> None:
    """Put copies of a foreign folder's files into ``folder``, of which nobody else has a hand on the bytes.

    Where the file system can share the blocks of a file until one of the two is written to, no byte is copied.
    """
    _make(disk, listing, folder)
    jobs = _jobs(listing, folder)
    if not jobs or not _clone(disk, jobs[0]):
        return _copy(disk, jobs)
    _copy(disk, [job for job in jobs[1:] if not _clone(disk, job)])


def link_in(disk: Disk, listing: Listing, folder: str) -> None:
    """Give a foreign folder's files a second name in ``folder``; what cannot have one, or has more, is copied."""
    _make(disk, listing, folder)
    jobs = _jobs(listing, folder)
    _copy(
        disk, [job for job in jobs if listing.files[job.name].shared or not _link(disk, job.source, job.target or "")]
    )


def take_away(disk: Disk, listing: Listing) -> None:
    """Remove the names under which a folder's files were found, but for those in folders that are links."""
    linked = tuple(f"{link}/" for link in listing.links)
    for name, source in listing.files.items():
        if not name.startswith(linked):
            disk.remove_file(source.path)


def give_back(disk: Disk, listing: Listing, local: Callable[[str], Path | None]) -> None:
    """Undo :meth:`take_away`, where the name is still free.

    Args:
        disk: the door.
        listing: what was found in the folder.
        local: where a file lies now.
    """
    for name, source in listing.files.items():
        now = local(name)
        if now is None or disk.exists(source.path):
            continue
        disk.make_folders(os.path.dirname(source.path))
        if not _link(disk, str(now), source.path):
            _copy(disk, [Job(name, str(now), source.size, source.path)])


def _make(disk: Disk, listing: Listing, folder: str) -> None:
    for directory in listing.directories:
        disk.make_folders(f"{folder}/{directory.rstrip('/')}")


def _jobs(listing: Listing, folder: str) -> list[Job]:
    return [Job(name, source.path, source.size, f"{folder}/{name}") for name, source in listing.files.items()]


def _copy(disk: Disk, jobs: Iterable[Job]) -> None:
    Copier(disk, "the folder").run([*jobs])


def _link(disk: Disk, source: str, target: str) -> bool:
    try:
        disk.do("link", target, os.link, source, target)
    except StorageError as e:
        if e.errno in REAL:
            raise
        return False
    return True


def _clone(disk: Disk, job: Job) -> bool:
    """Whether ``job.target`` came to share the blocks of the source; if not, it is not there."""
    assert job.target is not None
    with disk.opened(job.source, os.O_RDONLY) as source:
        mode = disk.do("look at", job.source, os.fstat, source).st_mode & 0o777 | 0o200
        try:
            with disk.opened(job.target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as target:
                disk.do("clone", job.target, clone, target, source)
            return True
        except StorageError as e:
            disk.remove_file(job.target)
            if e.errno in REAL:
                raise
    return False


def clone(target: int, source: int) -> None:
    """Have an open, empty file share the blocks of another one.

    Raises:
        OSError: the file system cannot.
    """
    import fcntl

    fcntl.ioctl(target, FICLONE, source)

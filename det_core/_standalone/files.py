"""Files that a reader finds complete: the old content or the new one, never a part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

STAGING_SUFFIX = ".part"
"""End of the name under which a file is written before it replaces the one that readers see."""


def write_atomic(path: str | os.PathLike[str], data: bytes, *, durable: bool = True, mode: int = 0o666) -> None:
    """Replace the content of a file in one step.

    Args:
        path: the file.
        data: the new content.
        durable: whether the content and the directory's entry must be on disk on return. Without that, a power
            failure may leave the name without the content.
        mode: permissions of the file, less the umask.

    Raises:
        OSError: If the file cannot be written; it then has its old content.
    """
    with replacing(path, durable=durable) as staging:
        fd = os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
        finally:
            os.close(fd)


@contextmanager
def replacing(path: str | os.PathLike[str], *, durable: bool = True) -> Iterator[str]:
    """Yield the path of a file to write; at the end of the block it replaces ``path`` in one step.

    If the block raises, the file is removed and ``path`` stays as it was. Any number of processes and threads may
    replace one file at a time: the last to finish wins.

    Args:
        path: the file to replace.
        durable: as for :func:`write_atomic`.

    Raises:
        OSError: If the file cannot be replaced.
    """
    directory, name = os.path.split(os.path.abspath(path))
    # Not the process ID: two containers that share the directory have processes of the same ID.
    staging = os.path.join(directory, f".{name}.{os.urandom(6).hex()}{STAGING_SUFFIX}")
    try:
        yield staging
        if durable:
            _sync(staging, os.O_RDONLY)
        os.replace(staging, path)
    except BaseException:
        with suppress(OSError):  # the first error says more
            os.unlink(staging)
        raise
    if durable:
        sync_folder(directory)


def sync_folder(path: str) -> None:
    """Write the entries of a directory to the disk: a rename is durable only after that."""
    _sync(path, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: str, flags: int) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

"""Files that a reader finds whole or not at all."""

from __future__ import annotations

import os


def write_whole(path: str, data: bytes, *, durable: bool = True) -> None:
    """Replace the content of a file in one step.

    Args:
        path: the file. The content is first written beside it, as ``path`` with ``.new`` at its end.
        data: the content.
        durable: whether it has to be on the disk when this returns, and with it the folder's entry. Without that a
            power failure may leave the name without the content.

    Raises:
        OSError: it could not be written; what was there before is still there.
    """
    fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(f"{path}.new", path)
    if durable:
        sync_folder(os.path.dirname(path) or ".")


def sync_folder(path: str) -> None:
    """Bring the entries of a folder to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

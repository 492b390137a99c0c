"""Files written from memory in one pass."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable

from det_core.storage._io import Disk, start_writing
from det_core.storage._manifest import CHUNK, FileEntry

PIECE = 1 << 20
"""Bytes that are hashed and written at a time."""


def write_memory(disk: Disk, path: str, parts: Iterable[memoryview | bytes]) -> Generator[int, None, FileEntry]:
    """Write a new file, which must not exist; its folder is made if need be. See :func:`write_parts`."""
    disk.make_folders(os.path.dirname(path))
    with disk.opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
        return (yield from write_parts(disk, fd, path, parts))


def write_parts(disk: Disk, fd: int, path: str, parts: Iterable[memoryview | bytes]) -> Generator[int, None, FileEntry]:
    """Write an empty file from ``parts``, one after the other. It is not synced.

    Args:
        disk: the door.
        fd: the file.
        path: where it is, for messages.
        parts: its bytes.

    Yields:
        the number of bytes written since it did before, so that others can have their turn.

    Returns:
        what the manifest says of the file.

    Raises:
        StorageError: the disk refused.
    """
    from xxhash import xxh3_128

    digests, digest, offset, begun = [], xxh3_128(), 0, 0
    for piece in _cut(parts):
        digest.update(piece)
        disk.write_all(fd, path, piece, offset)
        offset += len(piece)
        if offset % CHUNK == 0:
            digests.append(digest.hexdigest())
            digest = xxh3_128()
            start_writing(fd, begun, offset - begun)
            begun = offset
        yield len(piece)
    if offset % CHUNK:
        digests.append(digest.hexdigest())
    return FileEntry(offset, tuple(digests))


def _cut(parts: Iterable[memoryview | bytes]) -> Iterable[memoryview]:
    """Pieces of which none goes beyond the end of a chunk."""
    offset = 0
    for part in parts:
        view = memoryview(part)
        while view:
            size = min(PIECE, CHUNK - offset % CHUNK, len(view))
            yield view[:size]
            view = view[size:]
            offset += size

"""What background saves by the process beside the script, and ``upload(consume=True)``, need of a directory store.

Both end when ``det_core/core/_checkpoint`` saves in a thread of its own; this module ends with them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

from det_core.errors import StorageError
from det_core.storage._copy import REAL, Copier, Job, entry_of
from det_core.storage._directory import DirectoryStore, list_checkpoint
from det_core.storage._files import Disk
from det_core.storage._manifest import CHUNK, FileEntry, Header, Manifest, encode_metadata
from det_core.storage._names import ASIDE, INNER, MANIFEST, METADATA, check_storage_id, folders_of
from det_core.storage._owner import Owner
from det_core.storage._scan import Listing

PIECE = 1 << 20
"""Bytes that are hashed and written at a time."""


def is_shared(store: DirectoryStore) -> bool:
    """Whether another process that opens the same directory has the same store."""
    return type(store) is DirectoryStore and type(store.disk) is Disk


def draft(store: DirectoryStore, storage_id: str, owner: Owner, name: str, metadata: Mapping[str, Any]) -> Draft:
    """Lay out a checkpoint of one file, ``name``, that this process will write."""
    tree = f"{store.root}/{ASIDE}/{check_storage_id(storage_id)}.{owner.tag}"
    store.make_aside_folder(tree, owner)
    try:
        return Draft(store.disk, tree, f"{store.root}/{storage_id}", name, metadata)
    except BaseException:
        store.disk.remove_tree(tree)
        raise


def settle(store: DirectoryStore, storage_id: str, owner: Owner) -> Manifest | None:
    """Find out what became of a checkpoint whose writer is gone: what it holds, or None, and then nothing is left."""
    manifest = store._manifest(check_storage_id(storage_id))
    if manifest is not None:
        store.disk.sync_folder(store.root)
    store.disk.remove_tree(f"{store.root}/{ASIDE}/{storage_id}.{owner.tag}")
    return manifest


class Draft:
    """A staging folder with all that can be in it before the state is there.

    That is metadata.json, and the file and the manifest, empty; they and their folders are open.

    Args:
        disk: the file system.
        tree: the folder, which is there and empty.
        final: what it is to become.
        name: the file's path in the checkpoint.
        metadata: what goes into metadata.json.

    Raises:
        StorageError: the disk refused; nothing is open then.
    """

    def __init__(self, disk: Disk, tree: str, final: str, name: str, metadata: Mapping[str, Any]) -> None:
        self._disk, self._tree, self._final, self._name = disk, tree, final, name
        self._open: dict[str, int] = {}
        self._directories = tuple(sorted(folders_of([name])))
        self._folders: dict[str, int] = {}
        try:
            self._metadata = self._lay_out(encode_metadata(metadata))
        except BaseException:
            self._close()
            raise

    def _lay_out(self, metadata: bytes) -> FileEntry:
        disk, tree = self._disk, self._tree
        for folder in (*self._directories, INNER):
            disk.make_folders(f"{tree}/{folder}".rstrip("/"))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        for name in (self._name, METADATA, MANIFEST):
            self._open[name] = disk.do("open", f"{tree}/{name}", os.open, f"{tree}/{name}", flags, 0o444)
        disk.write_all(self._open[METADATA], f"{tree}/{METADATA}", metadata)
        for folder in (*self._directories, INNER, ""):
            path = f"{tree}/{folder}".rstrip("/")
            self._folders[path] = disk.do("open", path, os.open, path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return entry_of(metadata)

    def write(self, parts: Iterable[memoryview | bytes]) -> Generator[int, None, FileEntry]:
        """Write the file; see :func:`write_parts`."""
        return write_parts(self._disk, self._open[self._name], f"{self._tree}/{self._name}", parts)

    def commit(self, entry: FileEntry, header: Header) -> Manifest:
        """Write the manifest, make files and folders durable, and list the checkpoint.

        Raises:
            StorageError: the disk refused; the checkpoint is not listed.
        """
        manifest = Manifest({self._name: entry, METADATA: self._metadata}, self._directories, header)
        self._disk.write_all(self._open[MANIFEST], f"{self._tree}/{MANIFEST}", manifest.encode())
        for name, fd in self._open.items():
            self._disk.do("sync", f"{self._tree}/{name}", os.fsync, fd)
        while self._open:
            name, fd = self._open.popitem()
            with contextlib.suppress(OSError):  # seldom read soon: the memory is for what training reads
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            self._disk.do("close", f"{self._tree}/{name}", os.close, fd)
        for path, fd in self._folders.items():
            self._disk.do("sync", path, os.fsync, fd)
        self._close()
        list_checkpoint(self._disk, self._tree, self._final)
        return manifest

    def abort(self) -> None:
        """Remove what there is of it, unless it is listed."""
        self._close()
        self._disk.remove_tree(self._tree)

    def _close(self) -> None:
        for files in (self._open, self._folders):
            while files:
                os.close(files.popitem()[1])


def write_memory(disk: Disk, path: str, parts: Iterable[memoryview | bytes]) -> Generator[int, None, FileEntry]:
    """Write a new file, which must not exist; its folder is made if need be. See :func:`write_parts`."""
    disk.make_folders(os.path.dirname(path))
    with disk.opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
        return (yield from write_parts(disk, fd, path, parts))


def write_parts(disk: Disk, fd: int, path: str, parts: Iterable[memoryview | bytes]) -> Generator[int, None, FileEntry]:
    """Write an empty file from ``parts``, one after the other; yields the bytes written since it did before.

    Returns:
        what the manifest says of the file.
    """
    from xxhash import xxh3_128

    digests, digest, offset = [], xxh3_128(), 0
    for part in parts:
        view = memoryview(part)
        while view:
            piece = view[: min(PIECE, CHUNK - offset % CHUNK)]
            digest.update(piece)
            disk.write_all(fd, path, piece, offset)
            offset += len(piece)
            view = view[len(piece) :]
            if offset % CHUNK == 0:
                digests.append(digest.hexdigest())
                digest = xxh3_128()
            yield len(piece)
    if offset % CHUNK:
        digests.append(digest.hexdigest())
    return FileEntry(offset, tuple(digests))


def link_in(disk: Disk, listing: Listing, folder: str) -> None:
    """Give a foreign folder's files a second name in ``folder``; what cannot have one, or has more, is copied."""
    for directory in listing.directories:
        disk.make_folders(f"{folder}/{directory.rstrip('/')}")
    jobs = [Job(name, source.path, source.size, f"{folder}/{name}") for name, source in listing.files.items()]
    copied = [job for job in jobs if listing.files[job.name].shared or not _link(disk, job.source, job.target or "")]
    Copier(disk, "the folder").run(copied)


def take_away(disk: Disk, listing: Listing) -> None:
    """Remove the names under which a folder's files were found, but for those in folders that are links."""
    linked = tuple(f"{link}/" for link in listing.links)
    for name, source in listing.files.items():
        if not name.startswith(linked):
            disk.remove_file(source.path)


def give_back(disk: Disk, listing: Listing, local: Callable[[str], Path | None]) -> None:
    """Undo :meth:`take_away`, where the name is still free; ``local`` says where a file lies now."""
    for name, source in listing.files.items():
        now = local(name)
        if now is None or disk.exists(source.path):
            continue
        disk.make_folders(os.path.dirname(source.path))
        if not _link(disk, str(now), source.path):
            Copier(disk, "the folder").run([Job(name, str(now), source.size, source.path)])


def _link(disk: Disk, source: str, target: str) -> bool:
    try:
        disk.do("link", target, os.link, source, target)
    except StorageError as e:
        if e.errno in REAL:
            raise
        return False
    return True

"""A checkpoint of one file that one process writes from memory: laid out on the disk before its bytes are there."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Mapping
from typing import Any

from det_core.storage._copy import entry_of
from det_core.storage._io import Disk, leave_memory, start_writing
from det_core.storage._manifest import FileEntry, Header, Manifest, encode_metadata
from det_core.storage._memory import write_parts
from det_core.storage._names import INNER, MANIFEST, METADATA, folders_of
from det_core.storage._staging import list_checkpoint


class Draft:
    """A staging folder with all that can be in it before the state is there.

    That is metadata.json, and the file and the manifest, empty; they and their folders are open.

    Args:
        disk: the door.
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
        for path in (self._name, METADATA, MANIFEST):
            self._open[path] = disk.create(f"{tree}/{path}")
        disk.write_all(self._open[METADATA], f"{tree}/{METADATA}", metadata)
        start_writing(self._open[METADATA])
        for folder in (*self._directories, INNER, ""):
            path = f"{tree}/{folder}".rstrip("/")
            self._folders[path] = disk.do("open", path, os.open, path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return entry_of(metadata)

    def write(self, parts: Iterable[memoryview | bytes]) -> Generator[int, None, FileEntry]:
        """Write the file; see :func:`write_parts`."""
        return write_parts(self._disk, self._open[self._name], f"{self._tree}/{self._name}", parts)

    def commit(self, entry: FileEntry, header: Header) -> Manifest:
        """Write the manifest, make files and folders durable, and list the checkpoint.

        Args:
            entry: what :meth:`write` returned.
            header: what the manifest says of the checkpoint.

        Raises:
            StorageError: the disk refused; the checkpoint is not listed.
        """
        manifest = Manifest({self._name: entry, METADATA: self._metadata}, self._directories, header)
        self._disk.write_all(self._open[MANIFEST], f"{self._tree}/{MANIFEST}", manifest.encode())
        self._sync()
        list_checkpoint(self._disk, self._tree, self._final)
        return manifest

    def _sync(self) -> None:
        """All are on their way to the disk before the first, which is the large one, is waited for."""
        for path in (self._name, MANIFEST):
            start_writing(self._open[path])
        for path, fd in self._open.items():
            self._disk.do("sync", f"{self._tree}/{path}", os.fsync, fd)
        while self._open:
            path, fd = self._open.popitem()
            leave_memory(fd)
            self._disk.do("close", f"{self._tree}/{path}", os.close, fd)
        for path, fd in self._folders.items():
            self._disk.do("sync", path, os.fsync, fd)
        self._close()

    def abort(self) -> None:
        """Remove what there is of it, unless it is listed."""
        self._close()
        self._disk.remove_tree(self._tree)

    def _close(self) -> None:
        for files in (self._open, self._folders):
            while files:
                os.close(files.popitem()[1])

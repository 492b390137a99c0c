"""A checkpoint being written on a directory: aside, under a name that is never listed, then renamed."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from det_core.errors import CheckpointError, StorageError
from det_core.storage._copy import Copier, Job, Progress, entry_of
from det_core.storage._io import Disk
from det_core.storage._manifest import FileEntry, Header, Manifest, encode_metadata
from det_core.storage._names import INNER, MANIFEST, METADATA
from det_core.storage._scan import Listing, Source, scan

log = logging.getLogger("det_core.storage")
ASIDE = ".det_core-tmp"
"""The folder of a store's root in which checkpoints are written and taken apart."""


class DirectoryStaging:
    """``<root>/.det_core-tmp/<storage_id>.<owner>/``: ``tree`` will be the checkpoint, ``part-N`` is of rank N.

    Args:
        disk: the door.
        root: the store's root.
        ticket: the staging folder's name.
        storage_id: the checkpoint's name.
        part: the rank that writes into a folder of its own; None: straight into ``tree``.
    """

    def __init__(self, disk: Disk, root: str, ticket: str, storage_id: str, part: int | None) -> None:
        self._disk = disk
        self._root = root
        self._base = f"{root}/{ASIDE}/{ticket}"
        self._tree = f"{self._base}/tree"
        self._own = self._tree if part is None else f"{self._base}/part-{part}"
        self._chief = not part
        self._open = True
        self.ticket = ticket
        self.storage_id = storage_id

    @property
    def path(self) -> Path:
        """This rank's folder, made on first use."""
        self._disk.make_folders(self._own)
        return Path(self._own)

    def put(self, listing: Listing, progress: Progress | None = None) -> dict[str, FileEntry]:
        """Copy a folder in, durably."""
        self._make(self._tree, listing.directories)
        jobs = [Job(p, s.path, s.size, f"{self._tree}/{p}") for p, s in listing.files.items()]
        return self._copier(progress).entries(jobs)

    def written(self) -> Listing:
        """What the folder holds; links, and files that have other names, became copies of their own."""
        if not self._disk.is_folder(self._own):
            raise CheckpointError(f"the folder {self._own} of checkpoint {self.storage_id} was removed or replaced")
        for name in (INNER, METADATA):
            self._clear(f"{self._own}/{name}")
        listing = scan(self._disk, self._own)
        self._part_from_others(listing)
        return Listing({p: Source(f"{self._own}/{p}", s.size) for p, s in listing.files.items()}, listing.directories)

    def take(self, listing: Listing, progress: Progress | None = None) -> dict[str, FileEntry]:
        """Hash and sync what was written, and move it into the checkpoint."""
        entries = self._copier(progress).entries([Job(p, s.path, s.size) for p, s in listing.files.items()])
        if self._own != self._tree:
            self._make(self._tree, listing.directories)
            for path, source in listing.files.items():
                target = f"{self._tree}/{path}"
                self._disk.do("rename", target, os.rename, source.path, target)
        return entries

    def local(self, name: str) -> Path | None:
        """In this rank's folder, or where :meth:`take` has moved it."""
        for top in (self._own, self._tree):
            if self._open and self._disk.exists(f"{top}/{name}"):
                return Path(f"{top}/{name}")
        return None

    def commit(
        self,
        files: Mapping[str, FileEntry],
        directories: Sequence[str],
        metadata: Mapping[str, Any],
        header: Header,
    ) -> Manifest:
        """Write metadata.json and the manifest, sync them and every folder, rename, and sync the root.

        Args:
            files: what the manifest says of each.
            directories: the folders in it.
            metadata: what goes into metadata.json.
            header: what the manifest says of the checkpoint.
        """
        disk, tree, text = self._disk, self._tree, encode_metadata(metadata)
        disk.make_folders(f"{tree}/{INNER}")
        disk.write_file(f"{tree}/{METADATA}", text, sync=False)
        manifest = Manifest({**files, METADATA: entry_of(text)}, tuple(directories), header)
        disk.write_file(f"{tree}/{MANIFEST}", manifest.encode(), sync=False)
        folders = [f"{tree}/{path}".rstrip("/") for path in (*manifest.directories, INNER, "")]
        disk.sync_all([f"{tree}/{path}" for path in (METADATA, MANIFEST)], folders)
        list_checkpoint(disk, tree, f"{self._root}/{self.storage_id}")
        self._open = False
        try:
            disk.remove_tree(self._base)
        except StorageError as e:
            log.warning("checkpoint %s is complete, but its empty staging folder stays: %s", self.storage_id, e)
        return manifest

    def abort(self) -> None:
        """Remove the staging folder; a rank that is not the chief only what is its own."""
        if not self._open:
            return
        self._open = False
        if self._chief:
            self._disk.remove_tree(self._base)
        else:
            for own in (self._own, f"{self._base}/copies-{os.path.basename(self._own)}"):
                self._disk.remove_tree(own)

    def _copier(self, progress: Progress | None, *, sync: bool = True) -> Copier:
        where = f"checkpoint {self.storage_id} in {self._disk.store}"
        return Copier(self._disk, where, sync=sync, progress=progress)

    def _make(self, top: str, directories: Sequence[str]) -> None:
        self._disk.make_folders(top)
        for folder in directories:
            self._disk.make_folders(f"{top}/{folder.rstrip('/')}")

    def _clear(self, path: str) -> None:
        if self._disk.is_folder(path):
            self._disk.remove_tree(path)
        else:
            self._disk.remove_file(path)

    def _part_from_others(self, listing: Listing) -> None:
        """Put copies in place of links, and of files that have other names: nobody else has a hand on the bytes."""
        shared = {p: s for p, s in listing.files.items() if s.shared}
        if not shared and not listing.links:
            return
        aside = f"{self._base}/copies-{os.path.basename(self._own)}"
        self._disk.make_folders(aside)
        jobs = [Job(p, s.path, s.size, f"{aside}/{i}") for i, (p, s) in enumerate(shared.items())]
        self._copier(None, sync=False).run(jobs)
        for link in sorted(listing.links):
            path = f"{self._own}/{link}"
            if self._disk.exists(path) and not self._disk.is_folder(path):
                self._disk.remove_file(path)
        self._make(self._own, listing.directories)
        for job in jobs:
            target = f"{self._own}/{job.name}"
            self._disk.do("rename", target, os.rename, job.target, target)
        self._disk.remove_tree(aside)


def list_checkpoint(disk: Disk, tree: str, final: str) -> None:
    """Give a complete checkpoint its name; if that cannot be made durable, take it back.

    Args:
        disk: the door.
        tree: where it is, all of it on the disk.
        final: ``<root>/<storage_id>``.

    Raises:
        StorageError: the disk refused, or something has that name.
    """
    if disk.exists(final):
        raise disk.error("commit", final, FileExistsError(errno.EEXIST, "a checkpoint of that id is there"))
    disk.do("rename", final, os.rename, tree, final)
    try:
        disk.sync_folder(os.path.dirname(final))
    except StorageError:
        disk.do("rename", tree, os.rename, final, tree)
        raise

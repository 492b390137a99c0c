"""A checkpoint on a directory, to be read."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from det_core.errors import CheckpointCorrupt, StorageError
from det_core.storage._copy import Copier, Job, Progress, check_stored, pieces, share
from det_core.storage._io import Disk
from det_core.storage._manifest import Manifest, decode_metadata
from det_core.storage._names import MANIFEST, METADATA, folders_of


class DirectoryCheckpoint:
    """The files of one checkpoint, and what its manifest says of them."""

    def __init__(self, disk: Disk, path: str, storage_id: str, manifest: Manifest) -> None:
        self._disk = disk
        self._path = path
        self._where = f"checkpoint {storage_id} in {disk.store}"
        self.storage_id = storage_id
        self.manifest = manifest

    @property
    def path(self) -> Path:
        """The folder itself."""
        return Path(self._path)

    def metadata(self) -> dict[str, Any]:
        """What metadata.json holds."""
        if METADATA not in self.manifest.files:
            return {}
        self.check([METADATA])
        data = self._disk.read_file(f"{self._path}/{METADATA}")
        return decode_metadata(data, self._where)

    def check(
        self,
        names: Collection[str],
        *,
        part: int = 0,
        parts: int = 1,
        digests: bool = True,
        progress: Progress | None = None,
    ) -> None:
        """Compare one part of the files with the manifest."""
        work = share(pieces(self._jobs(names), self.manifest.chunk_size), part, parts, self.manifest.chunk_size)
        self._check_folders(piece.job.name for piece in work)
        if digests and self.manifest.verified:
            self._copier(progress).check(work)
        else:
            for piece in work:
                self._check_size(piece.job)

    def copy_out(
        self, folder: Path, names: Collection[str], directories: Collection[str], progress: Progress | None = None
    ) -> None:
        """Copy files into ``folder``, comparing each with the manifest before it is written, or as it is."""
        target = os.fspath(folder)
        jobs = self._jobs(names, target)
        self._disk.make_folders(target)
        for directory in sorted(folders_of(names).union(directories)):
            self._disk.make_folders(f"{target}/{directory.rstrip('/')}")
        self._check_folders(names)
        self._copier(progress).run(jobs)

    def remove(self, names: Collection[str]) -> dict[str, int]:
        """Delete files: first from the manifest, then their bytes, then the folders that are empty."""
        left = self.manifest.without(names)
        if left.header is not None:
            self._disk.replace_file(f"{self._path}/{MANIFEST}", left.encode())
        for name in names:
            self._disk.remove_file(f"{self._path}/{name}")
        for folder in sorted(set(self.manifest.directories) - set(left.directories), reverse=True):
            self._drop_if_empty(f"{self._path}/{folder.rstrip('/')}")
        self.manifest = left
        return left.resources

    def _jobs(self, names: Collection[str], target: str | None = None) -> list[Job]:
        jobs = []
        for name in sorted(names):
            size, digests = self.manifest.files[name]
            to = None if target is None else f"{target}/{name}"
            jobs.append(Job(name, f"{self._path}/{name}", size, to, None, digests))
        return jobs

    def _copier(self, progress: Progress | None) -> Copier:
        manifest = self.manifest
        stored = manifest.verified
        return Copier(self._disk, self._where, chunk_size=manifest.chunk_size, stored=stored, progress=progress)

    def _check_folders(self, names: Iterable[str]) -> None:
        """See that no folder of these files has become a link out of the checkpoint."""
        top = os.path.realpath(self._path)
        for folder in folders_of(names):
            real = os.path.realpath(f"{self._path}/{folder}")
            if real != top and not real.startswith(top + "/"):
                raise CheckpointCorrupt(f"{self._where}: its folder {folder} leads to {real}, outside the checkpoint")

    def _check_size(self, job: Job) -> None:
        look = os.lstat if self.manifest.verified else os.stat
        try:
            found = self._disk.do("look at", job.source, look, job.source)
        except StorageError as e:
            if e.errno in (errno.ENOENT, errno.ENOTDIR):
                raise CheckpointCorrupt(f"{self._where}: {job.name} is missing") from e
            raise
        check_stored(self._where, job.name, job.size, found)

    def _drop_if_empty(self, path: str) -> None:
        try:
            self._disk.do("remove folder", path, os.rmdir, path)
        except StorageError as e:
            if e.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise

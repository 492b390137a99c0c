"""A checkpoint on an object store, to be read."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from det_core.storage._copy import Job, Piece, Progress, pieces, share
from det_core.storage._io import Disk
from det_core.storage._manifest import Manifest, decode_metadata
from det_core.storage._names import MANIFEST, METADATA, folders_of
from det_core.storage._objects._bucket import KeyMissing
from det_core.storage._objects._door import Door
from det_core.storage._objects._download import PIECE, download
from det_core.storage._objects._files import Files
from det_core.storage._objects._keys import folder_of
from det_core.storage._objects._run import run


class ObjectCheckpoint:
    """The objects of one checkpoint, and what its manifest says of them. Has no folder: it must be copied out."""

    path: Path | None = None

    def __init__(self, door: Door, disk: Disk, storage_id: str, manifest: Manifest) -> None:
        self._door, self._disk = door, disk
        self._folder = folder_of(storage_id)
        self._where = f"checkpoint {storage_id} in {door.where}"
        self.storage_id = storage_id
        self.manifest = manifest

    def metadata(self) -> dict[str, Any]:
        """What metadata.json holds."""
        if METADATA not in self.manifest.files:
            return {}
        (job,) = self._jobs([METADATA])
        files = Files(self._disk, self._where, self.manifest.chunk_size)
        try:
            data = run(self._door.where, lambda _: self._door.get(job.source))
        except KeyMissing as e:
            raise files.missing(job) from e
        files.check(job, data, 0, job.size)
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
        """Compare one part of the files with the manifest; for digests they are fetched, for sizes only listed."""
        work = share(self._pieces(self._jobs(names)), part, parts, self.manifest.chunk_size)
        if digests and self.manifest.verified:
            self._fetch(work, progress)
        elif work:
            self._check_sizes([piece.job for piece in work if piece.first == 0])

    def copy_out(
        self, folder: Path, names: Collection[str], directories: Collection[str], progress: Progress | None = None
    ) -> None:
        """Fetch files into ``folder``, comparing each with the manifest before it is written."""
        target = os.fspath(folder)
        self._disk.make_folders(target)
        for directory in sorted(folders_of(names).union(directories)):
            self._disk.make_folders(f"{target}/{directory.rstrip('/')}")
        self._fetch(self._pieces(self._jobs(names, target)), progress)

    def remove(self, names: Collection[str]) -> dict[str, int]:
        """Delete files: first from the manifest, then their bytes."""
        left = self.manifest.without(names)

        async def replace_and_delete() -> None:
            if left.header is not None:
                await self._door.put(self._folder + MANIFEST, left.encode())
            await self._door.delete([self._folder + name for name in sorted(names)])

        run(self._door.where, lambda _: replace_and_delete())
        self.manifest = left
        return left.resources

    def _jobs(self, names: Collection[str], target: str | None = None) -> list[Job]:
        jobs = []
        for name in sorted(names):
            size, digests = self.manifest.files[name]
            to = None if target is None else f"{target}/{name}"
            jobs.append(Job(name, self._folder + name, size, to, None, digests))
        return jobs

    def _pieces(self, jobs: list[Job]) -> list[Piece]:
        chunk = self.manifest.chunk_size
        return pieces(jobs, chunk, max(1, PIECE // chunk))

    def _fetch(self, work: list[Piece], progress: Progress | None) -> None:
        download(self._door, self._disk, self._where, work, self.manifest.chunk_size, progress)

    def _check_sizes(self, jobs: list[Job]) -> None:
        listed = run(self._door.where, lambda _: self._door.list(self._folder))
        sizes = {entry.key: entry.size for entry in listed}
        files = Files(self._disk, self._where, self.manifest.chunk_size)
        for job in jobs:
            if job.source not in sizes:
                raise files.missing(job)
            if sizes[job.source] != job.size:
                raise files.other_size(job, sizes[job.source], more=False)

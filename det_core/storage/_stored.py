"""A checkpoint on a directory, to be read."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from det_core._errors import CheckpointCorrupt, StorageError
from det_core.storage._copy import Copier, Job, Progress, pieces, share
from det_core.storage._io import Disk
from det_core.storage._manifest import Manifest
from det_core.storage._names import MANIFEST, METADATA, parents

READ_THREADS = 8
PARTIAL = ".det_core-tmp"
"""The folder within a download's target in which files are written before they get their names."""


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
        try:
            found = json.loads(data)
        except ValueError as e:
            raise CheckpointCorrupt(f"{self._where}: {METADATA} is no JSON ({e})") from e
        if not isinstance(found, dict):
            raise CheckpointCorrupt(f"{self._where}: {METADATA} holds no object")
        return found

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
        self._check_files(piece.job for piece in work)
        if digests and self.manifest.verified:
            self._copier(progress).run_pieces(work)

    def copy_out(
        self, folder: Path, names: Collection[str], directories: Collection[str], progress: Progress | None = None
    ) -> None:
        """Copy files into ``folder``, each by way of a name aside."""
        target = os.fspath(folder)
        aside = f"{target}/{PARTIAL}/{os.getpid()}-{id(self):x}"
        self._disk.make_folders(aside)
        try:
            for directory in {*directories, *(d for p in names for d in parents(p))}:
                self._disk.make_folders(f"{target}/{directory.rstrip('/')}")
            jobs = self._jobs(names)
            modes = self._check_files(jobs)
            self._copier(progress).run(
                [
                    replace(job, target=f"{aside}/{i}", rename=f"{target}/{job.name}", mode=modes[job.name] | 0o200)
                    for i, job in enumerate(jobs)
                ]
            )
        finally:
            self._disk.remove_tree(aside)
            self._drop_if_empty(os.path.dirname(aside))

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

    def _jobs(self, names: Collection[str]) -> list[Job]:
        files = self.manifest.files
        return [Job(n, f"{self._path}/{n}", files[n].size, expected=files[n].digests) for n in sorted(names)]

    def _copier(self, progress: Progress | None) -> Copier:
        chunk = self.manifest.chunk_size
        return Copier(self._disk, self._where, chunk_size=chunk, threads=READ_THREADS, progress=progress)

    def _check_files(self, jobs: Iterable[Job]) -> dict[str, int]:
        """See that each file is a regular one, inside the checkpoint, of the right size; returns their modes."""
        by_name = {job.name: job for job in jobs}
        for folder in {os.path.dirname(job.source) for job in by_name.values()}:
            self._check_inside(folder)
        return {name: self._check_file(job) for name, job in by_name.items()}

    def _check_inside(self, path: str) -> None:
        top, real = os.path.realpath(self._path), os.path.realpath(path)
        if real != top and not real.startswith(top + "/"):
            raise CheckpointCorrupt(f"{self._where}: {path} leads to {real}, outside the checkpoint")

    def _check_file(self, job: Job) -> int:
        try:
            found = self._disk.do("look at", job.source, os.lstat, job.source)
            if stat.S_ISLNK(found.st_mode):
                self._check_inside(job.source)
                found = self._disk.do("look at", job.source, os.stat, job.source)
        except StorageError as e:
            if isinstance(e.__cause__, FileNotFoundError | NotADirectoryError):
                raise CheckpointCorrupt(f"{self._where}: {job.name} is missing") from e
            raise
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointCorrupt(f"{self._where}: {job.name} is no regular file")
        if found.st_size != job.size:
            raise CheckpointCorrupt(
                f"{self._where}: {job.name} has {found.st_size} bytes, its manifest says {job.size}"
            )
        return stat.S_IMODE(found.st_mode) & 0o777

    def _drop_if_empty(self, path: str) -> None:
        try:
            self._disk.do("remove folder", path, os.rmdir, path)
        except StorageError as e:
            if e.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise

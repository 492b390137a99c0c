"""A directory as a checkpoint store."""

from __future__ import annotations

import builtins
import dataclasses
import errno
import logging
import os
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from det_core import _clock
from det_core._errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, StorageError
from det_core.storage._io import Disk
from det_core.storage._manifest import Header, Manifest
from det_core.storage._names import INNER, MANIFEST, check_storage_id, glob_pattern
from det_core.storage._owner import Owner
from det_core.storage._scan import scan
from det_core.storage._staging import ASIDE, DirectoryStaging
from det_core.storage._store import WHOLE
from det_core.storage._stored import DirectoryCheckpoint

log = logging.getLogger("det_core.storage")
PATIENCE = 10.0
TRASH = "deleted."


class DirectoryStore:
    """Checkpoints as folders of one directory, which all ranks share.

    A checkpoint is written aside, in ``<root>/.det_core-tmp``, every file and folder is synced, and then one rename
    makes it ``<root>/<storage_id>``. Nothing is made before the first write.

    Args:
        root: the directory.
        disk: the door to the file system; tests give one that fails.
        patience: seconds that a rank waits to see a folder that another one made. On a network file system it may
            not show at once.
    """

    def __init__(self, root: str | os.PathLike[str], *, disk: Disk | None = None, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._root = os.path.abspath(os.fspath(root))
        self._disk = disk or Disk(self._root)

    def __repr__(self) -> str:
        return f"DirectoryStore({self._root!r})"

    @property
    def root(self) -> str:
        """The directory."""
        return self._root

    @property
    def disk(self) -> Disk:
        """The door to the file system."""
        return self._disk

    def begin(self, storage_id: str, owner: Owner) -> DirectoryStaging:
        """Make a staging folder, after collecting what the run left behind."""
        check_storage_id(storage_id)
        ticket = f"{storage_id}.{owner.tag}"
        self._disk.make_durable_folder(self._root)
        self._make_aside()
        try:
            self.collect(owner)
        except StorageError as e:
            log.warning("what a dead writer left stays: %s", e)
        staging = f"{self._root}/{ASIDE}/{ticket}"
        self._disk.do("make folder", staging, os.mkdir, staging)
        begun = DirectoryStaging(self._disk, self._root, ticket, storage_id, None)
        try:
            self._disk.do("make folder", staging, os.mkdir, f"{staging}/tree")
        except StorageError:
            begun.abort()
            raise
        return begun

    def join(self, ticket: str, part: int) -> DirectoryStaging:
        """Look for the staging folder that the chief made: it has a name that nothing else has."""
        parsed = Owner.parse(ticket)
        assert parsed is not None, f"{ticket} is no ticket"
        path = f"{self._root}/{ASIDE}/{ticket}"
        if not self._sees(path):
            raise StorageError(
                2,
                f"checkpoint store {self._root}: this process does not see {path}, which the chief has just made. A "
                "sharded checkpoint needs a directory on a file system that every rank has mounted at the same path",
            )
        return DirectoryStaging(self._disk, self._root, ticket, parsed[0], part)

    def _sees(self, path: str) -> bool:
        """Whether a folder is there, or comes to be seen; listing the one above makes a network file system look."""
        deadline = _clock.monotonic() + self._patience
        while not self._disk.is_folder(path):
            if _clock.monotonic() > deadline:
                return False
            time.sleep(0.05)
            if self._disk.is_folder(os.path.dirname(path)):
                self._disk.entries(os.path.dirname(path))
        return True

    def open(self, storage_id: str, manifest: Manifest | None = None) -> DirectoryCheckpoint:
        """Look a checkpoint up."""
        path = f"{self._root}/{check_storage_id(storage_id)}"
        if not os.path.isdir(path):
            raise CheckpointNotFound(f"no checkpoint {storage_id!r} in {self._root}")
        manifest = manifest or self._manifest(storage_id)
        if manifest is None:
            log.warning("checkpoint %s in %s has no manifest (written by others): unverified", storage_id, self._root)
            manifest = self._foreign(path)
        return DirectoryCheckpoint(self._disk, path, storage_id, manifest)

    def _foreign(self, path: str) -> Manifest:
        try:
            listing = scan(self._disk, path, leave=(INNER,))
        except ValueError as e:
            raise CheckpointCorrupt(f"checkpoint {path} cannot be read: {e}") from e
        return Manifest.unverified({p: s.size for p, s in listing.files.items()}, listing.directories)

    def _manifest(self, storage_id: str) -> Manifest | None:
        try:
            data = self._disk.read_file(f"{self._root}/{storage_id}/{MANIFEST}")
        except StorageError as e:
            if e.errno in (errno.ENOENT, errno.ENOTDIR):
                return None
            raise
        manifest = Manifest.decode(data, f"checkpoint {storage_id} in {self._root}")
        assert manifest.header is not None
        return dataclasses.replace(manifest, header=dataclasses.replace(manifest.header, storage_id=storage_id))

    def list(self, run_id: str | None = None) -> list[Header]:
        """The complete checkpoints, by run, restart and ordinal; one with a damaged manifest is logged and left out."""
        found = []
        for name in self._folders(self._root):
            if name.startswith("."):
                continue
            try:
                manifest = self._manifest(name)
            except CheckpointError as e:
                log.warning("not listed: %s", e)
                continue
            if manifest is not None and manifest.header is not None and run_id in (None, manifest.header.run_id):
                found.append(manifest.header)
        return sorted(found)

    def newest(self, run_id: str) -> str | None:
        """The storage_id of the newest complete checkpoint of a run."""
        found = self.list(run_id)
        return found[-1].storage_id if found else None

    def delete(self, storage_id: str, globs: Sequence[str] = WHOLE) -> dict[str, int]:
        """Delete a whole checkpoint by one rename, then its bytes; or files, after their entries in the manifest."""
        path = f"{self._root}/{check_storage_id(storage_id)}"
        if os.path.islink(path):
            self._disk.remove_file(path)
            return {}
        if not self._disk.is_folder(path):
            return {}
        if not any(glob in WHOLE for glob in globs):
            checkpoint = self.open(storage_id)
            patterns = [glob_pattern(glob) for glob in globs]
            gone = [p for p in checkpoint.manifest.files if any(pattern.fullmatch(p) for pattern in patterns)]
            if len(gone) < len(checkpoint.manifest.files):
                return checkpoint.remove(gone)
        self._delete_whole(path)
        return {}

    def _make_aside(self) -> None:
        """Make the folder for what is under way; whoever may write into the root may write into it."""
        aside = f"{self._root}/{ASIDE}"
        if not self._disk.is_folder(aside):
            self._disk.make_folders(aside)
            mode = stat.S_IMODE(self._disk.do("look at", self._root, os.stat, self._root).st_mode)
            self._disk.do("set the permissions of", aside, os.chmod, aside, mode)

    def _delete_whole(self, path: str) -> None:
        self._make_aside()
        import uuid

        trash = f"{self._root}/{ASIDE}/{TRASH}{uuid.uuid4()}"
        try:
            self._disk.do("rename", path, os.rename, path, trash)
        except StorageError as e:
            if e.errno == errno.ENOENT:
                return
            raise
        self._disk.sync_folder(self._root)
        self._disk.remove_tree(trash)

    def collect(self, owner: Owner | None = None) -> builtins.list[str]:
        """Remove the staging folders of dead writers, and what a delete left.

        Args:
            owner: who collects: earlier restarts of its run count as dead, wherever they ran.
        """
        collected = []
        for name in self._folders(f"{self._root}/{ASIDE}"):
            parsed = Owner.parse(name)
            if name.startswith(TRASH):
                self._disk.remove_tree(f"{self._root}/{ASIDE}/{name}")
            elif parsed is not None and parsed[1].is_dead(owner):
                self._disk.remove_tree(f"{self._root}/{ASIDE}/{name}")
                collected.append(parsed[0])
        return collected

    def _folders(self, path: str) -> builtins.list[str]:
        if not self._disk.is_folder(os.path.realpath(path)):
            return []
        return [entry.name for entry in self._disk.entries(path) if entry.is_dir()]

    def path(self, storage_id: str) -> Path:
        """Where a checkpoint lies or would lie."""
        return Path(self._root, check_storage_id(storage_id))

"""A directory as a checkpoint store."""

from __future__ import annotations

import builtins
import dataclasses
import errno
import logging
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from det_core import _clock
from det_core.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, StorageError
from det_core.storage._copy import Copier, Job
from det_core.storage._draft import Draft
from det_core.storage._io import Disk
from det_core.storage._manifest import Header, Manifest
from det_core.storage._marks import BELIEVED, Marks, held_by
from det_core.storage._names import INNER, MANIFEST, check_storage_id, glob_pattern, is_inner_path
from det_core.storage._owner import Owner
from det_core.storage._probe import PROBE, explained, probe
from det_core.storage._scan import scan
from det_core.storage._staging import ASIDE, DirectoryStaging
from det_core.storage._store import WHOLE
from det_core.storage._stored import DirectoryCheckpoint

log = logging.getLogger("det_core.storage")
PATIENCE = 10.0
TRASH = "deleted."
BESIDE = "beside."


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
        self._writer: Owner | None = None
        """For whom all is there that is needed, and who has collected what others left."""
        self._root = os.path.abspath(os.fspath(root))
        self._disk = disk or Disk(self._root)
        self._marks = Marks(self._disk, f"{self._root}/{ASIDE}")

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
        """Make a staging folder; before ``owner``'s first, collect what its run left."""
        staging = self._make_staging(storage_id, owner)
        begun = DirectoryStaging(self._disk, self._root, f"{storage_id}.{owner.tag}", storage_id, None)
        try:
            self._disk.do("make folder", staging, os.mkdir, f"{staging}/tree")
        except StorageError:
            begun.abort()
            raise
        return begun

    def draft(self, storage_id: str, owner: Owner, name: str, metadata: Mapping[str, Any]) -> Draft:
        """Lay out a checkpoint of one file, ``name``, that this process will write; else as :meth:`begin`."""
        staging = self._make_staging(storage_id, owner)
        try:
            return Draft(self._disk, staging, f"{self._root}/{storage_id}", name, metadata)
        except BaseException:
            self._disk.remove_tree(staging)
            raise

    def _make_staging(self, storage_id: str, owner: Owner) -> str:
        """Make a folder for one checkpoint; before an owner's first, and whenever the root is gone, all it needs."""
        path = f"{self._root}/{ASIDE}/{check_storage_id(storage_id)}.{owner.tag}"
        if self._writer == owner:
            try:
                self._disk.do("make folder", path, os.mkdir, path)
                return path
            except StorageError as e:
                if e.errno not in (errno.ENOENT, errno.ENOTDIR):
                    raise
        self._make_root()
        try:
            self.collect(owner)
        except StorageError as e:
            log.warning("what a dead writer left stays: %s", e)
        self._disk.do("make folder", path, os.mkdir, path)
        self._writer = owner
        return path

    @property
    def shared(self) -> bool:
        """Whether another process that opens the same directory has the same store."""
        return type(self) is DirectoryStore and type(self._disk) is Disk

    def settle(self, storage_id: str, owner: Owner) -> Manifest | None:
        """Find out what became of a checkpoint whose writer is gone.

        Returns:
            what it holds, if it is complete; None: it was not, and what there was of it is removed.

        Raises:
            StorageError: the disk refused.
        """
        manifest = self._manifest(check_storage_id(storage_id))
        if manifest is not None:
            self._disk.sync_folder(self._root)
        self._disk.remove_tree(f"{self._root}/{ASIDE}/{storage_id}.{owner.tag}")
        return manifest

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
        for entry in self._entries(self._root):
            name = entry.name
            if name.startswith(".") or not entry.is_dir():
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

    @contextmanager
    def hold(self, storage_id: str, owner: Owner) -> Iterator[None]:
        """Mark a checkpoint as in use while the block runs."""
        check_storage_id(storage_id)
        try:
            if self._disk.is_folder(os.path.realpath(self._root)):
                self._make_aside()
        except StorageError as e:
            log.debug("no place for marks that checkpoints are in use: %s", e)
        with self._marks.hold(storage_id, owner):
            yield

    def in_use(self) -> set[str]:
        """The checkpoints that a living process holds."""
        return {
            held for entry in self._entries(f"{self._root}/{ASIDE}") if (held := self._marks.holds(entry)) is not None
        }

    def put_beside(self, source: Path, name: str) -> None:
        """Copy one local file to ``<root>/<name>``: aside, synced, then renamed."""
        if not is_inner_path(name) or name.startswith("."):
            raise ValueError(f"{name!r} is no path below {self._root}")
        self._make_root()
        aside, target = f"{self._root}/{ASIDE}/{BESIDE}{os.urandom(8).hex()}", f"{self._root}/{name}"
        try:
            size = self._disk.do("look at", str(source), os.stat, source).st_size
            Copier(self._disk, str(source), sync=True).run([Job(name, os.fspath(source), size, aside)])
            self._disk.make_durable_folder(os.path.dirname(target))
            self._disk.do("rename", target, os.rename, aside, target)
        except BaseException:
            self._disk.remove_file(aside)
            raise
        self._disk.sync_folder(os.path.dirname(target))

    def validate(self) -> None:
        """Try to write; one line says what is wrong, and what to do."""
        try:
            self._make_root()
            probe(self._disk, f"{self._root}/{ASIDE}")
        except StorageError as e:
            raise explained(self._disk, self._root, e) from e

    def close(self) -> None:
        """Nothing is kept open between calls."""

    def _make_root(self) -> None:
        self._disk.make_durable_folder(self._root)
        self._make_aside()

    def _make_aside(self) -> None:
        """Make the folder for what is under way; whoever may write into the root may write into it."""
        aside = f"{self._root}/{ASIDE}"
        if not self._disk.is_folder(aside):
            self._disk.make_folders(aside)
            mode = stat.S_IMODE(self._disk.do("look at", self._root, os.stat, self._root).st_mode)
            self._disk.do("set the permissions of", aside, os.chmod, aside, mode)

    def _delete_whole(self, path: str) -> None:
        self._make_aside()
        trash = f"{self._root}/{ASIDE}/{TRASH}{os.urandom(8).hex()}"
        try:
            self._disk.do("rename", path, os.rename, path, trash)
        except StorageError as e:
            if e.errno == errno.ENOENT:
                return
            raise
        self._disk.sync_folder(self._root)
        self._disk.remove_tree(trash)

    def collect(self, owner: Owner | None = None) -> builtins.list[str]:
        """Remove the staging folders of dead writers, marks of dead holders, and what a delete left."""
        collected = []
        for entry in self._entries(f"{self._root}/{ASIDE}"):
            parsed = Owner.parse(entry.name)
            if entry.name.startswith((BESIDE, PROBE)):
                if _clock.now() - (self._disk.modified(entry.path) or 0) > BELIEVED:
                    self._disk.remove_file(entry.path)
            elif entry.name.startswith(TRASH):
                self._disk.remove_tree(entry.path)
            elif held_by(entry.name) is not None:
                if self._marks.holds(entry) is None:
                    self._disk.remove_file(entry.path)
            elif parsed is not None and entry.is_dir() and parsed[1].is_dead(owner):
                self._disk.remove_tree(entry.path)
                collected.append(parsed[0])
        return collected

    def _entries(self, path: str) -> builtins.list[os.DirEntry[str]]:
        """What lies in a folder; nothing if there is none."""
        try:
            return self._disk.entries(path)
        except StorageError as e:
            if e.errno in (errno.ENOENT, errno.ENOTDIR):
                return []
            raise

    def path(self, storage_id: str) -> Path:
        """Where a checkpoint lies or would lie."""
        return Path(self._root, check_storage_id(storage_id))

"""A directory as a checkpoint store.

A checkpoint is written in a staging directory, ``<root>/.det_core-tmp/<storage_id>.<owner>/``; every file and directory
is synced, and one rename makes it ``<root>/<storage_id>``. A deletion renames it back into a staging directory, under
the name of the deleting process. So staging directories are the leases of writers and deleters, and nothing in the root
is ever incomplete.
"""

from __future__ import annotations

import builtins
import errno
import logging
import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from det_core import _clock
from det_core.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, StorageError
from det_core.storage._copy import ChunkRange, Copier, CopyTask, check_stored, entry_of, pieces, split_work
from det_core.storage._files import Disk, directory_advice
from det_core.storage._manifest import FileEntry, Header, Manifest, encode_metadata
from det_core.storage._names import (
    MANIFEST_PATH,
    META_DIR,
    METADATA_FILE,
    RESERVED,
    STAGING_DIR,
    check_storage_id,
    parent_folders,
)
from det_core.storage._owner import Owner
from det_core.storage._scan import Listing, SourceFile, scan
from det_core.storage._staging import Staging
from det_core.storage._store import TEMP_PREFIX, Store, StoredCheckpoint
from det_core.storage._threads import Progress

log = logging.getLogger("det_core.storage")
VISIBILITY_TIMEOUT = 10.0
"""Seconds that a rank waits to see a directory that another rank has created."""
NOT_FOUND = (errno.ENOENT, errno.ENOTDIR)
"""Errors of a path that does not exist."""


class DirectoryStore(Store):
    """Checkpoints as subdirectories of one directory, which all ranks share. Nothing is created before the first write.

    Args:
        root: the directory.
        disk: the file system; tests pass one that fails.
        visibility_timeout: maximum wait in seconds for a directory that another rank has created: a network file system
            may not show it at once.
    """

    def __init__(
        self, root: str | os.PathLike[str], *, disk: Disk | None = None, visibility_timeout: float = VISIBILITY_TIMEOUT
    ) -> None:
        super().__init__()
        self.root = os.path.abspath(os.fspath(root))
        self.disk = disk or Disk(self.root)
        self._visibility_timeout = visibility_timeout
        self._writer: Owner | None = None
        """The last owner for whom the root was created and dead writers' files were collected."""

    def begin(self, storage_id: str, owner: Owner) -> DirectoryStaging:
        """Create a staging directory. Before ``owner``'s first, and if the root is gone, create it and collect."""
        staging = DirectoryStaging(self, f"{check_storage_id(storage_id)}.{owner.tag}", storage_id, None)
        self.make_staging_dir(staging.base, owner)
        try:
            self.disk.do("make folder", staging.base, os.mkdir, f"{staging.base}/tree")
        except StorageError:
            staging.abort()
            raise
        return staging

    def make_staging_dir(self, path: str, owner: Owner) -> None:
        """Create a staging directory, and what it needs before an owner's first."""
        if self._writer == owner:
            try:
                return self.disk.do("make folder", path, os.mkdir, path)
            except StorageError as e:
                if e.errno not in NOT_FOUND:
                    raise
        self._make_root()
        try:
            self.collect(owner)
        except StorageError as e:
            log.warning("cannot collect a dead writer's files: %s", e)
        self.disk.do("make folder", path, os.mkdir, path)
        self._writer = owner

    def join(self, ticket: str, part: int) -> DirectoryStaging:
        """Wait for the staging directory that the chief has created: its name is unique."""
        parsed = Owner.parse(ticket)
        assert parsed is not None, f"invalid ticket {ticket}"
        staging = DirectoryStaging(self, ticket, parsed[0], part)
        deadline = _clock.monotonic() + self._visibility_timeout
        while not self.disk.is_folder(staging.base):
            if _clock.monotonic() > deadline:
                raise StorageError(
                    errno.ENOENT,
                    f"{self._label}: {staging.base}, which the chief has created, is not visible here: a sharded "
                    "checkpoint needs a directory that every rank has mounted at the same path",
                )
            time.sleep(0.05)
            self._entries(os.path.dirname(staging.base))  # listing its parent makes NFS ask the server again
        return staging

    def put_file(self, source: Path, name: str) -> None:
        size = self.disk.do("look at", str(source), os.stat, source).st_size
        with self._replacing(self._beside(name)) as staging_path:
            Copier(self.disk, str(source), growing=True).run([CopyTask(name, os.fspath(source), size, staging_path)])
            with self.disk.open_fd(staging_path, os.O_RDONLY) as fd:
                self.disk.do("sync", staging_path, os.fsync, fd)

    def remove_folder(self, folder: str) -> None:
        self.disk.remove_tree(f"{self.root}/{self._beside(folder)}")

    def check_writable(self) -> None:
        try:
            super().check_writable()
        except StorageError as e:
            raise StorageError(e.errno, f"{e.args[-1]}: {directory_advice(self.root)}") from e

    def _read(self, path: str, start: int = 0, end: int | None = None) -> bytes | None:
        path = f"{self.root}/{path}"
        try:
            # O_NONBLOCK: opening a FIFO would wait for a writer.
            with self.disk.open_fd(path, os.O_RDONLY | os.O_NONBLOCK) as fd:
                size = self.disk.do("look at", path, os.fstat, fd).st_size
                if start < 0:
                    start = max(0, size + start)
                if end is None or end > size:
                    end = size
                parts = []
                while start < end and (part := self.disk.do("read", path, os.pread, fd, end - start, start)):
                    parts.append(part)
                    start += len(part)
                return b"".join(parts)
        except StorageError as e:
            if e.errno in NOT_FOUND:
                return None
            raise

    def _write(self, path: str, data: bytes, *, durable: bool = True) -> None:
        if not durable:  # a lease: it does not create the store
            if self.disk.is_folder(os.path.realpath(self.root)):
                self._make_staging_root()
            return self.disk.write_file(f"{self.root}/{path}", data, sync=False)
        with self._replacing(path) as staging_path:
            self.disk.write_file(staging_path, data, mode=0o444)

    @contextmanager
    def _replacing(self, path: str) -> Iterator[str]:
        """Yield a path in the staging directory; what the block writes there replaces ``path`` in one step, durably."""
        self._make_root()
        staging_path = f"{self.root}/{STAGING_DIR}/{TEMP_PREFIX}{os.urandom(8).hex()}"
        target = f"{self.root}/{path}"
        try:
            yield staging_path
            above = os.path.dirname(target)
            self.disk.make_durable_folder(above)
            self.disk.do("rename", target, os.rename, staging_path, target)
            self.disk.sync_folder(above)
        except BaseException:
            self.disk.remove_file(staging_path)
            raise

    def _remove(self, paths: Collection[str]) -> None:
        for path in paths:
            whole = f"{self.root}/{path}".rstrip("/")
            if not path.endswith("/"):
                self.disk.remove_file(whole)
                continue
            try:
                self.disk.do("remove folder", whole, os.rmdir, whole)
            except StorageError as e:
                if e.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                    raise

    def _names(self) -> builtins.list[str]:
        entries = self._entries(self.root)
        names = [e for e in entries if not e.name.startswith(".") and e.name not in RESERVED]
        # A link is followed when it is read: is_dir() would raise here if its target is not permitted.
        return [e.name for e in names if e.is_symlink() or e.is_dir()]

    def _list_leases(self) -> dict[str, float]:
        now = _clock.now()
        ages = {}
        for entry in self._entries(f"{self.root}/{STAGING_DIR}"):
            if (status := self.disk.status(entry.path)) is not None:
                ages[entry.name] = now - status.st_mtime
        return ages

    def _contents(self, storage_id: str) -> Manifest | None:
        path = f"{self.root}/{storage_id}"
        if not os.path.isdir(path):
            return None
        try:
            listing = scan(self.disk, path, exclude=(META_DIR,))
        except ValueError as e:
            raise CheckpointCorrupt(f"{self._describe(storage_id)} cannot be read: {e}") from e
        return Manifest.unverified({p: s.size for p, s in listing.files.items()}, listing.directories)

    def _checkpoint(self, storage_id: str, manifest: Manifest) -> DirectoryCheckpoint:
        if not os.path.isdir(f"{self.root}/{storage_id}"):
            raise CheckpointNotFound(f"no checkpoint {storage_id!r} in {self.root}")
        return DirectoryCheckpoint(self, storage_id, manifest)

    def _delete_whole(self, storage_id: str) -> None:
        path = f"{self.root}/{storage_id}"
        if os.path.islink(path):
            return self.disk.remove_file(path)
        if not self.disk.is_folder(path):
            return
        self._make_staging_root()
        self._unpublish_and_remove(path, storage_id, durable=True)

    def _discard(self, storage_id: str, leases: Collection[str]) -> bool:
        for name in leases:
            self._unpublish_and_remove(f"{self.root}/{STAGING_DIR}/{name}", storage_id)
        return True

    def _unpublish_and_remove(self, path: str, storage_id: str, *, durable: bool = False) -> None:
        """Remove a directory, first from where others find it: its writer, if alive, cannot commit half of it."""
        staging_path = f"{self.root}/{STAGING_DIR}/{storage_id}.{Owner.current().tag}"
        try:
            if path != staging_path:
                self.disk.remove_tree(staging_path)  # the rest of a removal of this process that failed
                self.disk.do("rename", path, os.rename, path, staging_path)
        except StorageError as e:
            if e.errno in NOT_FOUND:
                return
            raise
        if durable:
            self.disk.sync_folder(self.root)
        self.disk.remove_tree(staging_path)

    def _make_root(self) -> None:
        self.disk.make_durable_folder(self.root)
        self._make_staging_root()

    def _make_staging_root(self) -> None:
        """Create the staging directory; whoever may write into the root may write into it."""
        staging_path = f"{self.root}/{STAGING_DIR}"
        if not self.disk.is_folder(staging_path):
            self.disk.make_folders(staging_path)
            mode = stat.S_IMODE(self.disk.do("look at", self.root, os.stat, self.root).st_mode)
            self.disk.do("set the permissions of", staging_path, os.chmod, staging_path, mode)

    def _entries(self, path: str) -> builtins.list[os.DirEntry[str]]:
        """Return the entries of a directory; none if it does not exist."""
        try:
            return self.disk.entries(path)
        except StorageError as e:
            if e.errno in NOT_FOUND:
                return []
            raise


class DirectoryStaging(Staging):
    """``<root>/.det_core-tmp/<storage_id>.<owner>/``: ``tree`` becomes the checkpoint, ``part-N`` belongs to rank N.

    Args:
        store: store of the staging directory; for an object store, the local scratch directory.
        ticket: name of the staging directory.
        storage_id: the checkpoint's name.
        part: the rank, which writes into a directory of its own; None to write straight into ``tree``.
    """

    def __init__(self, store: DirectoryStore, ticket: str, storage_id: str, part: int | None) -> None:
        self._store = store
        self._disk = store.disk
        self.base = f"{store.root}/{STAGING_DIR}/{ticket}"
        self._tree = f"{self.base}/tree"
        self._own = self._tree
        if part is not None:
            self._own = f"{self.base}/part-{part}"
        self._is_chief = not part
        self._is_open = True
        self._touched = _clock.monotonic()
        self.ticket = ticket
        self.storage_id = storage_id

    @property
    def path(self) -> Path:
        """This rank's directory, created on first use."""
        self._disk.make_folders(self._own)
        return Path(self._own)

    def put(self, listing: Listing, progress: Progress | None = None) -> dict[str, FileEntry]:
        self._renew_lease()
        if not self._disk.is_folder(self.base):  # make_folders() would create it again, without the others' files
            raise self._lease_lost()
        self._disk.make_folders(self._tree, listing.directories)
        tasks = [CopyTask(p, s.path, s.size, f"{self._tree}/{p}") for p, s in listing.files.items()]
        return self._copier(progress).run(tasks)

    def scan_written(self) -> Listing:
        if not self._disk.is_folder(self._own):
            raise CheckpointError(f"the directory {self._own} of checkpoint {self.storage_id} was removed or replaced")
        listing = scan(self._disk, self._own)
        for reserved in (f"{self._own}/{META_DIR}", f"{self._own}/{METADATA_FILE}"):
            if self._disk.is_folder(reserved):
                self._disk.remove_tree(reserved)
            else:
                self._disk.remove_file(reserved)
        self._break_links(listing)
        return Listing(
            {p: SourceFile(f"{self._own}/{p}", s.size) for p, s in listing.files.items()}, listing.directories
        )

    def seal(self, listing: Listing, progress: Progress | None = None) -> dict[str, FileEntry]:
        """Hash and sync the files, and move them into the checkpoint."""
        self._renew_lease()
        entries = self._copier(progress).run([CopyTask(p, s.path, s.size) for p, s in listing.files.items()])
        if self._own != self._tree:
            self._disk.make_folders(self._tree, listing.directories)
            for path, source in listing.files.items():
                target = f"{self._tree}/{path}"
                self._disk.do("rename", target, os.rename, source.path, target)
        return entries

    def commit(
        self, files: Mapping[str, FileEntry], directories: Sequence[str], metadata: Mapping[str, Any], header: Header
    ) -> Manifest:
        """Write metadata.json and the manifest, sync them and every directory, rename, and sync the root."""
        disk = self._disk
        tree = self._tree
        text = encode_metadata(metadata)
        if not disk.is_folder(self.base):
            raise self._lease_lost()
        disk.make_folders(f"{tree}/{META_DIR}")
        manifest = Manifest({**files, METADATA_FILE: entry_of(text)}, tuple(directories), header)
        disk.write_file(f"{tree}/{METADATA_FILE}", text, mode=0o444)
        disk.write_file(f"{tree}/{MANIFEST_PATH}", manifest.encode(), mode=0o444)
        for path in (*manifest.directories, META_DIR, ""):
            disk.sync_folder(f"{tree}/{path}".rstrip("/"))
        publish(disk, tree, f"{self._store.root}/{self.storage_id}")
        self._is_open = False
        try:
            disk.remove_tree(self.base)
        except StorageError as e:
            log.warning("checkpoint %s is complete; cannot remove its staging directory: %s", self.storage_id, e)
        return manifest

    def abort(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        if not self._is_chief:
            for own in (self._own, self._copies):
                self._disk.remove_tree(own)
            return
        self._store._abandoned.add(self.ticket)  # if the removal fails, the next collection repeats it
        self._disk.remove_tree(self.base)
        self._store._abandoned.discard(self.ticket)

    def _touch(self) -> None:
        try:
            self._disk.do("touch", self.base, os.utime, self.base)
        except StorageError as e:
            if e.errno in NOT_FOUND:
                raise self._lease_lost() from e
            raise

    def _copier(self, progress: Progress | None) -> Copier:
        label = self._store._describe(self.storage_id)
        return Copier(self._disk, label, seal=True, progress=self._renewing(progress))

    @property
    def _copies(self) -> str:
        return f"{self.base}/copies-{os.path.basename(self._own)}"

    def _break_links(self, listing: Listing) -> None:
        """Replace links, and files that have other names, by copies."""
        # torch.save() to the other name would rewrite the bytes that both names have.
        shared = {p: s for p, s in listing.files.items() if s.shared}
        if not shared and not listing.links:
            return
        staging_path = self._copies
        self._disk.make_folders(staging_path)
        tasks = [CopyTask(p, s.path, s.size, f"{staging_path}/{i}") for i, (p, s) in enumerate(shared.items())]
        Copier(self._disk, self._store._describe(self.storage_id)).run(tasks)
        for link in sorted(listing.links):
            path = f"{self._own}/{link}"
            if self._disk.exists(path) and not self._disk.is_folder(path):
                self._disk.remove_file(path)
        self._disk.make_folders(self._own, listing.directories)
        for task in tasks:
            target = f"{self._own}/{task.name}"
            self._disk.do("rename", target, os.rename, task.target, target)
        self._disk.remove_tree(staging_path)


def publish(disk: Disk, tree: str, final: str) -> None:
    """Give a complete checkpoint its name; if that cannot be made durable, take it back.

    Args:
        disk: the file system.
        tree: directory of the checkpoint, all of it on disk.
        final: ``<root>/<storage_id>``.

    Raises:
        StorageError: If the disk refused, or the name is taken.
    """
    if disk.exists(final):  # rename() silently replaces an empty directory
        raise disk.error("commit", final, FileExistsError(errno.EEXIST, "a checkpoint of that ID exists"))
    disk.do("rename", final, os.rename, tree, final)
    try:
        disk.sync_folder(os.path.dirname(final))
    except StorageError:
        disk.do("rename", tree, os.rename, final, tree)
        raise


class DirectoryCheckpoint(StoredCheckpoint):
    """The files of one checkpoint, and its manifest."""

    path: Path

    def __init__(self, store: DirectoryStore, storage_id: str, manifest: Manifest) -> None:
        super().__init__(store, storage_id, manifest)
        self.path = Path(store.root, storage_id)

    def check(
        self,
        names: Collection[str],
        *,
        part: int = 0,
        parts: int = 1,
        digests: bool = True,
        progress: Progress | None = None,
    ) -> None:
        chunk = self.manifest.chunk_size
        work = split_work(pieces(self._tasks(names, str(self.path)), chunk), part, parts, chunk)
        with self._unless_deleted():
            self._check_folders(piece.task.name for piece in work)
            if digests and self.manifest.verified:
                self._copier(progress).process(work)
            else:
                for piece in work:
                    self._check_size(piece)

    def copy_to(
        self, folder: Path, names: Collection[str], directories: Collection[str], progress: Progress | None = None
    ) -> None:
        self._store.disk.make_folders(os.fspath(folder), parent_folders(names).union(directories))
        with self._unless_deleted():
            self._check_folders(names)
            self._copier(progress).run(self._tasks(names, str(self.path), folder))

    @contextmanager
    def check_unchanged(self) -> Iterator[None]:
        # By sizes and times: permissions do not stop root.
        before = {name: self._identity(name) for name in self.manifest.files}
        yield
        try:
            changed = [name for name, identity in before.items() if self._identity(name) != identity]
            if changed:  # files that were deleted meanwhile were not written to
                left = self._store.open(self.storage_id).manifest.files
                changed = [name for name in changed if name in left]
        except CheckpointNotFound:
            return
        except StorageError as e:
            return log.warning("cannot check whether %s was written to: %s", self._label, e)
        if changed:
            names = ", ".join(changed[:3])
            if len(changed) > 3:
                names += ", …"
            raise CheckpointCorrupt(
                f"{self._label}: {names} was written to while it was restored from: only read from the directory of "
                "restore_path(); files of download() may be changed"
            )

    def _identity(self, name: str) -> tuple[int, int, int] | None:
        status = self._store.disk.status(f"{self.path}/{name}")
        if status is None:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _copier(self, progress: Progress | None) -> Copier:
        manifest = self.manifest
        stored = manifest.verified
        return Copier(self._store.disk, self._label, chunk_size=manifest.chunk_size, stored=stored, progress=progress)

    def _check_folders(self, names: Iterable[str]) -> None:
        """Check that no directory of these files has become a link out of the checkpoint."""
        top = os.path.realpath(self.path)
        for folder in parent_folders(names):
            real = os.path.realpath(f"{self.path}/{folder}")
            if real != top and not real.startswith(top + "/"):
                raise CheckpointCorrupt(f"{self._label}: its directory {folder} is a link to {real}, outside of it")

    def _check_size(self, piece: ChunkRange) -> None:
        task = piece.task
        look: Callable[[str], os.stat_result] = os.stat
        if self.manifest.verified:  # a checkpoint of det_core has no links; one of others may
            look = os.lstat
        try:
            status = self._store.disk.do("look at", task.source, look, task.source)
        except StorageError as e:
            if e.errno in NOT_FOUND:
                raise CheckpointCorrupt(f"{self._label}: {task.name} is missing") from e
            raise
        check_stored(self._label, task.name, task.size, status)

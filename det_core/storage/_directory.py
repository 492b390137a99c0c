"""A directory as a checkpoint store.

A checkpoint is written aside, in ``<root>/.det_core-tmp/<storage_id>.<owner>/``, every file and folder is synced, and
then one rename makes it ``<root>/<storage_id>``. A deletion renames it back aside, under the name of who deletes. So
the folders aside are the marks of writers and deleters, and nothing in the root is ever half there.
"""

from __future__ import annotations

import builtins
import errno
import logging
import os
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
NOT_FOUND = (errno.ENOENT, errno.ENOTDIR)


class DirectoryStore(Store):
    """Checkpoints as folders of one directory, which all ranks split_work. Nothing is made before the first write.

    Args:
        root: the directory.
        disk: the file system; tests give one that fails.
        visibility_timeout: maximum wait in seconds for a directory that another rank has made: a network file system
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
        """For whom all is there that is needed, and who has collected what others left."""

    def begin(self, storage_id: str, owner: Owner) -> DirectoryStaging:
        """Make a staging folder; before ``owner``'s first, and whenever the root is gone, make and collect."""
        staging = DirectoryStaging(self, f"{check_storage_id(storage_id)}.{owner.tag}", storage_id, None)
        self.make_staging_dir(staging.base, owner)
        try:
            self.disk.do("make folder", staging.base, os.mkdir, f"{staging.base}/tree")
        except StorageError:
            staging.abort()
            raise
        return staging

    def make_staging_dir(self, path: str, owner: Owner) -> None:
        """Make a folder aside, and before an owner's first what it needs."""
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
            log.warning("what a dead writer left stays: %s", e)
        self.disk.do("make folder", path, os.mkdir, path)
        self._writer = owner

    def join(self, ticket: str, part: int) -> DirectoryStaging:
        """Wait to see the staging folder that the chief made: it has a name that nothing else has."""
        parsed = Owner.parse(ticket)
        assert parsed is not None, f"{ticket} is no ticket"
        staging = DirectoryStaging(self, ticket, parsed[0], part)
        deadline = _clock.monotonic() + self._visibility_timeout
        while not self.disk.is_folder(staging.base):
            if _clock.monotonic() > deadline:
                raise StorageError(
                    errno.ENOENT,
                    f"{self._label}: this process does not see {staging.base}, which the chief has just made. A "
                    "sharded checkpoint needs a directory that every rank has mounted at the same path",
                )
            time.sleep(0.05)
            self._entries(os.path.dirname(staging.base))  # listing the one above makes a network file system look
        return staging

    def put_file(self, source: Path, name: str) -> None:
        size = self.disk.do("look at", str(source), os.stat, source).st_size
        with self._replacing(self._beside(name)) as aside:
            Copier(self.disk, str(source), growing=True).run([CopyTask(name, os.fspath(source), size, aside)])
            with self.disk.open_fd(aside, os.O_RDONLY) as fd:
                self.disk.do("sync", aside, os.fsync, fd)

    def remove_folder(self, folder: str) -> None:
        self.disk.remove_tree(f"{self.root}/{self._beside(folder)}")

    def check_writable(self) -> None:
        try:
            super().check_writable()
        except StorageError as e:
            raise StorageError(e.errno, f"{e.args[-1]}: {directory_advice(self.root)}") from e

    # What Store asks for.

    def _read(self, path: str, start: int = 0, end: int | None = None) -> bytes | None:
        path = f"{self.root}/{path}"
        try:
            # O_NONBLOCK: where somebody has put a FIFO, an open would hang.
            with self.disk.open_fd(path, os.O_RDONLY | os.O_NONBLOCK) as fd:
                size = self.disk.do("look at", path, os.fstat, fd).st_size
                start = max(0, size + start) if start < 0 else start
                end, parts = size if end is None else min(end, size), []
                while start < end and (part := self.disk.do("read", path, os.pread, fd, end - start, start)):
                    parts.append(part)
                    start += len(part)
                return b"".join(parts)
        except StorageError as e:
            if e.errno in NOT_FOUND:
                return None
            raise

    def _write(self, path: str, data: bytes, *, durable: bool = True) -> None:
        if not durable:  # a mark: where there is no store yet, none is made for it
            if self.disk.is_folder(os.path.realpath(self.root)):
                self._make_aside()
            return self.disk.write_file(f"{self.root}/{path}", data, sync=False)
        with self._replacing(path) as aside:
            self.disk.write_file(aside, data, mode=0o444)

    @contextmanager
    def _replacing(self, path: str) -> Iterator[str]:
        """A name aside; what the block writes there takes the place of ``path`` in one step, durably."""
        self._make_root()
        aside, target = f"{self.root}/{STAGING_DIR}/{TEMP_PREFIX}{os.urandom(8).hex()}", f"{self.root}/{path}"
        try:
            yield aside
            above = os.path.dirname(target)
            self.disk.make_durable_folder(above)
            self.disk.do("rename", target, os.rename, aside, target)
            self.disk.sync_folder(above)
        except BaseException:
            self.disk.remove_file(aside)
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
        # What a link leads to is seen when it is read: asking for it here raises where that is not permitted.
        return [e.name for e in names if e.is_symlink() or e.is_dir()]

    def _list_leases(self) -> dict[str, float]:
        now, found = _clock.now(), {}
        for entry in self._entries(f"{self.root}/{STAGING_DIR}"):
            if (status := self.disk.status(entry.path)) is not None:
                found[entry.name] = now - status.st_mtime
        return found

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
        self._make_aside()
        self._unpublish_and_remove(path, storage_id, durable=True)

    def _discard(self, storage_id: str, marks: Collection[str]) -> bool:
        for name in marks:
            self._unpublish_and_remove(f"{self.root}/{STAGING_DIR}/{name}", storage_id)
        return True

    def _unpublish_and_remove(self, path: str, storage_id: str, *, durable: bool = False) -> None:
        """Remove a folder, first from where others find it: a writer that lives after all cannot commit half of it."""
        aside = f"{self.root}/{STAGING_DIR}/{storage_id}.{Owner.current().tag}"
        try:
            if path != aside:
                self.disk.remove_tree(aside)  # what this process failed to remove before
                self.disk.do("rename", path, os.rename, path, aside)
        except StorageError as e:
            if e.errno in NOT_FOUND:
                return
            raise
        if durable:
            self.disk.sync_folder(self.root)
        self.disk.remove_tree(aside)

    def _make_root(self) -> None:
        self.disk.make_durable_folder(self.root)
        self._make_aside()

    def _make_aside(self) -> None:
        """Make the folder for what is under way; whoever may write into the root may write into it."""
        aside = f"{self.root}/{STAGING_DIR}"
        if not self.disk.is_folder(aside):
            self.disk.make_folders(aside)
            mode = stat.S_IMODE(self.disk.do("look at", self.root, os.stat, self.root).st_mode)
            self.disk.do("set the permissions of", aside, os.chmod, aside, mode)

    def _entries(self, path: str) -> builtins.list[os.DirEntry[str]]:
        """What lies in a folder; nothing if there is none."""
        try:
            return self.disk.entries(path)
        except StorageError as e:
            if e.errno in NOT_FOUND:
                return []
            raise


class DirectoryStaging(Staging):
    """``<root>/.det_core-tmp/<storage_id>.<owner>/``: ``tree`` will be the checkpoint, ``part-N`` is of rank N.

    Args:
        store: where the folder lies; for an object store, the scratch folder of this machine.
        ticket: the staging folder's name.
        storage_id: the checkpoint's name.
        part: the rank that writes into a folder of its own; None: straight into ``tree``.
    """

    def __init__(self, store: DirectoryStore, ticket: str, storage_id: str, part: int | None) -> None:
        self._store, self._disk = store, store.disk
        self.base = f"{store.root}/{STAGING_DIR}/{ticket}"
        self._tree = f"{self.base}/tree"
        self._own = self._tree if part is None else f"{self.base}/part-{part}"
        self._chief, self._open = not part, True
        self._touched = _clock.monotonic()
        self.ticket, self.storage_id = ticket, storage_id

    @property
    def path(self) -> Path:
        """This rank's folder, made on first use."""
        self._disk.make_folders(self._own)
        return Path(self._own)

    def put(self, listing: Listing, progress: Progress | None = None) -> dict[str, FileEntry]:
        self._renew_lease()
        if not self._disk.is_folder(self.base):  # else it would be made again, without what others had put
            raise self._lease_lost()
        self._disk.make_folders(self._tree, listing.directories)
        jobs = [CopyTask(p, s.path, s.size, f"{self._tree}/{p}") for p, s in listing.files.items()]
        return self._copier(progress).run(jobs)

    def scan_written(self) -> Listing:
        if not self._disk.is_folder(self._own):
            raise CheckpointError(f"the folder {self._own} of checkpoint {self.storage_id} was removed or replaced")
        listing = scan(self._disk, self._own)
        for ours in (f"{self._own}/{META_DIR}", f"{self._own}/{METADATA_FILE}"):
            (self._disk.remove_tree if self._disk.is_folder(ours) else self._disk.remove_file)(ours)
        self._break_links(listing)
        return Listing(
            {p: SourceFile(f"{self._own}/{p}", s.size) for p, s in listing.files.items()}, listing.directories
        )

    def seal(self, listing: Listing, progress: Progress | None = None) -> dict[str, FileEntry]:
        """Hash and sync what was written, and move it into the checkpoint."""
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
        """Write metadata.json and the manifest, sync them and every folder, rename, and sync the root."""
        disk, tree, text = self._disk, self._tree, encode_metadata(metadata)
        if not disk.is_folder(self.base):
            raise self._lease_lost()
        disk.make_folders(f"{tree}/{META_DIR}")
        manifest = Manifest({**files, METADATA_FILE: entry_of(text)}, tuple(directories), header)
        disk.write_file(f"{tree}/{METADATA_FILE}", text, mode=0o444)
        disk.write_file(f"{tree}/{MANIFEST_PATH}", manifest.encode(), mode=0o444)
        for path in (*manifest.directories, META_DIR, ""):
            disk.sync_folder(f"{tree}/{path}".rstrip("/"))
        publish(disk, tree, f"{self._store.root}/{self.storage_id}")
        self._open = False
        try:
            disk.remove_tree(self.base)
        except StorageError as e:
            log.warning("checkpoint %s is complete, but its empty staging folder stays: %s", self.storage_id, e)
        return manifest

    def abort(self) -> None:
        if not self._open:
            return
        self._open = False
        if not self._chief:
            for own in (self._own, self._copies):
                self._disk.remove_tree(own)
            return
        self._store._abandoned.add(self.ticket)
        self._disk.remove_tree(self.base)
        self._store._abandoned.discard(self.ticket)

    def _touch(self) -> None:
        try:
            self._disk.do("touch", self.base, os.utime, self.base)
        except StorageError as e:
            raise self._lease_lost() if e.errno in NOT_FOUND else e from e

    def _copier(self, progress: Progress | None) -> Copier:
        told = self._renewing(progress)
        return Copier(self._disk, self._store._describe(self.storage_id), seal=True, progress=told)

    @property
    def _copies(self) -> str:
        return f"{self.base}/copies-{os.path.basename(self._own)}"

    def _break_links(self, listing: Listing) -> None:
        """Put copies in place of links, and of files that have other names.

        ``torch.save`` onto the other name rewrites the bytes that both have.
        """
        shared = {p: s for p, s in listing.files.items() if s.shared}
        if not shared and not listing.links:
            return
        aside = self._copies
        self._disk.make_folders(aside)
        jobs = [CopyTask(p, s.path, s.size, f"{aside}/{i}") for i, (p, s) in enumerate(shared.items())]
        Copier(self._disk, self._store._describe(self.storage_id)).run(jobs)
        for link in sorted(listing.links):
            path = f"{self._own}/{link}"
            if self._disk.exists(path) and not self._disk.is_folder(path):
                self._disk.remove_file(path)
        self._disk.make_folders(self._own, listing.directories)
        for job in jobs:
            target = f"{self._own}/{job.name}"
            self._disk.do("rename", target, os.rename, job.target, target)
        self._disk.remove_tree(aside)


def publish(disk: Disk, tree: str, final: str) -> None:
    """Give a complete checkpoint its name; if that cannot be made durable, take it back.

    Args:
        disk: the file system.
        tree: where it is, all of it on the disk.
        final: ``<root>/<storage_id>``.

    Raises:
        StorageError: the disk refused, or something has that name.
    """
    if disk.exists(final):  # rename replaces an empty folder without a word
        raise disk.error("commit", final, FileExistsError(errno.EEXIST, "a checkpoint of that id is there"))
    disk.do("rename", final, os.rename, tree, final)
    try:
        disk.sync_folder(os.path.dirname(final))
    except StorageError:
        disk.do("rename", tree, os.rename, final, tree)
        raise


class DirectoryCheckpoint(StoredCheckpoint):
    """The files of one checkpoint, and what its manifest says of them."""

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
        work = split_work(pieces(self._jobs(names, str(self.path)), chunk), part, parts, chunk)
        with self._unless_deleted():
            self._check_folders(piece.job.name for piece in work)
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
            self._copier(progress).run(self._jobs(names, str(self.path), folder))

    @contextmanager
    def check_unchanged(self) -> Iterator[None]:
        """Look at sizes and times before and after: root is not stopped by permissions."""
        before = {name: self._identity(name) for name in self.manifest.files}
        yield
        try:
            changed = [name for name, found in before.items() if self._identity(name) != found]
            if changed:  # what was deleted meanwhile, in part or whole, was not written to
                left = self._store.open(self.storage_id).manifest.files
                changed = [name for name in changed if name in left]
        except CheckpointNotFound:
            return
        except StorageError as e:
            return log.warning("whether %s was written to is not known: %s", self._label, e)
        if changed:
            raise CheckpointCorrupt(
                f"{self._label}: {', '.join(changed[:3])}{', …' if changed[3:] else ''} was written to while it was "
                "restored from. Only read from the folder of restore_path(); what download() gives may be changed"
            )

    def _identity(self, name: str) -> tuple[int, int, int] | None:
        found = self._store.disk.status(f"{self.path}/{name}")
        return None if found is None else (found.st_ino, found.st_size, found.st_mtime_ns)

    def _copier(self, progress: Progress | None) -> Copier:
        manifest = self.manifest
        stored = manifest.verified
        return Copier(self._store.disk, self._label, chunk_size=manifest.chunk_size, stored=stored, progress=progress)

    def _check_folders(self, names: Iterable[str]) -> None:
        """See that no folder of these files has become a link out of the checkpoint."""
        top = os.path.realpath(self.path)
        for folder in parent_folders(names):
            real = os.path.realpath(f"{self.path}/{folder}")
            if real != top and not real.startswith(top + "/"):
                raise CheckpointCorrupt(f"{self._label}: its folder {folder} leads to {real}, outside the checkpoint")

    def _check_size(self, piece: ChunkRange) -> None:
        job = piece.job
        look = os.lstat if self.manifest.verified else os.stat
        try:
            found = self._store.disk.do("look at", job.source, look, job.source)
        except StorageError as e:
            if e.errno in NOT_FOUND:
                raise CheckpointCorrupt(f"{self._label}: {job.name} is missing") from e
            raise
        check_stored(self._label, job.name, job.size, found)

"""Where a machine keeps copies of checkpoints whose store lies elsewhere, for all jobs that run on it.

One folder per checkpoint, named by the digest of its manifest, so that what the store says now decides what a copy
is good for::

    <cache>/<digest>/<storage_id>/…       the files, each renamed in when its content has been compared
    <cache>/<digest>/users/<id>.lock      a process that reads it, or fetches into …/aside-<id>, holds this lock
    <cache>/<digest>/entry.json           its bytes; the time of its last change is that of the last use
    <cache>/private-<random>/…            the same, for one use only
    <cache>/locks/…                       held to change an entry; an entry has always the same

Locks are ``flock``: the kernel drops them with their process, so what dead ones left half done can be told, and taken
over. Nothing is ever believed for being there: whoever uses a file compares it with the manifest.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from det_core.errors import StorageError
from det_core.storage import Disk, Manifest

if TYPE_CHECKING:
    from filelock import BaseFileLock

log = logging.getLogger("det_core.checkpoint")
LOCKS = 4096
"""Entries share so many locks, so that these need not be removed; two that share one only wait for each other."""
PATIENCE = 10.0
"""Seconds between two lines that say who is waited for."""
PRIVATE = "private-"
GONE = ".gone-"
RECORD = "entry.json"


@dataclass(frozen=True)
class Entry:
    """The copy of one checkpoint, in a folder of its own."""

    folder: str
    storage_id: str

    @property
    def name(self) -> str:
        """What it is called in the cache."""
        return os.path.basename(self.folder)

    @property
    def path(self) -> str:
        """The folder with the checkpoint's files."""
        return f"{self.folder}/{self.storage_id}"

    @property
    def record(self) -> str:
        """The file that tells its size, and by its time the last use."""
        return f"{self.folder}/{RECORD}"


class _Known(NamedTuple):
    """What is known of an entry without its lock."""

    kept: bool
    """Whether it is good for a later use: not a private one, nor one whose maker has died before anything was in it."""
    used: float
    name: str
    size: int


class CheckpointCache:
    """A folder of entries, whose bytes stay below a limit, but for those in use.

    Args:
        folder: made at the first use.
        limit: bytes. The entries used least recently go first; those in use stay whatever they hold.
        disk: the door to the file system.
    """

    def __init__(self, folder: Path, limit: int, disk: Disk | None = None) -> None:
        self.folder = os.fspath(folder)
        self.limit = limit
        self.disk = disk or Disk(f"cache {folder}")
        self.hint = "make room there, or set DET_CORE_CACHE to a folder on a larger disk"

    def name_of(self, manifest: Manifest, *, private: bool) -> str:
        """What the entry of a checkpoint is called.

        Args:
            manifest: what is to be in it.
            private: it is for this use only, as is anything that cannot be compared with a manifest.
        """
        from xxhash import xxh3_128_hexdigest

        if private or not manifest.verified:
            return PRIVATE + os.urandom(12).hex()
        return xxh3_128_hexdigest(manifest.encode())

    def entry(self, name: str, storage_id: str) -> Entry:
        """The entry of that name; nothing is made yet."""
        return Entry(f"{self.folder}/{name}", storage_id)

    def has_room_for(self, manifest: Manifest) -> bool:
        """Whether a whole checkpoint may stay here, and its bytes lie on this disk twice."""
        size = sum(file.size for file in manifest.files.values())
        if not manifest.verified or size > self.limit:
            return False
        self.disk.make_folders(self.folder)
        return 2 * size <= self._free()

    @contextmanager
    def changing(self, entry: Entry) -> Iterator[None]:
        """Be the only process that changes an entry; another one that does is waited for while it lives."""
        with self._locked(self._lock_of(entry.name), f"checkpoint {entry.storage_id} in the cache {self.folder}"):
            yield

    @contextmanager
    def using(self, entry: Entry) -> Iterator[str]:
        """Keep an entry from being removed; the value is where this user may put what it fetches.

        Begun while the entry is being changed, so that nobody removes it meanwhile.
        """
        user = os.urandom(8).hex()
        path = f"{entry.folder}/users/{user}.lock"
        try:
            with self._locked(path, entry.folder):
                yield f"{entry.folder}/aside-{user}"
        finally:
            self._leave(entry, path)

    def reserve(self, entry: Entry, size: int, missing: int) -> None:
        """Make room, and note the size that an entry will have.

        Args:
            entry: one that this process changes and uses.
            size: its bytes when it is complete.
            missing: those of them that are not there yet.

        Raises:
            StorageError: they do not fit on the disk.
        """
        with self._locked(f"{self.folder}/locks/room", "room in the cache"):
            self._sweep(spare=entry.name, size=size, missing=missing)
            free = self._free()
            if missing > free:
                needs = f"checkpoint {entry.storage_id} needs {missing} bytes in the cache {self.folder}"
                raise StorageError(errno.ENOSPC, f"{needs}, where {free} are free: {self.hint}")
            self._note(entry, size)

    def trim(self) -> None:
        """Remove what is over the limit, and what private entries dead processes left."""
        known = self._entries()
        if sum(e.size for e in known) > self.limit or not all(e.kept for e in known):
            with self._locked(f"{self.folder}/locks/room", "room in the cache"):
                self._sweep()

    def abandoned(self, entry: Entry) -> list[str]:
        """Where users that are dead put what they fetched, under :meth:`changing`."""
        living = self._living(entry.folder)
        asides = [e.path for e in self._listed(entry.folder) if e.name.startswith("aside-")]
        return [path for path in asides if path.rpartition("/aside-")[2] not in living]

    def _leave(self, entry: Entry, lock: str) -> None:
        """An entry is not used any more; what goes wrong now is no reason to fail."""
        try:
            self.disk.remove_file(lock)
            if self.disk.exists(entry.record):
                self.disk.do("touch", entry.record, os.utime, entry.record)
            self.trim()
        except StorageError as e:
            if e.errno != errno.ENOENT:  # somebody else has removed it meanwhile
                log.warning("%s", e)

    def _sweep(self, spare: str | None = None, size: int = 0, missing: int = 0) -> None:
        """Remove entries, those used least recently first, until the rest fits; with the lock for room."""
        for found in self.disk.entries(self.folder):
            if found.name.startswith(GONE):  # who began to remove it had the lock for room, and died
                self._tried(self.disk.remove_tree, found.path)
        known = [e for e in self._entries() if e.name != spare]
        total = size + sum(e.size for e in known)
        for entry in sorted(known):
            if entry.kept and total <= self.limit and missing <= self._free():
                return
            if self._tried(self._remove, entry.name):
                total -= entry.size

    def _tried(self, remove: Callable[[str], bool | None], what: str) -> bool:
        """Whether something was removed. That it cannot be is no reason to fail: there may be room enough."""
        try:
            return remove(what) is True
        except StorageError as e:
            log.warning("%s", e)
            return False

    def _remove(self, name: str) -> bool:
        """Remove an entry, unless a process uses or changes it."""
        lock = self._lock_file(self._lock_of(name))
        if not self._acquired(lock, 0):
            return False
        try:
            if self._living(f"{self.folder}/{name}"):
                return False
            gone = f"{self.folder}/{GONE}{os.urandom(8).hex()}"
            self.disk.do("rename", gone, os.rename, f"{self.folder}/{name}", gone)
            self.disk.remove_tree(gone)
            return True
        finally:
            lock.release()

    def _living(self, folder: str) -> set[str]:
        """The users of an entry; the locks that dead ones left are removed."""
        found: set[str] = set()
        for entry in self._listed(f"{folder}/users"):
            lock = self._lock_file(entry.path)
            if not self._acquired(lock, 0):
                found.add(entry.name.removesuffix(".lock"))
                continue
            try:
                self.disk.remove_file(entry.path)
            finally:
                lock.release()
        return found

    def _entries(self) -> list[_Known]:
        found = []
        for entry in self._listed(self.folder):
            if entry.name == "locks" or entry.name.startswith("."):
                continue
            kept = not entry.name.startswith(PRIVATE)
            try:
                used = os.stat(f"{entry.path}/{RECORD}").st_mtime
                size = int(json.loads(Path(f"{entry.path}/{RECORD}").read_bytes())["bytes"])
            except (OSError, ValueError, KeyError, TypeError):
                kept, used, size = False, 0.0, 0
            found.append(_Known(kept, used, entry.name, size))
        return found

    def _note(self, entry: Entry, size: int) -> None:
        aside = f"{entry.folder}/.{RECORD}"
        self.disk.remove_file(aside)
        with self.disk.opened(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
            self.disk.write_all(fd, aside, json.dumps({"bytes": size, "storage_id": entry.storage_id}).encode())
        self.disk.do("rename", entry.record, os.rename, aside, entry.record)

    def _free(self) -> int:
        found = self.disk.do("look at", self.folder, os.statvfs, self.folder)
        return found.f_bavail * found.f_frsize

    def _listed(self, path: str) -> list[os.DirEntry[str]]:
        try:
            return self.disk.entries(path)
        except StorageError as e:
            if e.errno == errno.ENOENT:
                return []
            raise

    def _lock_of(self, name: str) -> str:
        from xxhash import xxh3_64_intdigest

        return f"{self.folder}/locks/{xxh3_64_intdigest(name.encode()) % LOCKS:03x}"

    @contextmanager
    def _locked(self, path: str, what: str) -> Iterator[None]:
        self.disk.make_folders(os.path.dirname(path))
        lock = self._lock_file(path)
        since = time.monotonic()
        while not self._acquired(lock, PATIENCE):
            log.warning("waiting for %s for %.0f s: another process has it", what, time.monotonic() - since)
        try:
            yield
        finally:
            lock.release()

    def _lock_file(self, path: str) -> BaseFileLock:
        from filelock import FileLock

        return FileLock(path, thread_local=False)

    def _acquired(self, lock: BaseFileLock, timeout: float) -> bool:
        from filelock import Timeout

        def attempt() -> bool:
            try:
                lock.acquire(timeout=timeout)
            except Timeout:
                return False
            return True

        return self.disk.do("lock", lock.lock_file, attempt)

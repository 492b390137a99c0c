"""A checkpoint that lies elsewhere: the ranks of a machine bring one copy of it up to date together."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from det_core.core._checkpoint._cache import CheckpointCache, Entry
from det_core.core._checkpoint._share import Votes, union, vote, weighed
from det_core.core._checkpoint._together import Together
from det_core.errors import CheckpointCorrupt, CheckpointNotFound, StorageError
from det_core.storage import DirectoryStore, Progress, Selector, StoredCheckpoint, folders_of

log = logging.getLogger("det_core.checkpoint")
Identity = tuple[int, int, int]
"""Inode, size and time of change of a file whose content was compared."""


class Share(NamedTuple):
    """What one rank does."""

    check: list[str]
    """Files that are there: compare them, and fetch again what differs."""
    fetch: list[str]
    """Files that are not."""
    left: frozenset[str]
    """Those of ``check`` that a dead process has left, whole or not."""


@dataclass
class Fetch:
    """One rank's part in bringing a machine's copy of a checkpoint up to date.

    Args:
        machine: the ranks of this machine.
        cache: where the copy is.
        checkpoint: the stored one, which is the truth.
        selector: which of its files this rank needs.
        known: by entry and file, what this process has compared already.
        private: the copy is for this use only.
        progress: told of the bytes copied and compared.
    """

    machine: Together
    cache: CheckpointCache
    checkpoint: StoredCheckpoint
    selector: Selector | None
    known: dict[str, dict[str, Identity]]
    private: bool = False
    progress: Progress | None = None
    _entry: Entry = field(init=False)

    @contextmanager
    def run(self) -> Iterator[Path]:
        """A folder with all that any rank of the machine selects, which stays while the block runs.

        Raises:
            CheckpointCorrupt: a file of the stored checkpoint differs from the manifest.
            StorageError: the store or this machine's disk refused; on every rank of the machine, if on any.
        """
        machine, manifest = self.machine, self.checkpoint.manifest
        self._entry = machine.chief(
            lambda: self.cache.entry(self.cache.name_of(manifest, private=self.private), self.checkpoint.storage_id)
        )
        with ExitStack() as use:
            with ExitStack() as change:
                machine.chief(lambda: change.enter_context(self.cache.changing(self._entry)))
                aside = machine.each(lambda: use.enter_context(self.cache.using(self._entry)))
                votes = machine.gather(lambda: vote(manifest, self.selector))
                shares = machine.chief(lambda: self._plan(votes or []))
                machine.each(lambda: self._bring(shares[machine.index], aside))
                machine.each(lambda: self._look(shares))
            yield Path(self._entry.path)

    @contextmanager
    def opened(self) -> Iterator[StoredCheckpoint]:
        """The same folder, to be copied from while the block runs."""
        with self.run():
            yield self._opened()

    def _plan(self, votes: Votes) -> list[Share]:
        """On the chief: who compares and who fetches what, after room was made for it."""
        manifest, path = self.checkpoint.manifest, self._entry.path
        selected = union(votes)
        wanted = set(manifest.resources) if selected is None else selected
        folders = folders_of(p for p in wanted if not p.endswith("/")).union(p for p in wanted if p.endswith("/"))
        for folder in ("", *sorted(folders)):
            self.cache.disk.make_folders(f"{path}/{folder}".rstrip("/"))
        there = {name for name in manifest.files if os.path.lexists(f"{path}/{name}")}
        left = self._take_over(wanted.difference(there))
        there |= left
        sizes = {name: manifest.files[name].size for name in wanted.intersection(manifest.files)}
        missing = {name: size for name, size in sizes.items() if name not in there}
        size = sum(manifest.files[name].size for name in there.union(missing))
        self.cache.reserve(self._entry, size, sum(missing.values()))
        ranks = range(self.machine.size)
        check = weighed({name: s for name, s in sizes.items() if name in there}, ranks)
        fetch = weighed(missing, ranks)
        return [Share(check[rank], fetch[rank], left) for rank in ranks]

    def _take_over(self, missing: set[str]) -> frozenset[str]:
        """What dead users had fetched comes in, to be compared like all else; returns its names."""
        disk = self.cache.disk
        found: set[str] = set()
        for aside in self.cache.abandoned(self._entry):
            for name in missing.difference(found).intersection(self.checkpoint.manifest.files):
                if _size(f"{aside}/{name}") == self.checkpoint.manifest.files[name].size:
                    target = f"{self._entry.path}/{name}"
                    disk.do("rename", target, os.rename, f"{aside}/{name}", target)
                    found.add(name)
            disk.remove_tree(aside)
        return frozenset(found)

    def _bring(self, share: Share, aside: str) -> None:
        """Compare and fetch this rank's share."""
        disk, path = self.cache.disk, self._entry.path
        bad = self._differing(share.check)
        for name in sorted(set(bad) - share.left):
            log.warning("%s/%s differs from the stored checkpoint: it is fetched again", path, name)
        names = share.fetch + bad
        if not names:
            return
        try:
            self.checkpoint.copy_out(Path(aside), names, [], self.progress)
            for name in names:
                disk.do("rename", f"{path}/{name}", os.rename, f"{aside}/{name}", f"{path}/{name}")
        except StorageError as e:
            if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise  # what has come is there for the next one
            disk.remove_tree(aside)
            raise StorageError(e.errno, f"{e.strerror} in the cache {self.cache.folder}: {self.cache.hint}") from e
        disk.remove_tree(aside)

    def _differing(self, names: Sequence[str]) -> list[str]:
        """Which files of the copy are not those of the manifest."""
        known = self.known.get(self._entry.name, {})
        new = [name for name in names if known.get(name, ()) != _identity(f"{self._entry.path}/{name}")]
        if not self._differ(new):
            return []
        return [name for name in new if self._differ([name])]

    def _differ(self, names: list[str]) -> bool:
        try:
            self._opened().check(names, progress=self.progress)
        except (CheckpointCorrupt, CheckpointNotFound, StorageError) as e:
            log.debug("%s", e)
            return True
        return False

    def _opened(self) -> StoredCheckpoint:
        """The copy as if it were the stored checkpoint."""
        store = DirectoryStore(self._entry.folder, disk=self.cache.disk)
        return store.open(self.checkpoint.storage_id, self.checkpoint.manifest)

    def _look(self, shares: list[Share]) -> None:
        """See that all is there; what any rank has compared counts for this process, while the files stay the same."""
        found: dict[str, Identity] = {}
        for name in (name for share in shares for name in share.check + share.fetch):
            if (identity := _identity(f"{self._entry.path}/{name}")) is None:
                lacks = f"{self._entry.path} lacks {name}, which a rank of this machine has just brought"
                how = "do all of them see the same folder there? Otherwise use DownloadMode.NoSharedDownload"
                raise StorageError(errno.ENOENT, f"{lacks}: {how}")
            found[name] = identity
        if not self.private:
            self.known.setdefault(self._entry.name, {}).update(found)


def _identity(path: str) -> Identity | None:
    """What tells a regular file from another one, or from itself after a change."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None


def _size(path: str) -> int | None:
    found = _identity(path)
    return None if found is None else found[1]

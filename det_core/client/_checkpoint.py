"""A checkpoint, as Python sees it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from det_core.core._checkpoint._download import download
from det_core.core._checkpoint._reader import open_on_all
from det_core.core._checkpoint._retention import commit_time
from det_core.core._rank_group import RankGroup
from det_core.errors import CheckpointCorrupt, StorageError
from det_core.storage import Header, Owner, Progress, Selector, Store, StoredCheckpoint

TOGETHER = 64
"""Files that are compared at a time; only among those of which one is damaged each is looked at by itself."""
FAILURES = 3
"""Files that the store may refuse one after the other before it is the store that is in trouble."""


class Checkpoint:
    """One checkpoint. Its manifest is read when it is first asked about.

    Attributes:
        storage_id: its id.
    """

    def __init__(self, store: Store, storage_id: str, header: Header | None, deleted: Callable[[str], None]) -> None:
        self._store = store
        self._header = header
        self._deleted = deleted
        self.storage_id = storage_id

    def __repr__(self) -> str:
        return f"Checkpoint({self.storage_id!r}, run_id={self.run_id!r}, steps_completed={self.steps_completed!r})"

    @property
    def run_id(self) -> str | None:
        """The run that wrote it; None: it was written by others, and nothing says by whom."""
        return self._header.run_id if self._header else None

    @property
    def restart(self) -> int | None:
        """The restart of the run that wrote it."""
        return self._header.restart if self._header else None

    @property
    def steps_completed(self) -> int | None:
        """How far training was."""
        if self._header is not None:
            return self._header.steps_completed
        steps = self.metadata.get("steps_completed")
        return steps if isinstance(steps, int) else None

    @property
    def time(self) -> float | None:
        """When it was committed, in seconds since the epoch."""
        return commit_time(self._header) if self._header else None

    @property
    def verified(self) -> bool:
        """Whether it has a manifest, with which its files can be compared. Those written by others have none."""
        return self._stored.manifest.verified

    @property
    def resources(self) -> dict[str, int]:
        """Path to size in bytes, sorted; folders end in a slash and have size 0."""
        return self._stored.manifest.resources

    @property
    def files(self) -> int:
        """How many files it has."""
        return len(self._stored.manifest.files)

    @property
    def size(self) -> int:
        """How many bytes its files have together."""
        return sum(file.size for file in self._stored.manifest.files.values())

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """What was remembered with it.

        Raises:
            CheckpointCorrupt: its metadata.json differs from the manifest.
        """
        return self._stored.metadata()

    @property
    def path(self) -> Path | None:
        """The folder it lies in; None where it must be downloaded to be read."""
        return self._stored.path

    def download(
        self, folder: str | os.PathLike[str], *, selector: Selector | None = None, progress: Progress | None = None
    ) -> None:
        """Copy it into a folder, comparing every byte with the manifest. If it raises, the folder is as it was.

        Args:
            folder: made if need be; what else is in it stays.
            selector: called with the paths of its files and folders; says which to copy.
            progress: called with the number of bytes copied since the last call.

        Raises:
            CheckpointCorrupt: a file is missing or differs; the message names it.
            StorageError: the store or the disk refused.
        """
        alone = RankGroup.alone("download")
        with self._store.read_lease(self.storage_id, Owner.current("client", 0)):
            stored = open_on_all(alone, self._store, self.storage_id)
            download(alone, self._store.disk, stored, os.path.abspath(os.fspath(folder)), selector, progress)

    def verify(self, progress: Progress | None = None) -> list[str]:
        """Compare every byte with the manifest; returns what is wrong, one line for each damaged file.

        One without a manifest (:attr:`verified` is False) cannot be compared: only that its files are there is seen.

        Args:
            progress: called with the number of bytes compared since the last call.

        Raises:
            CheckpointNotFound: it was deleted meanwhile.
            StorageError: the store is in trouble. A single file that cannot be read is damaged.
        """
        problems: list[str] = []
        with self._store.read_lease(self.storage_id, Owner.current("client", 0)):
            stored = self._store.open(self.storage_id)  # anew: it may be deleted until it is held
            names = iter(sorted(stored.manifest.files))
            while batch := list(islice(names, TOGETHER)):
                try:
                    stored.check(batch, progress=progress)
                except (CheckpointCorrupt, StorageError):
                    problems.extend(_damaged(stored, batch))
            if not problems:
                problems.extend(_contradiction(stored))
        return problems

    def delete(self) -> None:
        """Delete it, and note it in the journal of its run. It stops being listed before its bytes go.

        Doing it again is no error.

        Raises:
            StorageError: the store refused.
        """
        self._store.delete(self.storage_id)
        if self.run_id is not None:
            self._deleted(self.run_id)

    @cached_property
    def _stored(self) -> StoredCheckpoint:
        return self._store.open(self.storage_id)


def _contradiction(stored: StoredCheckpoint) -> Iterator[str]:
    """Yield how metadata.json contradicts the manifest, if it does."""
    try:
        stored.metadata()
    except CheckpointCorrupt as e:
        yield str(e)


def _damaged(stored: StoredCheckpoint, names: Sequence[str]) -> Iterator[str]:
    """What is wrong with each of these files."""
    refused = 0
    for name in names:
        try:
            stored.check([name])
            refused = 0
        except CheckpointCorrupt as e:
            yield str(e)
        except StorageError as e:
            refused += 1
            if refused == FAILURES:
                raise
            yield str(e.args[-1])

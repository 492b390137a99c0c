"""A checkpoint that is being written, as one rank sees it: the seam between who saves and where the bytes go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from det_core import _clock
from det_core.errors import CheckpointError
from det_core.storage._manifest import FileEntry, Header, Manifest
from det_core.storage._scan import Listing
from det_core.storage._threads import Progress

LEASE_RENEW_INTERVAL = 3600.0
"""Seconds after which a writer touches its mark again, so that it is not taken for given up after a day."""


class Staging(ABC):
    """A checkpoint being written, as one rank sees it. Not listed before :meth:`commit`, and gone after :meth:`abort`.

    One rank makes it with :meth:`Store.begin`; the others join by its ticket. Each rank either puts a folder it has
    read (:meth:`put`), or writes into its own :attr:`path`, scans what it has written (:meth:`scan_written`) and
    seals it (:meth:`seal`). At last the first rank commits.

    Attributes:
        storage_id: the checkpoint's name.
        ticket: what the other ranks join with; also the name of the mark.
    """

    storage_id: str
    ticket: str
    _touched: float

    @property
    @abstractmethod
    def path(self) -> Path:
        """A folder of this rank alone, on this machine, to write files into."""

    def start(self) -> None:  # noqa: B027
        """Do what comes before the first file is put, on the first rank before the others. Again it does nothing.

        A single writer need not call it.

        Raises:
            StorageError: the store refused.
        """

    @abstractmethod
    def put(self, listing: Listing, progress: Progress | None = None) -> dict[str, FileEntry]:
        """Copy the files of a foreign folder in, durably; returns size and digests by path."""

    @abstractmethod
    def scan_written(self) -> Listing:
        """What lies in :attr:`path`, made fit to be taken.

        Names at its top that are ours are removed. Links, and files that have other names, become copies, so that
        nobody else has a hand on the bytes; so no source of the listing is ``shared`` and it has no ``links``.

        Raises:
            ValueError: a link leads out of the folder, or there is what no checkpoint can hold.
            CheckpointError: the folder is gone.
        """

    @abstractmethod
    def seal(self, listing: Listing, progress: Progress | None = None) -> dict[str, FileEntry]:
        """Make files that lie in :attr:`path` part of the checkpoint, durably; returns size and digests by path.

        Called once, with what :meth:`scan_written` gave, but for the files that another rank brings. One pass over the
        bytes.
        """

    @abstractmethod
    def commit(
        self, files: Mapping[str, FileEntry], directories: Sequence[str], metadata: Mapping[str, Any], header: Header
    ) -> Manifest:
        """Write metadata.json and the manifest and make the checkpoint listed, in one step.

        Raises:
            CheckpointError: somebody collected what was put, as its mark had not been touched for a day.
            StorageError: the store refused, or has a checkpoint of that id.
        """

    @abstractmethod
    def abort(self) -> None:
        """Give the checkpoint up: on the first rank every byte is removed. Called again it does nothing.

        On another rank what it alone has is removed, as a folder of this machine, and what it did not finish to put.
        It calls this in the end whatever became of the checkpoint, which stays as it is if it was committed.
        """

    @abstractmethod
    def _touch(self) -> None:
        """Touch the mark; raises as :meth:`_lease_lost` says if it is gone."""

    def _renew_lease(self) -> None:
        """Touch the mark, if that was not done for an hour."""
        if _clock.monotonic() - self._touched > LEASE_RENEW_INTERVAL:
            self._touch()
            self._touched = _clock.monotonic()

    def _renewing(self, progress: Progress | None) -> Progress:
        """``progress``, which also keeps the mark young."""

        def told(done: int) -> None:
            self._renew_lease()
            if progress is not None:
                progress(done)

        return told

    def _lease_lost(self) -> CheckpointError:
        return CheckpointError(
            f"checkpoint {self.storage_id} cannot be saved: what was written of it was removed meanwhile, by a "
            "restart of its run, or as nobody had touched it for 24 hours"
        )

"""A checkpoint that is being written, as one rank sees it: the interface between writers and stores."""

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
"""Seconds between two renewals of a writer's lease, which is valid for a day."""


class Staging(ABC):
    """A checkpoint that is being written. It is listed after :meth:`commit`, and removed by :meth:`abort`.

    One rank creates it by :meth:`Store.begin`; the others join by its ticket. Each rank either puts a directory of the
    user (:meth:`put`), or writes into its own :attr:`path`, scans what it has written (:meth:`scan_written`) and seals
    it (:meth:`seal`). Finally the first rank commits.

    Attributes:
        storage_id: the checkpoint's name.
        ticket: the name by which other ranks join, and that of the lease.
    """

    storage_id: str
    ticket: str
    _touched: float

    @property
    @abstractmethod
    def path(self) -> Path:
        """Local directory for the files of this rank alone."""

    def start(self) -> None:  # noqa: B027
        """Prepare the store for the first file, on the first rank before all others. Starting twice has no effect.

        A single writer need not call it.

        Raises:
            StorageError: If the store refused.
        """

    @abstractmethod
    def put(self, listing: Listing, progress: Progress | None = None) -> dict[str, FileEntry]:
        """Copy the files of a user's directory in, durably, and return their manifest entries by path."""

    @abstractmethod
    def scan_written(self) -> Listing:
        """Scan :attr:`path`, replacing links by copies.

        Reserved names at its top are removed. Links, and files that have other names, become copies, so that nobody
        else can change their bytes; in the listing no source is ``shared``, and there are no ``links``.

        Raises:
            ValueError: If a link leads out of the directory, or an entry cannot be in a checkpoint.
            CheckpointError: If the directory was removed.
        """

    @abstractmethod
    def seal(self, listing: Listing, progress: Progress | None = None) -> dict[str, FileEntry]:
        """Move files of :attr:`path` into the checkpoint, durably, and return their manifest entries by path.

        Called once, with the result of :meth:`scan_written` less the files that another rank brings. Reads the bytes
        once.
        """

    @abstractmethod
    def commit(
        self, files: Mapping[str, FileEntry], directories: Sequence[str], metadata: Mapping[str, Any], header: Header
    ) -> Manifest:
        """Write metadata.json and the manifest, and list the checkpoint, in one step.

        Raises:
            CheckpointError: If the files were collected, as the lease had not been renewed for a day.
            StorageError: If the store refused, or has a checkpoint of that ID.
        """

    @abstractmethod
    def abort(self) -> None:
        """Abort the checkpoint: the first rank removes every byte. Aborting twice has no effect.

        Other ranks remove their local files and unfinished uploads. They call it at the end in any case; a committed
        checkpoint stays as it is.
        """

    @abstractmethod
    def _touch(self) -> None:
        """Renew the lease.

        Raises:
            CheckpointError: If it was removed.
        """

    def _renew_lease(self) -> None:
        """Renew the lease if that was not done for an hour."""
        if _clock.monotonic() - self._touched > LEASE_RENEW_INTERVAL:
            self._touch()
            self._touched = _clock.monotonic()

    def _renewing(self, progress: Progress | None) -> Progress:
        """Return ``progress`` extended by the renewal of the lease."""

        def report(done: int) -> None:
            self._renew_lease()
            if progress is not None:
                progress(done)

        return report

    def _lease_lost(self) -> CheckpointError:
        """Return the error of a checkpoint whose files were collected."""
        return CheckpointError(
            f"checkpoint {self.storage_id} cannot be saved: its files were removed meanwhile, by a restart of its run, "
            "or as its lease had not been renewed for 24 hours"
        )

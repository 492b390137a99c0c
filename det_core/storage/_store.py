"""What a checkpoint store is: the seam between the checkpoint context and wherever the bytes lie."""

from __future__ import annotations

import builtins
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from det_core.storage._copy import Progress
from det_core.storage._io import Disk
from det_core.storage._manifest import FileEntry, Header, Manifest
from det_core.storage._owner import Owner
from det_core.storage._scan import Listing

WHOLE = ("**/*",)
"""The globs that delete a whole checkpoint."""


class Staging(Protocol):
    """A checkpoint being written, as one rank sees it. Not listed before :meth:`commit`, and gone after :meth:`abort`.

    One rank makes it with :meth:`Store.begin`; the others join by its ticket. Each rank either puts a folder it has
    read (:meth:`put`), or writes into its own :attr:`path`, looks at what is :meth:`written` and lets the checkpoint
    :meth:`take` it. At last the first rank commits.
    """

    @property
    def storage_id(self) -> str: ...

    @property
    def ticket(self) -> str:
        """What the other ranks join with."""

    @property
    def path(self) -> Path:
        """A folder of this rank alone, on this machine, to write files into."""

    def put(self, listing: Listing, progress: Progress | None = None) -> dict[str, FileEntry]:
        """Copy the files of a foreign folder in, durably; returns size and digests by path."""

    def written(self) -> Listing:
        """What lies in :attr:`path`, made fit to be taken.

        Names at its top that are ours are removed. Links, and files that have other names, become copies, so that
        nobody else has a hand on the bytes; so no source of the listing is ``shared`` and it has no ``links``.

        Raises:
            ValueError: a link leads out of the folder, or there is what no checkpoint can hold.
            CheckpointError: the folder is gone.
        """

    def take(self, listing: Listing, progress: Progress | None = None) -> dict[str, FileEntry]:
        """Make files that lie in :attr:`path` part of the checkpoint, durably; returns size and digests by path.

        Called once, with what :meth:`written` gave, but for the files that another rank brings. One pass over the
        bytes.
        """

    def local(self, name: str) -> Path | None:
        """Where a file that was written into :attr:`path` lies on this machine, be it taken meanwhile or not.

        None: nowhere; so it is after a commit or an abort.
        """

    def commit(
        self, files: Mapping[str, FileEntry], directories: Sequence[str], metadata: Mapping[str, Any], header: Header
    ) -> Manifest:
        """Write metadata.json and the manifest and make the checkpoint listed, in one step."""

    def abort(self) -> None:
        """Give the checkpoint up: on the first rank every byte is removed. Called again it does nothing.

        On another rank what it alone has is removed, as a folder of this machine, and what it did not finish to put.
        It calls this in the end whatever became of the checkpoint, which stays as it is if it was committed.
        """


class StoredCheckpoint(Protocol):
    """A checkpoint that can be read."""

    @property
    def storage_id(self) -> str: ...

    @property
    def manifest(self) -> Manifest: ...

    @property
    def path(self) -> Path | None:
        """The folder it lies in; None: it lies elsewhere, and must be copied out to be read."""

    def metadata(self) -> dict[str, Any]:
        """What metadata.json holds; empty without one."""

    def check(
        self,
        names: Collection[str],
        *,
        part: int = 0,
        parts: int = 1,
        digests: bool = True,
        progress: Progress | None = None,
    ) -> None:
        """Compare files with the manifest: sizes, and digests if asked for. With ``parts``, one share of them.

        Raises:
            CheckpointCorrupt: a file is missing or differs.
        """

    def copy_out(
        self, folder: Path, names: Collection[str], directories: Collection[str], progress: Progress | None = None
    ) -> None:
        """Copy files into a folder of our own, comparing them with the manifest.

        Raises:
            CheckpointCorrupt: a file is missing or differs.
        """


class Store(Protocol):
    """Where checkpoints lie, each in one folder named by its storage_id."""

    @property
    def root(self) -> str:
        """Where it is, as messages name it."""

    @property
    def disk(self) -> Disk:
        """The door to this machine's file system, also for the folders that scripts give."""

    def begin(self, storage_id: str, owner: Owner) -> Staging:
        """Start a checkpoint; before the first of ``owner``, what its run left behind unfinished is collected."""

    def join(self, ticket: str, part: int) -> Staging:
        """The staging of another rank; ``part`` is this rank.

        Raises:
            StorageError: this process does not see what that one made, as on a folder that is not shared.
        """

    def open(self, storage_id: str, manifest: Manifest | None = None) -> StoredCheckpoint:
        """Look a checkpoint up. One without a manifest, written by others, is accepted and logged as unverified.

        Args:
            storage_id: its name.
            manifest: what another rank read, so that this one need not.

        Raises:
            CheckpointNotFound: there is none of that id.
            CheckpointCorrupt: its manifest cannot be used.
        """

    def list(self, run_id: str | None = None) -> list[Header]:
        """The complete checkpoints, of one run or of all, oldest to newest within a run."""

    def newest(self, run_id: str) -> str | None:
        """The storage_id of the newest complete checkpoint of a run."""

    def delete(self, storage_id: str, globs: Sequence[str] = WHOLE) -> dict[str, int]:
        """Delete what matches; returns what is left, as resources. One that is not there is no error.

        What is deleted stops being listed first.
        """

    def collect(self, owner: Owner | None = None) -> builtins.list[str]:
        """Remove what writers that are dead left unfinished, and marks of dead holders; returns the storage_ids.

        Args:
            owner: who collects: earlier restarts of its run count as dead, wherever they ran.
        """

    def hold(self, storage_id: str, owner: Owner) -> AbstractContextManager[None]:
        """While it lasts, :meth:`in_use` of every process names the checkpoint.

        A store that may not be written to lets the reader through without a mark, and says so in the debug log.
        """

    def in_use(self) -> set[str]:
        """The checkpoints that a living process holds.

        A holder on another host, of whom nobody knows whether it lives, counts for 24 hours.
        """

    def put_beside(self, source: Path, name: str) -> None:
        """Copy one local file to ``<root>/<name>``, beside the checkpoints, in place of what is there, in one step.

        Args:
            source: the file.
            name: a relative POSIX path.
        """

    def validate(self) -> None:
        """Write, read back, list and delete a probe.

        Raises:
            StorageError: that does not work; one line says what is wrong and what to do.
        """

    def close(self) -> None:
        """Give back connections and threads, if there are any. A later call makes new ones."""

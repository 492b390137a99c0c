"""A checkpoint that a script is writing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from det_core._errors import CheckpointError, StorageError
from det_core.core._checkpoint._agree import Finish, Offering, agree, write
from det_core.core._checkpoint._metadata import plain_metadata
from det_core.core._checkpoint._together import Together
from det_core.storage import Disk, Progress, Staging

log = logging.getLogger("det_core.checkpoint")


class CheckpointHandle:
    """What ``checkpoint.begin()`` gives: a folder to write into, and then :meth:`commit` or :meth:`abort`.

    ``store_path()`` is its with-form. With ``shard=True`` every rank has one, and every rank calls the same of the
    two methods.

    Attributes:
        path: the folder to write files into. With ``shard=True`` each rank has one of its own, and the checkpoint is
            the union of them; a rank does not see what another one writes.
        storage_id: what the checkpoint will be known by.
    """

    def __init__(
        self,
        together: Together,
        disk: Disk,
        staging: Staging,
        path: Path,
        metadata: Mapping[str, Any] | None,
        finish: Finish,
        ended: Callable[[CheckpointHandle], None],
        progress: Progress | None = None,
    ) -> None:
        self._together = together
        self._disk = disk
        self._staging = staging
        self._metadata = metadata
        self._finish = finish
        self._ended = ended
        self._progress = progress
        self._open = True
        self.storage_id = staging.storage_id
        self.path = path

    def commit(self) -> None:
        """Make what was written durable, complete and listed, and report it. On return every rank's files are safe.

        Metadata is read again here, so keys that were added to the dictionary meanwhile count.

        Raises:
            CheckpointConflict: ranks wrote different files under one name, or gave different metadata.
            StorageError: the store refused; the message names path and operation.
            ValueError: a link in the folder leads out of it.
            RuntimeError: this checkpoint was committed or aborted before.

        If it raises, on any rank, nothing is kept, and every rank raises.
        """
        if not self._open:
            raise RuntimeError(f"checkpoint {self.storage_id} was committed or aborted before")
        self._open = False
        try:
            self._commit()
        except BaseException:
            self._remove()
            raise
        finally:
            self._ended(self)

    def abort(self, reason: BaseException | None = None) -> None:
        """Remove what was written, and report nothing. Ranks that commit instead raise an error that names this one.

        Args:
            reason: the error because of which this rank gives up.
        """
        if not self._open:
            return
        self._open = False
        try:
            self._together.fail(reason or CheckpointError(f"checkpoint {self.storage_id} was aborted"))
        finally:
            self._remove()
            self._ended(self)

    def drop(self) -> None:
        """Remove what was written without a word to the other ranks: the context is closing."""
        if self._open:
            self._open = False
            log.warning("checkpoint %s was neither committed nor aborted: it is removed", self.storage_id)
            self._remove()

    def _commit(self) -> None:
        agreed = agree(self._together, self._disk, self._offer)
        write(
            self._together, self._staging, agreed, lambda files: self._staging.take(files, self._progress), self._finish
        )

    def _offer(self) -> Offering:
        metadata = plain_metadata(self._metadata or {})
        return Offering(self._staging.written(), metadata)

    def _remove(self) -> None:
        if self._together.first:
            remove(self._staging)


def remove(staging: Staging) -> None:
    """Abort a staging because of an error that is under way, and must not be hidden by one more."""
    try:
        staging.abort()
    except StorageError as e:
        log.warning("what was written of checkpoint %s could not be removed: %s", staging.storage_id, e)

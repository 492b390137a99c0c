"""What a background save can do before its state is there, so that it runs beside the copying and not beside training.

While the training thread pickles and copies, the threads that compute for it have nothing to do.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

from det_core.storage import DirectoryStore, Owner
from det_core.storage._draft import Draft, draft

log = logging.getLogger("det_core.checkpoint")


@dataclass(frozen=True)
class Announcement:
    """A checkpoint that is going to be saved."""

    storage_id: str
    owner: Owner
    name: str
    """The file's path in the checkpoint."""
    metadata: dict[str, Any]
    reports: str | None
    """The file with what was reported before it; None: that is not asked for."""

    @classmethod
    def decode(cls, body: dict[str, Any]) -> Announcement:
        """From what JSON makes of one."""
        return cls(**{**body, "owner": Owner(**body["owner"])})


class Preparation:
    """Has the reports on the disk, and all of the checkpoint that can be there before the state.

    Args:
        store: where the checkpoint is to lie.
        announcement: what is known of it.

    Attributes:
        storage_id: of the checkpoint.
        flushed: whether the reports are on the disk.
        draft: the checkpoint so far; None: there is nothing yet.
    """

    def __init__(self, store: DirectoryStore, announcement: Announcement) -> None:
        self._store = store
        self._announcement = announcement
        self.storage_id = announcement.storage_id
        self.flushed = False
        self.draft: Draft | None = None

    def run(self) -> None:
        """Do it, as far as that can be done: whoever saves tries again what failed, and is told then."""
        told = self._announcement
        try:
            self.draft = draft(self._store, told.storage_id, told.owner, told.name, told.metadata)
        except Exception as e:
            log.debug("checkpoint %s is not prepared: %s", told.storage_id, e)
        if told.reports is not None:  # after what waits for nothing, as then the training thread may be done copying
            self.flushed = _synced(told.reports)


def _synced(path: str) -> bool:
    """Bring a file to the disk; whether that could be done."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.fsync(fd)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)

"""What a background save can do before its state is there, so that it runs beside the copying and not beside training.

While the training thread pickles and copies, the threads that compute for it have nothing to do.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

from det_core._errors import StorageError
from det_core.storage import DirectoryStaging, DirectoryStore, Owner


@dataclass(frozen=True)
class Announcement:
    """A checkpoint that is going to be saved."""

    storage_id: str
    owner: Owner
    reports: str | None
    """The file with what was reported before it; None: that is not asked for."""

    @classmethod
    def decode(cls, body: dict[str, Any]) -> Announcement:
        """From what JSON makes of one."""
        return cls(**{**body, "owner": Owner(**body["owner"])})


class Preparation:
    """Has the reports on the disk, and a folder to write into.

    Args:
        store: where the checkpoint is to lie.
        announcement: what is known of it.

    Attributes:
        flushed: whether the reports are on the disk.
        staging: where to write; None: there is none yet.
    """

    def __init__(self, store: DirectoryStore, announcement: Announcement) -> None:
        self._store = store
        self._announcement = announcement
        self.flushed = False
        self.staging: DirectoryStaging | None = None

    def run(self) -> None:
        """Do it, as far as that can be done: whoever saves tries again what failed, and is told then."""
        told = self._announcement
        if told.reports is not None:
            self.flushed = _synced(told.reports)
        with contextlib.suppress(StorageError):
            self.staging = self._store.begin(told.storage_id, told.owner, alone=True)


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

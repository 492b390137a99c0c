"""``upload()``: from folders of the ranks into one checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from det_core.core._checkpoint._agree import Finish, Offering, agree, write
from det_core.core._checkpoint._handle import remove
from det_core.core._checkpoint._together import Together
from det_core.storage import Disk, Listing, Progress, Selector, Staging, host_identity, scan


@dataclass
class Upload:
    """One rank's part in an upload.

    Args:
        together: the ranks that upload.
        disk: the door to this machine's file system.
        folder: this rank's folder; None: it has nothing to give.
        selector: which of its paths are wanted.
        check: checks this rank's arguments and returns its metadata.
        begin: makes the staging, or joins it, with the other ranks.
        finish: commits and registers; called on the chief.
        progress: told of the bytes done.
    """

    together: Together
    disk: Disk
    folder: str | None
    selector: Selector | None
    check: Callable[[], dict[str, Any]]
    begin: Callable[[], Staging]
    finish: Finish
    progress: Progress | None = None

    def run(self) -> str:
        """Do it; returns the storage_id. If it raises, on any rank, nothing is kept, and every rank raises."""
        agreed = agree(self.together, self.disk, self._offer)
        staging = self.begin()
        try:
            write(self.together, staging, agreed, lambda listing: staging.put(listing, self.progress), self.finish)
        except BaseException:
            if self.together.first:
                remove(staging)
            raise
        return staging.storage_id

    def _offer(self) -> Offering:
        metadata = self.check()
        if self.folder is None:
            return Offering(Listing(), metadata, given=False)
        return Offering(scan(self.disk, self.folder, self.selector), metadata, identity(self.folder))


def identity(folder: str) -> Hashable:
    """What tells a folder from any other, also on another host. An inode alone does not, nor does its path."""
    found = os.stat(folder)
    return host_identity(), found.st_dev, found.st_ino


def check_folder(ckpt_dir: str | os.PathLike[str], root: str, selector: Selector | None) -> None:
    """See that a folder can be uploaded to the store at ``root``.

    Raises:
        ValueError: there is no such folder, or the store lies in it, and nothing says what to leave out.
    """
    path = os.path.realpath(ckpt_dir)
    if not os.path.isdir(path):
        raise ValueError(f"ckpt_dir {os.fspath(ckpt_dir)} is not a folder")
    if selector is None and os.path.realpath(root).startswith(path.rstrip("/") + "/"):
        raise ValueError(f"ckpt_dir {path} holds the checkpoint store {root}: save into another folder")

"""The folder that a rank gives to ``upload()``."""

from __future__ import annotations

import os
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from det_core.core._checkpoint._agree import Offering
from det_core.storage import Disk, Listing, Selector, copy_in, host_identity, link_in, scan, take_away


class Folder:
    """A rank's folder, or that it has none.

    Args:
        disk: the door to this machine's file system.
        ckpt_dir: the folder; None: this rank has nothing to give.
        selector: which of its paths are wanted.
    """

    def __init__(self, disk: Disk, ckpt_dir: str | os.PathLike[str] | None, selector: Selector | None) -> None:
        self._disk = disk
        self._path = None if ckpt_dir is None else os.path.abspath(os.fspath(ckpt_dir))
        self._selector = selector

    def check(self, root: str) -> None:
        """See that it can be uploaded to the store at ``root``.

        Raises:
            ValueError: there is no such folder, or the store lies in it, and nothing says what to leave out.
            RuntimeError: a selector without a folder.
        """
        if self._path is None:
            if self._selector is not None:
                raise RuntimeError("upload() was given a selector, but no ckpt_dir to select from")
            return
        path = os.path.realpath(self._path)
        if not os.path.isdir(path):
            raise ValueError(f"ckpt_dir {self._path} is not a folder")
        if self._selector is None and os.path.realpath(root).startswith(path.rstrip("/") + "/"):
            raise ValueError(f"ckpt_dir {path} holds the checkpoint store {root}: save into another folder")

    def offer(self, metadata: dict[str, Any]) -> Offering:
        """What is wanted of it, with this rank's metadata."""
        if self._path is None:
            return Offering(Listing(), metadata, given=False)
        return Offering(scan(self._disk, self._path, self._selector), metadata, identity(self._path))

    def bring(self, listing: Listing, target: Path, consume: bool) -> None:
        """Have its files in ``target``, as they are now: as copies, or under a second name."""
        (link_in if consume else copy_in)(self._disk, listing, os.fspath(target))

    def give_up(self, listing: Listing) -> None:
        """Remove the first names of what was brought."""
        take_away(self._disk, listing)


def identity(folder: str) -> Hashable:
    """What tells a folder from any other, also on another host. An inode alone does not, nor does its path."""
    found = os.stat(folder)
    return host_identity(), found.st_dev, found.st_ino

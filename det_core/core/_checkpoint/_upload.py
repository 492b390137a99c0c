"""``upload()``: from folders of the ranks into one checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from det_core.core._checkpoint._conflicts import Offer, contested, resolve
from det_core.core._checkpoint._handle import Finish, remove
from det_core.core._checkpoint._metadata import check_steps, merge_metadata
from det_core.core._checkpoint._together import Together
from det_core.storage import Disk, FileEntry, Listing, Progress, Selector, Staging, digests, host_identity, scan


class _Have(NamedTuple):
    """What a rank tells the chief before anything is written."""

    given: bool
    sizes: dict[str, int]
    directories: list[str]
    folder: tuple[str, int, int] | None
    metadata: dict[str, Any]


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
    _listing: Listing = field(default_factory=Listing)
    _have: list[_Have] = field(default_factory=list)

    def run(self) -> str:
        """Do it; returns the storage_id. If it raises, on any rank, nothing is kept, and every rank raises."""
        together = self.together
        self._have = together.gather(self._look) or []
        ask = together.chief(self._first_look)
        known = together.gather(lambda: digests(self.disk, self._listing, ask[together.index]))
        skip = together.chief(lambda: self._decide(known or []))
        staging = self.begin()
        try:
            self._put(staging, skip[together.index])
        except BaseException:
            if together.first:
                remove(staging)
            raise
        return staging.storage_id

    def _look(self) -> _Have:
        metadata = self.check()
        if self.folder is None:
            return _Have(False, {}, [], None, metadata)
        self._listing = scan(self.disk, self.folder, self.selector)
        found = os.stat(self.folder)
        identity = (host_identity(), found.st_dev, found.st_ino)
        sizes = {p: s.size for p, s in self._listing.files.items()}
        return _Have(True, sizes, self._listing.directories, identity, metadata)

    def _first_look(self) -> list[list[str]]:
        """Refuse what can be refused already; returns which files each rank is to hash, as others have them too."""
        if not any(have.given for have in self._have):
            raise RuntimeError("upload(): every rank gave ckpt_dir=None: at least one must have a folder")
        check_steps(merge_metadata([have.metadata for have in self._have]))
        offers = self._offers([{}] * len(self._have))
        resolve(offers).check()
        ask: list[list[str]] = [[] for _ in offers]
        for path, ranks in contested(offers).items():
            for rank in ranks:
                ask[rank].append(path)
        return ask

    def _decide(self, known: list[dict[str, tuple[str, ...]]]) -> list[set[str]]:
        plan = resolve(self._offers(known))
        plan.check()
        return plan.skip

    def _offers(self, known: list[dict[str, tuple[str, ...]]]) -> list[Offer]:
        return [
            Offer({p: (size, found.get(p)) for p, size in have.sizes.items()}, have.directories, have.folder)
            for have, found in zip(self._have, known, strict=True)
        ]

    def _put(self, staging: Staging, skip: set[str]) -> None:
        put = self.together.gather(lambda: staging.put(self._listing.without(skip), self.progress))

        def finish() -> None:
            files: dict[str, FileEntry] = {p: f for found in put or [] for p, f in found.items()}
            directories = sorted({d for have in self._have for d in have.directories})
            metadata = merge_metadata([have.metadata for have in self._have])
            self.finish(staging, files, directories, metadata)

        self.together.chief(finish)


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

"""What the ranks bring to a checkpoint: compared before any of it is written, then written by all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from det_core.core._checkpoint._conflicts import Offer, contested, resolve
from det_core.core._checkpoint._metadata import check_steps, merge_metadata
from det_core.core._checkpoint._together import Together
from det_core.errors import StorageError
from det_core.storage import Disk, FileEntry, Listing, Staging, digests

log = logging.getLogger("det_core.checkpoint")
Finish = Callable[[Staging, dict[str, FileEntry], list[str], dict[str, Any]], None]
"""Commits and registers; called on the chief when every rank's files are safe."""
Digests = dict[str, tuple[str, ...]]


class Offering(NamedTuple):
    """What one rank has."""

    listing: Listing
    metadata: dict[str, Any]
    folder: Hashable = None
    """Identity of the folder; ranks that read the very same one cannot disagree."""
    given: bool = True
    """False: this rank has nothing to bring, as it said."""


class _Summary(NamedTuple):
    """What a rank tells the chief of it."""

    sizes: dict[str, int]
    directories: list[str]
    metadata: dict[str, Any]
    folder: Hashable
    given: bool


@dataclass
class Agreement:
    """What they agreed on."""

    listing: Listing
    """What this rank brings: what it has, but for the files that a lower rank brings."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Of all ranks, merged; on the chief."""
    directories: list[str] = field(default_factory=list)
    """Of all ranks; on the chief."""


def agree(together: Together, disk: Disk, offer: Callable[[], Offering], *, compare: bool = True) -> Agreement:
    """Compare what the ranks have, and split it among them.

    Args:
        together: the ranks.
        disk: the door to this machine's file system.
        offer: says what this rank has.
        compare: also compare the bytes of what several ranks have under one name. Otherwise each of them brings it, but
            for ranks that read the very same folder.

    Raises:
        CheckpointConflict: ranks have different files under one name, or different metadata.
        Exception: whatever ``offer`` raised; on every rank, if it did on any.
    """
    mine: list[Offering] = []

    def summary() -> _Summary:
        mine.append(offer())
        sizes = {p: s.size for p, s in mine[0].listing.files.items()}
        return _Summary(sizes, mine[0].listing.directories, mine[0].metadata, mine[0].folder, mine[0].given)

    found = together.gather(summary) or []
    agreed = Agreement(mine[0].listing)

    def first_look() -> tuple[list[list[str]], list[set[str]]]:
        if not any(one.given for one in found):
            raise RuntimeError("upload(): every rank gave ckpt_dir=None: at least one must have a folder")
        agreed.metadata = merge_metadata([one.metadata for one in found])
        check_steps(agreed.metadata)
        agreed.directories = sorted({d for one in found for d in one.directories})
        return _first_look(found, compare)

    ask, skip = together.chief(first_look)
    if any(ask):
        known = together.gather(lambda: digests(disk, mine[0].listing, ask[together.index]))
        skip = together.chief(lambda: _second_look(found, known or []))
    agreed.listing = mine[0].listing.without(skip[together.index])
    return agreed


def write(
    together: Together,
    staging: Staging,
    agreed: Agreement,
    bring: Callable[[Listing], dict[str, FileEntry]],
    finish: Finish,
) -> None:
    """Have every rank bring its files, and the chief finish; then nothing of it is left on the others' machines."""
    brought = together.gather(lambda: bring(agreed.listing)) or []
    files = {p: f for one in brought for p, f in one.items()}
    together.chief(lambda: finish(staging, files, agreed.directories, agreed.metadata))
    if not together.first:
        remove(staging)


def remove(staging: Staging) -> None:
    """Abort a staging when there is something that matters more than an error in it."""
    try:
        staging.abort()
    except StorageError as e:
        log.warning("what was written of checkpoint %s could not be removed: %s", staging.storage_id, e)


def _first_look(found: list[_Summary], compare: bool) -> tuple[list[list[str]], list[set[str]]]:
    """Refuse what can be refused already. Which files each rank is to hash, as others have them too, and to skip."""
    offers = _offers(found, [{} for _ in found])
    plan = resolve(offers)
    plan.check()
    several = contested(offers)
    if not compare:
        return [[] for _ in found], [skip.difference(several) for skip in plan.skip]
    return [[path for path, ranks in several.items() if rank in ranks] for rank in range(len(found))], plan.skip


def _second_look(found: list[_Summary], known: list[Digests]) -> list[set[str]]:
    plan = resolve(_offers(found, known))
    plan.check()
    return plan.skip


def _offers(found: list[_Summary], known: list[Digests]) -> list[Offer]:
    return [
        Offer({p: (size, has.get(p)) for p, size in one.sizes.items()}, one.directories, one.folder)
        for one, has in zip(found, known, strict=True)
    ]

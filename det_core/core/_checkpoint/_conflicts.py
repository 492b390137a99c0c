"""Which rank gives which file of a sharded checkpoint: pure decisions on what the ranks have."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from det_core.errors import CheckpointConflict


@dataclass(frozen=True)
class Offer:
    """What one rank would give."""

    files: Mapping[str, Hashable]
    """Path to what the content is known by: equal means the same bytes; None: not known yet."""
    directories: Collection[str] = ()
    """Each ends in a slash."""
    folder: Hashable = None
    """Identity of the folder; ranks that read the very same one cannot disagree."""


@dataclass
class Plan:
    """The outcome."""

    skip: list[set[str]]
    """By rank: its files that a lower rank gives."""
    conflicts: dict[str, str] = field(default_factory=dict)
    """Path to the ranks that disagree on it."""

    def check(self) -> None:
        """Raise CheckpointConflict, naming each path and its ranks, if there is any conflict."""
        if self.conflicts:
            found = "; ".join(f"{path} ({ranks})" for path, ranks in sorted(self.conflicts.items()))
            raise CheckpointConflict(f"refusing to store a checkpoint with file conflicts: ranks disagree on {found}")


def contested(offers: Sequence[Offer]) -> dict[str, list[int]]:
    """The files that ranks with different folders have; each with its ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, offer in enumerate(offers):
        for path in offer.files:
            ranks.setdefault(path, []).append(rank)
    return {p: r for p, r in ranks.items() if len(r) > 1 and not _one_folder([offers[i] for i in r])}


def resolve(offers: Sequence[Offer]) -> Plan:
    """Let the lowest rank give each file, and find what ranks disagree on.

    A path is in conflict where ranks have different content for it, or where it is a file on one and a folder on
    another.
    """
    plan = Plan([set() for _ in offers])
    ranks: dict[str, list[int]] = {}
    folders: dict[str, list[int]] = {}
    for rank, offer in enumerate(offers):
        for directory in offer.directories:
            folders.setdefault(directory.rstrip("/"), []).append(rank)
        for path in offer.files:
            ranks.setdefault(path, []).append(rank)
    for path, having in ranks.items():
        if path in folders:
            plan.conflicts[path] = f"a file on {_name(having)}, a folder on {_name(folders[path])}"
            continue
        for rank in having[1:]:
            plan.skip[rank].add(path)
        if len({offers[r].files[path] for r in having}) > 1 and not _one_folder([offers[r] for r in having]):
            plan.conflicts[path] = _name(having)
    return plan


def _one_folder(offers: Sequence[Offer]) -> bool:
    return offers[0].folder is not None and len({offer.folder for offer in offers}) == 1


def _name(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"

"""Checkpoints of several ranks: all ranks write one, or fail together."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from det_core import _json
from det_core.core._rank_group import RankGroup
from det_core.errors import CheckpointConflict, StorageError
from det_core.storage import Disk, FileEntry, Listing, Staging, digests

log = logging.getLogger("det_core.checkpoint")
T = TypeVar("T")
STEPS_HINT = 'pass metadata={"steps_completed": N, ...}, N being the batches (or what else you count) trained so far'
MAX_DEPTH = 200
"""Dictionaries and lists in one another, in metadata: the journal's JSON ends at 254, with its own around them."""
_SIMPLE = {str, int, float, bool, type(None)}


class Contribution(NamedTuple):
    """Files and metadata of one rank."""

    listing: Listing
    metadata: dict[str, Any]
    folder: Hashable = None
    """Identity of the folder; ranks that read the very same one cannot disagree."""
    given: bool = True
    """Whether this rank was given a folder."""


class Skipped(NamedTuple):
    """Files of a rank that a lower rank stores instead."""

    same: frozenset[str] = frozenset()
    """Files from the same folder as the lower rank's."""
    others: frozenset[str] = frozenset()
    """Files from another folder, whose bytes must be equal."""


@dataclass
class ShardPlan:
    """Plan of all ranks; metadata and directories are known to the chief alone."""

    listing: Listing
    """Files of this rank."""
    part: Skipped
    metadata: dict[str, Any]
    directories: list[str]


def plan_shards(group: RankGroup, offer: Callable[[], Contribution]) -> ShardPlan:
    """Let the lowest rank bring each file, and see that metadata, sizes and kinds of names do not differ.

    Raises:
        CheckpointConflict: they do; the message has each path with its ranks.
        Exception: whatever ``offer`` raised; on every rank, if it did on any.
    """
    mine: list[Listing] = []

    def summary() -> tuple[dict[str, int], list[str], dict[str, Any], Hashable, bool]:
        listing, metadata, folder, given = offer()
        mine.append(listing)
        return {p: s.size for p, s in listing.files.items()}, listing.directories, metadata, folder, given

    found = group.gather(summary) or []
    plan = ShardPlan(mine[0] if mine else Listing(), Skipped(), {}, [])

    def decide() -> list[Skipped]:
        if not any(given for *_, given in found):
            raise RuntimeError("upload(): every rank gave ckpt_dir=None: at least one must have a folder")
        plan.metadata = merge_metadata([metadata for _, _, metadata, _, _ in found])
        require_steps_completed(plan.metadata)
        plan.directories = sorted({d for _, directories, _, _, _ in found for d in directories})
        return _parts([(sizes, directories, folder) for sizes, directories, _, folder, _ in found])

    plan.part = group.on_chief(decide)[group.index]
    return plan


def write_shards(
    group: RankGroup,
    disk: Disk,
    staging: Staging,
    plan: ShardPlan,
    bring: Callable[[Listing], dict[str, FileEntry]],
    finish: Callable[[dict[str, FileEntry], list[str], dict[str, Any]], None],
) -> None:
    """Have every rank bring its files, and the chief compare and finish.

    A rank hashes the files that a lower one brings, while all of them are busy: so a conflict raises after the
    writing, and nothing is read twice.

    Args:
        group: the ranks.
        disk: the door to this machine's file system.
        staging: where to.
        agreed: what the ranks agreed on.
        bring: stores a listing durably.
        finish: commits; called on the chief with the files, folders and metadata of all ranks.

    Raises:
        CheckpointConflict: ranks have different bytes under one name.
    """

    def work() -> tuple[dict[str, FileEntry], dict[str, tuple[str, ...]]]:
        known = digests(disk, plan.listing, plan.part.others)
        return bring(plan.listing.without(plan.part.same | plan.part.others)), known

    group.on_chief(staging.start)
    brought = group.gather(work) or []

    def end() -> None:
        files = {path: entry for entries, _ in brought for path, entry in entries.items()}
        ranks = {path: [rank] for rank, (entries, _) in enumerate(brought) for path in entries}
        differing = set()
        for rank, (_, known) in enumerate(brought):
            for path, digest in known.items():
                ranks[path].append(rank)
                if digest != files[path].digests:
                    differing.add(path)
        _raise_conflicts({path: _named(ranks[path]) for path in differing})
        finish(files, plan.directories, plan.metadata)

    group.on_chief(end)
    if not group.is_chief:
        abort_quietly(staging)  # what is left of it on this machine


def abort_quietly(staging: Staging) -> None:
    """Abort a staging; log an error, as a more important one is being raised."""
    try:
        staging.abort()
    except StorageError as e:
        log.warning("what was written of checkpoint %s could not be removed: %s", staging.storage_id, e)


def _parts(found: Sequence[tuple[Mapping[str, int], Sequence[str], Hashable]]) -> list[Skipped]:
    """By rank what it does not bring, from sizes, folders and the identity of its source; raises CheckpointConflict."""
    ranks: dict[str, list[int]] = {}
    folders: dict[str, list[int]] = {}
    for rank, (sizes, directories, _) in enumerate(found):
        for directory in directories:
            folders.setdefault(directory.rstrip("/"), []).append(rank)
        for path in sizes:
            ranks.setdefault(path, []).append(rank)
    conflicts = {}
    same: list[set[str]] = [set() for _ in found]
    others: list[set[str]] = [set() for _ in found]
    for path, having in ranks.items():
        first_sizes, _, first_folder = found[having[0]]
        if path in folders:
            conflicts[path] = f"a file on {_named(having)}, a folder on {_named(folders[path])}"
        elif any(found[rank][0][path] != first_sizes[path] for rank in having):
            conflicts[path] = _named(having)
        for rank in having[1:]:
            is_same = first_folder is not None and found[rank][2] == first_folder
            (same if is_same else others)[rank].add(path)
    _raise_conflicts(conflicts)
    return [Skipped(frozenset(a), frozenset(b)) for a, b in zip(same, others, strict=True)]


def _raise_conflicts(conflicts: Mapping[str, str]) -> None:
    if conflicts:
        found = "; ".join(f"{path} ({ranks})" for path, ranks in sorted(conflicts.items()))
        raise CheckpointConflict(f"refusing to store a checkpoint with file conflicts: ranks disagree on {found}")


def _named(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


# Metadata.


def plain_metadata(metadata: object) -> dict[str, Any]:
    """Return a copy of ``metadata`` in JSON's types; scalars of NumPy and torch become numbers.

    Raises:
        ValueError: If it is not a dictionary, or JSON cannot hold a value; the message has the path of its key.
    """
    if (
        type(metadata) is dict
        and _SIMPLE.issuperset(map(type, metadata.values()))
        and set(map(type, metadata)) == {str}
    ):
        return metadata.copy()
    if not isinstance(metadata, Mapping):
        raise ValueError(f"metadata must be a dictionary, not {type(metadata).__name__}: {STEPS_HINT}")
    copy: dict[str, Any] = _json.copy_json(metadata, _to_plain, key=_check_key)
    return copy


def require_steps_completed(metadata: Mapping[str, Any]) -> int:
    """Return ``metadata["steps_completed"]``.

    Raises:
        ValueError: If it is missing, or not an integer of at least 0.
    """
    if "steps_completed" not in metadata:
        raise ValueError(f"metadata has no 'steps_completed': {STEPS_HINT}")
    steps = metadata["steps_completed"]
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"metadata['steps_completed'] is {steps!r}: it must be an integer of at least 0")
    return steps


def merge_metadata(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the metadata of all ranks (by rank): dictionaries key by key, anything else must be equal.

    Raises:
        CheckpointConflict: two ranks give one key different values; the message has keys (as ``/a/b``) and ranks.
    """
    conflicts: dict[str, list[int]] = {}
    merged = _merge(list(enumerate(parts)), "", conflicts)
    if conflicts:
        found = "; ".join(f"{key} ({_named(ranks)})" for key, ranks in sorted(conflicts.items()))
        raise CheckpointConflict(f"refusing to store a checkpoint with metadata conflicts: ranks disagree on {found}")
    return merged


def _merge(
    parts: Sequence[tuple[int, Mapping[str, Any]]], path: str, conflicts: dict[str, list[int]]
) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for key in dict.fromkeys(key for _, part in parts for key in part):
        values = [(rank, part[key]) for rank, part in parts if key in part]
        if all(isinstance(value, dict) for _, value in values):
            merged[key] = _merge(values, f"{path}/{key}", conflicts)
        elif all(_json.equal_json(value, values[0][1]) for _, value in values):
            merged[key] = values[0][1]
        else:
            conflicts[f"{path}/{key}"] = [rank for rank, _ in values]
    return merged


def _to_plain(value: Any, path: _json.Path) -> Any:
    """Return a value as one of JSON's types; the items of a dictionary or a list come in turn."""
    if len(path) > MAX_DEPTH:
        where = _format_path(path)[:60]
        raise ValueError(f"metadata is nested deeper than {MAX_DEPTH} levels, or holds itself, at {where}…")
    if value is None or isinstance(value, str | bool | Mapping | list | tuple):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return _to_plain(value.item(), path)
    if hasattr(value, "__index__"):
        return operator.index(value)
    raise ValueError(f"metadata holds a {type(value).__name__} at {_format_path(path)}, which JSON cannot hold")


def _check_key(key: object, path: _json.Path) -> object:
    if not isinstance(key, str):
        raise ValueError(f"metadata has the key {key!r} at {_format_path(path)}: keys must be strings")
    return key


def _format_path(path: _json.Path) -> str:
    return "/" + "/".join(map(str, path))

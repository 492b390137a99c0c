"""``download()``, and the check before ``restore_path()``: the ranks that call together share the work."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from det_core.core._checkpoint._share import union, vote, weighed
from det_core.core._checkpoint._together import Together
from det_core.errors import CheckpointCorrupt, StorageError
from det_core.storage import Disk, Manifest, Progress, Selector, Store, StoredCheckpoint, folders_of, scan
from det_core.storage._names import INNER

log = logging.getLogger("det_core.checkpoint")
ASIDE = ".det_core-tmp"
"""How the folder begins, in or beside a download's target, that files are copied into first."""


class _Task(NamedTuple):
    """What one rank does for a download."""

    files: list[str]
    directories: list[str]
    aside: str
    """Where it copies to first."""
    merge: bool
    """The folder is there already, so each file moves by itself; else the folder as a whole is renamed."""
    last: bool
    """This rank finishes what the ranks with the same folder have done."""


def open_together(
    together: Together, store: Store, storage_id: str, before: Callable[[], None] | None = None
) -> StoredCheckpoint:
    """Look a checkpoint up on the chief of ``together``; the others take its manifest from there.

    Args:
        together: the ranks.
        store: where it lies.
        storage_id: its name.
        before: called first; what it raises on one rank, every rank raises.

    Raises:
        CheckpointNotFound: on every rank alike.
        ValueError: the ranks ask for different checkpoints, or ``storage_id`` can be none.
    """

    def ask() -> str:
        if before is not None:
            before()
        return storage_id

    asked = together.gather(ask)
    opened: list[StoredCheckpoint] = []

    def look_up() -> Manifest:
        if len(set(asked or [])) > 1:
            raise ValueError(f"the ranks ask for different checkpoints: {', '.join(map(repr, asked or []))}")
        opened.append(store.open(storage_id))
        return opened[0].manifest

    manifest = together.chief(look_up)
    return together.each(lambda: opened[0] if opened else store.open(storage_id, manifest))


def download(
    together: Together,
    store: Store,
    checkpoint: StoredCheckpoint,
    folder: str,
    selector: Selector | None,
    progress: Progress | None,
) -> None:
    """Copy what any rank selects into the folders that the ranks name; ranks that name the same one share the work.

    All is copied aside and compared first. So if anything is wrong the folders are as they were.
    """
    manifest, disk = checkpoint.manifest, store.disk

    def look() -> tuple[str, set[str] | None]:
        target = os.path.realpath(folder)
        stored = None if checkpoint.path is None else os.path.realpath(checkpoint.path)
        if stored is not None and (target + "/").startswith(stored + "/"):
            raise ValueError(f"ckpt_dir {folder} lies in the stored checkpoint itself ({stored})")
        if os.path.exists(target) and not os.path.isdir(target):
            raise ValueError(f"ckpt_dir {folder} is not a folder")
        return target, vote(manifest, selector)

    votes = together.gather(look)
    tasks = together.chief(lambda: _tasks(manifest, votes or []))
    task = tasks[together.index]
    try:
        together.each(lambda: checkpoint.copy_out(Path(task.aside), task.files, task.directories, progress))
        together.each(lambda: _arrive(disk, task, os.path.realpath(folder)))
    finally:
        if task.last:
            _clear(disk, task)


def _arrive(disk: Disk, task: _Task, target: str) -> None:
    """Give what was copied its names."""
    if task.merge:
        for directory in sorted(folders_of(task.files).union(task.directories)):
            disk.make_folders(f"{target}/{directory.rstrip('/')}")
        for path in task.files:
            disk.do("rename", f"{target}/{path}", os.rename, f"{task.aside}/{path}", f"{target}/{path}")
    elif task.last:
        disk.do("rename", target, os.rename, task.aside, target)


def _clear(disk: Disk, task: _Task) -> None:
    """Remove what is left aside; if that fails, what is under way matters more."""
    try:
        disk.remove_tree(task.aside)
    except StorageError as e:
        log.warning("%s", e)


def verify(
    together: Together,
    checkpoint: StoredCheckpoint,
    selector: Selector | None,
    known: Collection[str],
    progress: Progress | None,
) -> set[str]:
    """Check what any rank selects, each rank its share: digests, but for the files in ``known``, of which sizes do.

    Returns:
        the files that have been checked.

    Raises:
        CheckpointCorrupt: on every rank, if any finds a file that differs.
    """
    manifest = checkpoint.manifest
    votes = together.gather(lambda: vote(manifest, selector))
    wanted = together.chief(lambda: union(votes or []))
    files = set(manifest.files) if wanted is None else wanted.intersection(manifest.files)

    def check() -> None:
        for names, digests in ((files.difference(known), True), (files.intersection(known), False)):
            checkpoint.check(names, part=together.index, parts=together.size, digests=digests, progress=progress)

    together.each(check)
    return files


def refuse_unlisted(disk: Disk, checkpoint: StoredCheckpoint) -> None:
    """Refuse a stored folder with files that its manifest does not list, but for what python leaves beside modules.

    Raises:
        CheckpointCorrupt: there are some; the message names them.
    """
    try:
        files = scan(disk, str(checkpoint.path), leave=(INNER,)).files
    except ValueError as e:
        raise CheckpointCorrupt(f"checkpoint {checkpoint.path} is not read: {e}") from e
    added = sorted(name for name in {*files}.difference(checkpoint.manifest.files) if "__pycache__/" not in name)
    if added:
        raise CheckpointCorrupt(
            f"checkpoint {checkpoint.path} holds {', '.join(added[:3])}{', …' if added[3:] else ''}, which its "
            "manifest does not list: somebody has put it there, so it is not read. Remove it, or start from another"
        )


def _tasks(manifest: Manifest, votes: Sequence[tuple[str, set[str] | None]]) -> list[_Task]:
    """Split the files among the ranks that share a folder; the first of them makes the folders that stay empty."""
    tasks: dict[int, _Task] = {}
    for folder in dict.fromkeys(folder for folder, _ in votes):
        ranks = [rank for rank, (other, _) in enumerate(votes) if other == folder]
        merge = os.path.isdir(folder)
        aside = f"{ASIDE}-{uuid.uuid4().hex[:12]}"
        aside = f"{folder}/{aside}" if merge else f"{os.path.dirname(folder)}/{aside}"
        wanted = union(votes[rank][1] for rank in ranks)
        every = manifest.resources if wanted is None else wanted
        tasks |= {rank: _Task([], [], aside, merge, rank == ranks[0]) for rank in ranks}
        tasks[ranks[0]].directories.extend(sorted(p for p in every if p.endswith("/")))
        for rank, paths in weighed({p: f.size for p, f in manifest.files.items() if p in every}, ranks).items():
            tasks[rank].files.extend(paths)
    return [tasks[rank] for rank in range(len(votes))]


def foreign_steps(checkpoint: StoredCheckpoint) -> int | None:
    """The steps that a checkpoint written by others says it has, if it does."""
    try:
        steps = checkpoint.metadata().get("steps_completed")
    except CheckpointCorrupt:
        return None
    return steps if isinstance(steps, int) else None

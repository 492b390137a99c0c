"""Downloads: what ranks select, how they share the copying, and how it takes its place in the user's folder."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from det_core import _clock
from det_core.core._rank_group import RankGroup
from det_core.errors import StorageError
from det_core.storage import Disk, Manifest, Owner, Progress, Selector, StoredCheckpoint, parent_folders, split_files
from det_core.storage._names import META_DIR

log = logging.getLogger("det_core.checkpoint")
STAGING_PREFIX = ".det_core-tmp"
"""Prefix of the staging directory, in or beside a download's target, that files are copied into first."""


def download(
    group: RankGroup,
    disk: Disk,
    checkpoint: StoredCheckpoint,
    folder: str,
    selector: Selector | None,
    progress: Progress | None,
) -> None:
    """Copy what any rank selects into the folders that the ranks name; ranks that name the same one share the work.

    All is copied aside and compared first. So if anything is wrong the folders are as they were.
    """

    def look() -> tuple[str, set[str] | None]:
        target = os.path.realpath(folder)
        stored = None
        if checkpoint.path is not None:
            stored = os.path.realpath(checkpoint.path)
        if stored is not None and (target + "/").startswith(stored + "/"):
            raise ValueError(f"ckpt_dir {folder} lies in the stored checkpoint itself ({stored})")
        if os.path.exists(target) and not os.path.isdir(target):
            raise ValueError(f"ckpt_dir {folder} is not a folder")
        selected = selected_paths(checkpoint.manifest, selector)
        _check_target(target, checkpoint.manifest.resources if selected is None else selected)
        return target, selected

    votes = group.gather(look)
    task = group.on_chief(lambda: _tasks(checkpoint.manifest, votes or []))[group.index]
    installation = _Installation(disk, task, os.path.realpath(folder), group.index)
    if task.last:
        _collect(disk, os.path.dirname(task.staging), os.path.dirname(installation.target))
    try:
        group.on_all(lambda: checkpoint.copy_to(Path(task.staging), task.files, task.directories, progress))
        group.on_all(installation.install)
    except BaseException:
        installation.undo()
        raise
    finally:
        if task.last:
            remove_quietly(disk, task.staging)


class _Task(NamedTuple):
    """One rank's part of a download."""

    files: list[str]
    directories: list[str]
    staging: str
    """Where it copies to first."""
    merge: bool
    """The folder is there already, so each file moves by itself; else the folder as a whole is renamed."""
    last: bool
    """This rank finishes what the ranks with the same folder have done."""


def _tasks(manifest: Manifest, votes: Sequence[tuple[str, set[str] | None]]) -> list[_Task]:
    """Split the files among the ranks that share a folder; the first of them makes the folders that stay empty."""
    tasks: dict[int, _Task] = {}
    for folder in dict.fromkeys(folder for folder, _ in votes):
        ranks = [rank for rank, (other, _) in enumerate(votes) if other == folder]
        merge = os.path.isdir(folder)
        staging = f"{STAGING_PREFIX}-{uuid.uuid4().hex[:12]}.{Owner.current('download').tag}"
        if merge:
            staging = f"{folder}/{staging}"
        else:
            staging = f"{os.path.dirname(folder)}/{staging}"
        wanted = merge_selections(votes[rank][1] for rank in ranks)
        every: Collection[str] = manifest.resources
        if wanted is not None:
            every = wanted
        tasks |= {rank: _Task([], [], staging, merge, rank == ranks[0]) for rank in ranks}
        tasks[ranks[0]].directories.extend(sorted(p for p in every if p.endswith("/")))
        for rank, paths in split_files({p: f.size for p, f in manifest.files.items() if p in every}, ranks).items():
            tasks[rank].files.extend(paths)
    return [tasks[rank] for rank in range(len(votes))]


def _check_target(target: str, paths: Iterable[str]) -> None:
    """Raise ValueError if what lies in ``target`` is in the way, or would be written through to another place."""
    folders = {path for path in paths if path.endswith("/")}
    files = {path for path in paths if not path.endswith("/")}
    for path in sorted(folders | parent_folders(files)):
        place = f"{target}/{path.rstrip('/')}"
        real = os.path.realpath(place)
        if not real.startswith(target.rstrip("/") + "/"):
            raise ValueError(f"ckpt_dir: {place} is a link to {real}, outside of it: remove it, or name another folder")
        if os.path.lexists(place) and not os.path.isdir(place):
            raise ValueError(f"ckpt_dir: {place} is in the way of a folder: remove it, or name another folder")
    for path in sorted(files):
        place = f"{target}/{path}"
        if os.path.isdir(place) and not os.path.islink(place):
            raise ValueError(f"ckpt_dir: the folder {place} is in the way of a file: remove it, or name another folder")


class _Installation:
    """One rank's files, which get their names in the target, and what takes them back.

    Args:
        disk: the file system.
        task: what this rank has copied.
        target: the folder that the user named.
        rank: the number of this rank.
    """

    def __init__(self, disk: Disk, task: _Task, target: str, rank: int) -> None:
        self._disk = disk
        self._task = task
        self.target = target
        self._kept = f"{task.staging}/{META_DIR}/{rank}"  # no file of a checkpoint has such a name
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Give what was copied its names."""
        disk = self._disk
        task = self._task
        target = self.target
        if not task.merge:
            if task.last:
                disk.do("rename", target, os.rename, task.staging, target)
                self._undo.append(lambda: disk.do("rename", target, os.rename, target, task.staging))
            return
        disk.make_folders(self._kept)
        for name in sorted(parent_folders(task.files).union(task.directories)):
            self._make_folder(f"{target}/{name.rstrip('/')}")
        for number, path in enumerate(task.files):
            self._move(f"{task.staging}/{path}", f"{target}/{path}", f"{self._kept}/{number}")

    def undo(self) -> None:
        """Restore the previous state; log failures."""
        for step in reversed(self._undo):
            try:
                step()
            except StorageError as e:
                log.warning("after a download that failed, %s is not as it was: %s", self.target, e)

    def _make_folder(self, path: str) -> None:
        if not self._disk.exists(path):
            self._disk.make_folders(path)
            self._undo.append(lambda: self._disk.do("remove folder", path, os.rmdir, path))

    def _move(self, source: str, target: str, kept: str) -> None:
        disk = self._disk
        if not disk.exists(target):
            disk.do("rename", target, os.rename, source, target)
            self._undo.append(lambda: disk.remove_file(target))
            return
        try:  # under a second name, so that the first is never missing
            disk.do("link", kept, _link, target, kept)
        except StorageError:  # a file system without hard links
            disk.do("rename", target, os.rename, target, kept)
        self._undo.append(lambda: disk.do("rename", target, os.rename, kept, target))
        disk.do("rename", target, os.rename, source, target)


def _link(source: str, target: str) -> None:
    os.link(source, target, follow_symlinks=False)


def _collect(disk: Disk, *folders: str) -> None:
    """Remove what downloads of processes that are dead left in these folders."""
    now = _clock.now()
    for folder in dict.fromkeys(folders):
        try:
            entries = disk.entries(folder)
        except StorageError:  # the copy says what is wrong with it
            continue
        for entry in entries:
            if not entry.name.startswith(f"{STAGING_PREFIX}-"):
                continue
            parsed = Owner.parse(entry.name)
            if parsed is None:
                continue
            status = disk.status(entry.path)
            if status is not None and not parsed[1].is_valid(now - status.st_mtime):
                remove_quietly(disk, entry.path)


def remove_quietly(disk: Disk, folder: str) -> None:
    """Remove what is left aside; if that fails, what is under way matters more."""
    try:
        disk.remove_tree(folder)
    except StorageError as e:
        log.warning("%s", e)


# Which files ranks want, and how they share the work.


def selected_paths(manifest: Manifest, selector: Selector | None) -> set[str] | None:
    """Return the selected resources, None for all."""
    if selector is None:
        return None
    return {path for path in manifest.resources if selector(path)}


def merge_selections(votes: Iterable[set[str] | None]) -> set[str] | None:
    """Return the resources that any rank selected, None for all."""
    wanted: set[str] = set()
    for one in votes:
        if one is None:
            return None
        wanted |= one
    return wanted

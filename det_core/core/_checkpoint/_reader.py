"""``download()`` and ``restore_path()``: looked up on the chief, the files split among ranks, every byte compared."""

from __future__ import annotations

import enum
import heapq
import itertools
import logging
import os
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from det_core import _clock
from det_core.core._checkpoint._events import CheckpointEvents
from det_core.core._checkpoint._sharding import Together
from det_core.core._distributed import DistributedContext
from det_core.errors import CheckpointCorrupt, CheckpointNotFound, StorageError
from det_core.storage import (
    DirectoryStore,
    Disk,
    Manifest,
    Owner,
    Progress,
    Selector,
    Store,
    StoredCheckpoint,
    folders_of,
    scan,
)
from det_core.storage._names import ASIDE, INNER

log = logging.getLogger("det_core.checkpoint")
LANE = "checkpoint"
TEMPORARY = ".det_core-tmp"
"""How the folder begins, in or beside a download's target, that files are copied into first."""
FILE_COST = 64 << 10
"""What opening a file costs, in bytes that could be copied meanwhile."""


class DownloadMode(enum.Enum):
    """The calling rules of ``download()`` and ``restore_path()``."""

    LocalWorkersShareDownload = "LOCAL_WORKERS_SHARE_DOWNLOAD"
    """Every rank of the job calls. The ranks of a machine share the work, and none returns before all is there."""
    NoSharedDownload = "NO_SHARED_DOWNLOAD"
    """Any rank calls, when it likes; each does all the work by itself, so no two may use one folder at a time."""


class CheckpointReader:
    """Gets checkpoints back, each rank its part; see :class:`CheckpointContext`, which hands these calls on.

    Args:
        distributed: the ranks.
        store: where checkpoints lie.
        owner: who marks a checkpoint as in use.
        elsewhere: by storage_id, the stores of checkpoints that lie in another one.
        scratch: a folder of this machine for what is restored from a store that is no directory.
        events: told once per process and checkpoint when a ``restore_path()`` begins.
        before: called first by what several ranks do together; raises what this rank has to tell.
        progress: called with the number of bytes that were copied or checked since it was last called.
    """

    def __init__(
        self,
        distributed: DistributedContext,
        store: Store,
        *,
        owner: Callable[[], Owner],
        elsewhere: Mapping[str, Store],
        scratch: Path | None,
        events: CheckpointEvents,
        before: Callable[[], None],
        progress: Progress | None,
    ) -> None:
        self._distributed, self._store, self._owner, self._elsewhere = distributed, store, owner, elsewhere
        self._scratch = None if scratch is None else DirectoryStore(scratch, disk=store.disk)
        self._events, self._before, self._progress = events, before, progress
        self._verified: dict[tuple[str, DownloadMode], set[str]] = {}
        self._restores: set[str] = set()
        self._uses = itertools.count()

    def download(
        self, storage_id: str, ckpt_dir: str | os.PathLike[str], mode: DownloadMode, selector: Selector | None
    ) -> None:
        """Copy a checkpoint into a folder."""
        together = self._readers("download", mode, local=True)
        folder = os.path.abspath(os.fspath(ckpt_dir))
        checkpoint = open_together(together, self._store_of(storage_id), storage_id, self._before)
        with ExitStack() as stack:
            if together.first:  # one mark for all that read together
                stack.enter_context(self._hold(storage_id))
            download(together, self._store.disk, checkpoint, folder, selector, self._progress)

    def check(self, storage_id: str) -> None:
        """Check a checkpoint that is about to be restored; every rank calls.

        In a directory every byte is compared, which restoring it then need not do. What must be fetched is compared
        when it is, so that nothing is fetched twice, and here only looked at: that it is there, and how large.

        Raises:
            CheckpointNotFound, CheckpointCorrupt: on every rank alike.
        """
        shared = DownloadMode.LocalWorkersShareDownload
        together, store = self._readers("resume", shared, local=False), self._store_of(storage_id)
        manifest = together.chief(lambda: store.open(storage_id).manifest)
        checkpoint = together.each(lambda: _seen(store, storage_id, manifest))
        if not self.on_any(shared, checkpoint is None):
            assert checkpoint is not None
            self._compare(together, checkpoint)
        else:  # a directory of the chief's machine, from which a script may restore on the chief alone
            together.chief(lambda: self._compare(Together.alone("resume"), store.open(storage_id, manifest)))

    def _compare(self, together: Together, checkpoint: StoredCheckpoint) -> None:
        if checkpoint.manifest.verified:
            together.chief(checkpoint.metadata)
        known = set() if checkpoint.path is not None else set(checkpoint.manifest.files)
        verified = verify(together, checkpoint, None, known, self._progress)
        if checkpoint.path is not None:
            self._verified |= {(checkpoint.storage_id, mode): set(verified) for mode in DownloadMode}

    def note_restore(self, storage_id: str, steps: int | None, written_by: str | None) -> None:
        """Record that this process goes on from a checkpoint, once."""
        if storage_id not in self._restores:
            self._restores.add(storage_id)
            self._events.restored(storage_id, steps, written_by)

    def steps_completed(self, storage_id: str) -> int | None:
        """Return the steps of a checkpoint; None if it does not say."""
        checkpoint = self._store_of(storage_id).open(storage_id)
        header = checkpoint.manifest.header
        return _foreign_steps(checkpoint) if header is None else header.steps_completed

    def on_any(self, mode: DownloadMode, is_so: bool) -> bool:
        """Return whether something is so on any of the ranks that restore together."""
        together = self._readers("resume", mode, local=False)
        answers = together.gather(lambda: is_so)
        return together.chief(lambda: any(answers or []))

    @contextmanager
    def restore_path(
        self, storage_id: str, mode: DownloadMode, selector: Selector | None, *, only_listed: bool
    ) -> Iterator[Path]:
        """A folder with the checkpoint's files, compared with the manifest."""
        together = self._readers("restore_path", mode, local=False)
        checkpoint = open_together(together, self._store_of(storage_id), storage_id, self._before)
        with ExitStack() as stack:
            if checkpoint.path is None:
                path = stack.enter_context(self._fetched(together, checkpoint, mode, selector))
            else:
                path = checkpoint.path
                together.each(lambda: stack.enter_context(self._hold(storage_id)))
                known = self._verified.setdefault((storage_id, mode), set())
                known |= verify(together, checkpoint, selector, known, self._progress)
                if only_listed:
                    together.chief(lambda: refuse_unlisted(self._store.disk, checkpoint))
                stack.enter_context(checkpoint.unchanged())
            header = checkpoint.manifest.header
            if header is None:
                self.note_restore(storage_id, _foreign_steps(checkpoint), None)
            else:
                self.note_restore(storage_id, header.steps_completed, header.run_id)
            yield path

    @contextmanager
    def _fetched(
        self, together: Together, checkpoint: StoredCheckpoint, mode: DownloadMode, selector: Selector | None
    ) -> Iterator[Path]:
        """A copy in a temporary folder, which goes when the block ends; what fails on one machine fails on all.

        The ranks of a machine fetch into one folder. Then each has names of its own for the files, in a folder of its
        own, so that none has to wait for the others at the end.
        """
        machine = self._readers("restore_path", mode, local=True)
        with ExitStack() as stack:

            def fetch() -> Path | BaseException:
                own = stack.enter_context(self._temporary(checkpoint.storage_id))
                try:
                    with self._hold(checkpoint.storage_id) if machine.first else nullcontext():
                        self._fetch(machine, checkpoint, own, selector)
                except BaseException as e:
                    if machine.first:
                        raise
                    return e  # all ranks of the machine have it, and the first of them tells the others
                return own

            found = together.each(fetch)
            if isinstance(found, BaseException):
                raise found
            yield found

    def _fetch(self, machine: Together, checkpoint: StoredCheckpoint, own: Path, selector: Selector | None) -> None:
        """Fetch this rank's share of what any rank of the machine selects, then link the others' shares."""
        manifest, disk = checkpoint.manifest, self._store.disk
        votes = machine.gather(lambda: (os.fspath(own), vote(manifest, selector)))

        def plan() -> tuple[list[str], list[tuple[str, list[str]]]]:
            wanted = union(chosen for _, chosen in votes or [])
            every = set(manifest.resources) if wanted is None else wanted
            sizes = {path: file.size for path, file in manifest.files.items() if path in every}
            shares = weighed(sizes, range(machine.size))
            folders = [path for path in every if path.endswith("/")]
            return sorted(folders), [(folder, shares[rank]) for rank, (folder, _) in enumerate(votes or [])]

        directories, shares = machine.chief(plan)
        machine.each(lambda: checkpoint.copy_out(own, shares[machine.index][1], directories, self._progress))

        def link() -> None:
            for rank, (folder, names) in enumerate(shares):
                if rank == machine.index:
                    continue
                for directory in sorted(folders_of(names)):
                    disk.make_folders(f"{own}/{directory.rstrip('/')}")
                for name in names:
                    try:
                        disk.do("link", f"{own}/{name}", os.link, f"{folder}/{name}", f"{own}/{name}")
                    except StorageError as e:
                        how = "do all of them see the same folder there? Otherwise use DownloadMode.NoSharedDownload"
                        raise StorageError(
                            e.errno, f"{e.args[-1]}: a rank of this machine has just brought it: {how}"
                        ) from e

        machine.each(link)

    @contextmanager
    def _temporary(self, storage_id: str) -> Iterator[Path]:
        """A folder in the scratch folder, where the next to make one removes what the dead have left."""
        assert self._scratch is not None, "a store that is no directory needs a scratch folder"
        owner = Owner.current(f"restored by rank {self._distributed.rank}, {next(self._uses)} of {id(self)}")
        base = f"{self._scratch.root}/{ASIDE}/{storage_id}.{owner.tag}"
        self._scratch.make_aside_folder(base, owner)
        try:
            path = f"{base}/{storage_id}"
            self._scratch.disk.make_folders(path)
            yield Path(path)
        finally:
            clear(self._scratch.disk, base)

    def metadata(self, storage_id: str) -> dict[str, Any]:
        """The metadata of a checkpoint."""
        return self._store_of(storage_id).open(storage_id).metadata()

    def written_by(self, storage_id: str) -> str | None:
        """The run that wrote a checkpoint; None: it has no manifest that says so."""
        header = self._store_of(storage_id).open(storage_id).manifest.header
        return None if header is None else header.run_id

    def delete(self, storage_id: str) -> dict[str, int]:
        """Delete a checkpoint; what was compared of it does not count any more."""
        remaining = self._store_of(storage_id).delete(storage_id)
        for mode in DownloadMode:
            self._verified.pop((storage_id, mode), None)
        return remaining

    def _store_of(self, storage_id: str) -> Store:
        return self._elsewhere.get(storage_id, self._store)

    def _hold(self, storage_id: str) -> AbstractContextManager[None]:
        """Keep others from deleting a checkpoint that is being read."""
        return self._store_of(storage_id).hold(storage_id, self._owner())

    def _readers(self, call: str, mode: DownloadMode, *, local: bool) -> Together:
        if not isinstance(mode, DownloadMode):
            raise ValueError(f"checkpoint.{call}(download_mode={mode!r}): it must be a core.DownloadMode")
        ranks = self._distributed
        if mode is DownloadMode.NoSharedDownload:
            return Together.alone(call, ranks.rank)
        if local:
            lane, index, size = ranks.local_lane(LANE), ranks.local_rank, ranks.local_size
        else:
            lane, index, size = ranks.lane(LANE), ranks.rank, ranks.size
        return Together(call, lane, rank=ranks.rank, index=index, size=size)


def _seen(store: Store, storage_id: str, manifest: Manifest) -> StoredCheckpoint | None:
    """Return a checkpoint that another rank has found; None if this process does not see it."""
    try:
        return store.open(storage_id, manifest)
    except CheckpointNotFound:
        return None


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
        stored = None if checkpoint.path is None else os.path.realpath(checkpoint.path)
        if stored is not None and (target + "/").startswith(stored + "/"):
            raise ValueError(f"ckpt_dir {folder} lies in the stored checkpoint itself ({stored})")
        if os.path.exists(target) and not os.path.isdir(target):
            raise ValueError(f"ckpt_dir {folder} is not a folder")
        selected = vote(checkpoint.manifest, selector)
        _check_target(target, checkpoint.manifest.resources if selected is None else selected)
        return target, selected

    votes = together.gather(look)
    task = together.chief(lambda: _tasks(checkpoint.manifest, votes or []))[together.index]
    arrival = _Arrival(disk, task, os.path.realpath(folder), together.index)
    if task.last:
        _collect(disk, os.path.dirname(task.aside), os.path.dirname(arrival.target))
    try:
        together.each(lambda: checkpoint.copy_out(Path(task.aside), task.files, task.directories, progress))
        together.each(arrival.arrive)
    except BaseException:
        arrival.undo()
        raise
    finally:
        if task.last:
            clear(disk, task.aside)


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


def _tasks(manifest: Manifest, votes: Sequence[tuple[str, set[str] | None]]) -> list[_Task]:
    """Split the files among the ranks that share a folder; the first of them makes the folders that stay empty."""
    tasks: dict[int, _Task] = {}
    for folder in dict.fromkeys(folder for folder, _ in votes):
        ranks = [rank for rank, (other, _) in enumerate(votes) if other == folder]
        merge = os.path.isdir(folder)
        aside = f"{TEMPORARY}-{uuid.uuid4().hex[:12]}.{Owner.current('download').tag}"
        aside = f"{folder}/{aside}" if merge else f"{os.path.dirname(folder)}/{aside}"
        wanted = union(votes[rank][1] for rank in ranks)
        every = manifest.resources if wanted is None else wanted
        tasks |= {rank: _Task([], [], aside, merge, rank == ranks[0]) for rank in ranks}
        tasks[ranks[0]].directories.extend(sorted(p for p in every if p.endswith("/")))
        for rank, paths in weighed({p: f.size for p, f in manifest.files.items() if p in every}, ranks).items():
            tasks[rank].files.extend(paths)
    return [tasks[rank] for rank in range(len(votes))]


def _check_target(target: str, paths: Iterable[str]) -> None:
    """Raise ValueError if what lies in ``target`` is in the way, or would be written through to another place."""
    folders = {path for path in paths if path.endswith("/")}
    files = {path for path in paths if not path.endswith("/")}
    for path in sorted(folders | folders_of(files)):
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


class _Arrival:
    """One rank's files, which get their names in the target, and what takes them back.

    Args:
        disk: the file system.
        task: what this rank has copied.
        target: the folder that the user named.
        rank: the number of this rank.
    """

    def __init__(self, disk: Disk, task: _Task, target: str, rank: int) -> None:
        self._disk, self._task, self.target = disk, task, target
        self._kept = f"{task.aside}/{INNER}/{rank}"  # no file of a checkpoint has such a name
        self._undo: list[Callable[[], None]] = []

    def arrive(self) -> None:
        """Give what was copied its names."""
        disk, task, target = self._disk, self._task, self.target
        if not task.merge:
            if task.last:
                disk.do("rename", target, os.rename, task.aside, target)
                self._undo.append(lambda: disk.do("rename", target, os.rename, target, task.aside))
            return
        disk.make_folders(self._kept)
        for name in sorted(folders_of(task.files).union(task.directories)):
            self._make_folder(f"{target}/{name.rstrip('/')}")
        for number, path in enumerate(task.files):
            self._move(f"{task.aside}/{path}", f"{target}/{path}", f"{self._kept}/{number}")

    def undo(self) -> None:
        """Put everything to where it was; what cannot be is told in the log."""
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
            parsed = Owner.parse(entry.name) if entry.name.startswith(f"{TEMPORARY}-") else None
            status = disk.status(entry.path) if parsed is not None else None
            if parsed is not None and status is not None and not parsed[1].counts(now - status.st_mtime):
                clear(disk, entry.path)


def clear(disk: Disk, folder: str) -> None:
    """Remove what is left aside; if that fails, what is under way matters more."""
    try:
        disk.remove_tree(folder)
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


# Which files ranks want, and how they share the work.


def vote(manifest: Manifest, selector: Selector | None) -> set[str] | None:
    """The resources that a rank wants; None: all."""
    return None if selector is None else {path for path in manifest.resources if selector(path)}


def union(votes: Iterable[set[str] | None]) -> set[str] | None:
    """What any rank wants; None: all."""
    wanted: set[str] = set()
    for one in votes:
        if one is None:
            return None
        wanted |= one
    return wanted


def weighed(sizes: Mapping[str, int], ranks: Iterable[int]) -> dict[int, list[str]]:
    """Split files among ranks, so that these have about the same number of bytes and of files."""
    loads = [(0, rank) for rank in ranks]
    shares: dict[int, list[str]] = {rank: [] for _, rank in loads}
    for path in sorted(sizes, key=lambda p: (-sizes[p], p)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(path)
        heapq.heappush(loads, (load + sizes[path] + FILE_COST, rank))
    return shares


def _foreign_steps(checkpoint: StoredCheckpoint) -> int | None:
    """The steps that a checkpoint written by others says it has, if it does."""
    try:
        steps = checkpoint.metadata().get("steps_completed")
    except CheckpointCorrupt:
        return None
    return steps if isinstance(steps, int) else None

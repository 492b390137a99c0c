"""``download()`` and ``restore_path()``: looked up on the chief, the files split among ranks, every byte compared."""

from __future__ import annotations

import enum
import itertools
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from det_core.core._checkpoint._download import download, merge_selections, remove_quietly, selected_paths
from det_core.core._checkpoint._events import CheckpointObserver
from det_core.core._distributed import DistributedContext
from det_core.core._rank_group import RankGroup
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
    parent_folders,
    scan,
    split_files,
)
from det_core.storage._names import META_DIR, STAGING_DIR

log = logging.getLogger("det_core.checkpoint")
CHANNEL = "checkpoint"


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
        scratch: directory of this node for checkpoints from stores other than directories.
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
        other_stores: Mapping[str, Store],
        scratch: Path | None,
        observer: CheckpointObserver,
        before: Callable[[], None],
        progress: Progress | None,
    ) -> None:
        self._distributed = distributed
        self._store = store
        self._owner = owner
        self._other_stores = other_stores
        self._scratch = None
        if scratch is not None:
            self._scratch = DirectoryStore(scratch, disk=store.disk)
        self._observer = observer
        self._before = before
        self._progress = progress
        self._verified: dict[tuple[str, DownloadMode], set[str]] = {}
        self._restores: set[str] = set()
        self._uses = itertools.count()

    def download(
        self, storage_id: str, ckpt_dir: str | os.PathLike[str], mode: DownloadMode, selector: Selector | None
    ) -> None:
        """Copy a checkpoint into a folder."""
        group = self._readers("download", mode, local=True)
        folder = os.path.abspath(os.fspath(ckpt_dir))
        checkpoint = open_on_all(group, self._store_of(storage_id), storage_id, self._before)
        with ExitStack() as stack:
            if group.is_chief:  # one mark for all that read together
                stack.enter_context(self._read_lease(storage_id))
            download(group, self._store.disk, checkpoint, folder, selector, self._progress)

    def check(self, storage_id: str, *, digests: bool = False) -> None:
        """Check a checkpoint that is about to be restored; every rank calls.

        In a directory every byte is compared, which restoring it then need not do. What must be fetched is compared
        when it is, so that nothing is fetched twice, and here only looked at: that it is there, and how large.

        Args:
            storage_id: the checkpoint.
            digests: compare every byte of what must be fetched, too.

        Raises:
            CheckpointNotFound, CheckpointCorrupt: on every rank alike.
        """
        shared = DownloadMode.LocalWorkersShareDownload
        group = self._readers("resume", shared, local=False)
        store = self._store_of(storage_id)
        manifest = group.on_chief(lambda: store.open(storage_id).manifest)
        checkpoint = group.on_all(lambda: _seen(store, storage_id, manifest))
        if not self.on_any(shared, checkpoint is None):
            assert checkpoint is not None
            self._compare(group, checkpoint, digests)
        else:  # a directory of the chief's machine, from which a script may restore on the chief alone
            group.on_chief(lambda: self._compare(RankGroup.alone("resume"), store.open(storage_id, manifest), digests))

    def _compare(self, group: RankGroup, checkpoint: StoredCheckpoint, digests: bool) -> None:
        if checkpoint.manifest.verified:
            group.on_chief(checkpoint.metadata)
        if digests or checkpoint.path is not None:
            known = set()
        else:
            known = set(checkpoint.manifest.files)
        verified = verify(group, checkpoint, None, known, self._progress)
        if checkpoint.path is not None:
            self._verified |= {(checkpoint.storage_id, mode): set(verified) for mode in DownloadMode}

    def note_restore(self, storage_id: str, steps: int | None, written_by: str | None) -> None:
        """Record that this process goes on from a checkpoint, once."""
        if storage_id not in self._restores:
            self._restores.add(storage_id)
            self._observer.on_restored(storage_id, steps, written_by)

    def note_damage(self, storage_id: str) -> None:
        """Record that the checkpoint to start from is damaged, for the next start."""
        self._observer.on_damaged(storage_id)

    def steps_completed(self, storage_id: str) -> int | None:
        """Return the steps of a checkpoint; None if it does not say."""
        checkpoint = self._store_of(storage_id).open(storage_id)
        header = checkpoint.manifest.header
        if header is None:
            return _foreign_steps(checkpoint)
        return header.steps_completed

    def on_any(self, mode: DownloadMode, is_so: bool) -> bool:
        """Return whether something is so on any of the ranks that restore together."""
        group = self._readers("resume", mode, local=False)
        answers = group.gather(lambda: is_so)
        return group.on_chief(lambda: any(answers or []))

    @contextmanager
    def restore_path(
        self, storage_id: str, mode: DownloadMode, selector: Selector | None, *, reject_unlisted: bool
    ) -> Iterator[Path]:
        """Give a folder with the checkpoint's files, compared with the manifest."""
        group = self._readers("restore_path", mode, local=False)
        checkpoint = open_on_all(group, self._store_of(storage_id), storage_id, self._before)
        with ExitStack() as stack:
            if checkpoint.path is None:
                path = stack.enter_context(self._fetched(group, checkpoint, mode, selector))
            else:
                path = checkpoint.path
                group.on_all(lambda: stack.enter_context(self._read_lease(storage_id)))
                known = self._verified.setdefault((storage_id, mode), set())
                known |= verify(group, checkpoint, selector, known, self._progress)
                if reject_unlisted:
                    group.on_chief(lambda: check_unlisted(self._store.disk, checkpoint))
                stack.enter_context(checkpoint.check_unchanged())
            header = checkpoint.manifest.header
            if header is None:
                self.note_restore(storage_id, _foreign_steps(checkpoint), None)
            else:
                self.note_restore(storage_id, header.steps_completed, header.run_id)
            yield path

    @contextmanager
    def _fetched(
        self, group: RankGroup, checkpoint: StoredCheckpoint, mode: DownloadMode, selector: Selector | None
    ) -> Iterator[Path]:
        """Give a copy in a temporary folder, removed when the block ends; a failure on one node fails all.

        The ranks of a machine fetch into one folder. Then each has names of its own for the files, in a folder of its
        own, so that none has to wait for the others at the end.
        """
        machine = self._readers("restore_path", mode, local=True)
        with ExitStack() as stack:

            def fetch() -> Path | BaseException:
                own = stack.enter_context(self._temporary(checkpoint.storage_id))
                try:
                    with self._read_lease(checkpoint.storage_id) if machine.is_chief else nullcontext():
                        self._fetch(machine, checkpoint, own, selector)
                except BaseException as e:
                    if machine.is_chief:
                        raise
                    return e  # all ranks of the machine have it, and the first of them tells the others
                return own

            found = group.on_all(fetch)
            if isinstance(found, BaseException):
                raise found
            yield found

    def _fetch(self, machine: RankGroup, checkpoint: StoredCheckpoint, own: Path, selector: Selector | None) -> None:
        """Fetch this rank's share of what any rank of the machine selects, then link the others' shares."""
        manifest = checkpoint.manifest
        disk = self._store.disk
        votes = machine.gather(lambda: (os.fspath(own), selected_paths(manifest, selector)))

        def plan() -> tuple[list[str], list[tuple[str, list[str]]]]:
            wanted = merge_selections(chosen for _, chosen in votes or [])
            every = set(manifest.resources)
            if wanted is not None:
                every = wanted
            sizes = {path: file.size for path, file in manifest.files.items() if path in every}
            shares = split_files(sizes, range(machine.size))
            folders = [path for path in every if path.endswith("/")]
            return sorted(folders), [(folder, shares[rank]) for rank, (folder, _) in enumerate(votes or [])]

        directories, shares = machine.on_chief(plan)
        machine.on_all(lambda: checkpoint.copy_to(own, shares[machine.index][1], directories, self._progress))

        def link() -> None:
            for rank, (folder, names) in enumerate(shares):
                if rank == machine.index:
                    continue
                for directory in sorted(parent_folders(names)):
                    disk.make_folders(f"{own}/{directory.rstrip('/')}")
                for name in names:
                    try:
                        disk.do("link", f"{own}/{name}", os.link, f"{folder}/{name}", f"{own}/{name}")
                    except StorageError as e:
                        how = "do all of them see the same folder there? Otherwise use DownloadMode.NoSharedDownload"
                        raise StorageError(
                            e.errno, f"{e.args[-1]}: a rank of this machine has just brought it: {how}"
                        ) from e

        machine.on_all(link)

    @contextmanager
    def _temporary(self, storage_id: str) -> Iterator[Path]:
        """Give a folder in the scratch folder, which first removes those of dead processes."""
        assert self._scratch is not None, "a store other than a directory needs a scratch folder"
        owner = Owner.current(f"restored by rank {self._distributed.rank}, {next(self._uses)} of {id(self)}")
        base = f"{self._scratch.root}/{STAGING_DIR}/{storage_id}.{owner.tag}"
        self._scratch.make_staging_dir(base, owner)
        try:
            path = f"{base}/{storage_id}"
            self._scratch.disk.make_folders(path)
            yield Path(path)
        finally:
            remove_quietly(self._scratch.disk, base)

    def metadata(self, storage_id: str) -> dict[str, Any]:
        """Return the metadata of a checkpoint."""
        return self._store_of(storage_id).open(storage_id).metadata()

    def written_by(self, storage_id: str) -> str | None:
        """Return the run that wrote a checkpoint, or None without a manifest."""
        header = self._store_of(storage_id).open(storage_id).manifest.header
        if header is None:
            return None
        return header.run_id

    def delete(self, storage_id: str) -> dict[str, int]:
        """Delete a checkpoint; what was compared of it does not count any more."""
        remaining = self._store_of(storage_id).delete(storage_id)
        for mode in DownloadMode:
            self._verified.pop((storage_id, mode), None)
        return remaining

    def _store_of(self, storage_id: str) -> Store:
        return self._other_stores.get(storage_id, self._store)

    def _read_lease(self, storage_id: str) -> AbstractContextManager[None]:
        """Keep others from deleting a checkpoint that is being read."""
        return self._store_of(storage_id).read_lease(storage_id, self._owner())

    def _readers(self, call: str, mode: DownloadMode, *, local: bool) -> RankGroup:
        if not isinstance(mode, DownloadMode):
            raise ValueError(f"checkpoint.{call}(download_mode={mode!r}): it must be a core.DownloadMode")
        ranks = self._distributed
        if mode is DownloadMode.NoSharedDownload:
            return RankGroup.alone(call, ranks.rank)
        if local:
            channel = ranks.local_channel(CHANNEL)
            index = ranks.local_rank
            size = ranks.local_size
        else:
            channel = ranks.channel(CHANNEL)
            index = ranks.rank
            size = ranks.size
        return RankGroup(call, channel, rank=ranks.rank, index=index, size=size)


def _seen(store: Store, storage_id: str, manifest: Manifest) -> StoredCheckpoint | None:
    """Return a checkpoint that another rank has found; None if this process does not see it."""
    try:
        return store.open(storage_id, manifest)
    except CheckpointNotFound:
        return None


def open_on_all(
    group: RankGroup, store: Store, storage_id: str, before: Callable[[], None] | None = None
) -> StoredCheckpoint:
    """Look a checkpoint up on the chief of ``together``; the others take its manifest from there.

    Args:
        group: the ranks.
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

    asked = group.gather(ask)
    opened: list[StoredCheckpoint] = []

    def look_up() -> Manifest:
        if len(set(asked or [])) > 1:
            raise ValueError(f"the ranks ask for different checkpoints: {', '.join(map(repr, asked or []))}")
        opened.append(store.open(storage_id))
        return opened[0].manifest

    manifest = group.on_chief(look_up)
    return group.on_all(lambda: opened[0] if opened else store.open(storage_id, manifest))


def verify(
    group: RankGroup,
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
    votes = group.gather(lambda: selected_paths(manifest, selector))
    wanted = group.on_chief(lambda: merge_selections(votes or []))
    if wanted is None:
        files = set(manifest.files)
    else:
        files = wanted.intersection(manifest.files)

    def check() -> None:
        for names, digests in ((files.difference(known), True), (files.intersection(known), False)):
            checkpoint.check(names, part=group.index, parts=group.size, digests=digests, progress=progress)

    group.on_all(check)
    return files


def check_unlisted(disk: Disk, checkpoint: StoredCheckpoint) -> None:
    """Refuse a stored folder with files that its manifest does not list, but for what python leaves beside modules.

    Raises:
        CheckpointCorrupt: there are some; the message names them.
    """
    try:
        files = scan(disk, str(checkpoint.path), exclude=(META_DIR,)).files
    except ValueError as e:
        raise CheckpointCorrupt(f"checkpoint {checkpoint.path} is not read: {e}") from e
    added = sorted(name for name in {*files}.difference(checkpoint.manifest.files) if "__pycache__/" not in name)
    if added:
        raise CheckpointCorrupt(
            f"checkpoint {checkpoint.path} holds {', '.join(added[:3])}{', …' if added[3:] else ''}, which its "
            "manifest does not list: somebody has put it there, so it is not read. Remove it, or start from another"
        )


def _foreign_steps(checkpoint: StoredCheckpoint) -> int | None:
    """Return the steps in the metadata of a checkpoint without a manifest, or None."""
    try:
        steps = checkpoint.metadata().get("steps_completed")
    except CheckpointCorrupt:
        return None
    if isinstance(steps, int):
        return steps
    return None

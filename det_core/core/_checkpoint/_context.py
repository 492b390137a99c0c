"""CheckpointContext: ``ctx.checkpoint``."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from det_core.core._checkpoint._cache import CheckpointCache
from det_core.core._checkpoint._closing import Closing
from det_core.core._checkpoint._handle import CheckpointHandle
from det_core.core._checkpoint._mode import DownloadMode
from det_core.core._checkpoint._reader import CheckpointReader
from det_core.core._checkpoint._record import CheckpointRecord, Reports
from det_core.core._checkpoint._upload import FolderOrFolders
from det_core.core._checkpoint._writer import CheckpointWriter, IfBusy
from det_core.core._distributed import DistributedContext
from det_core.core._ranks import on_chief, raise_if_ended
from det_core.errors import ContextClosed
from det_core.storage import Owner, Progress, Selector, Store

log = logging.getLogger("det_core.checkpoint")


class CheckpointContext:
    """Stores checkpoints and gets them back. A checkpoint is complete, or it is not there.

    Each has files, a ``metadata.json``, and a manifest with the size and the digests of every file, by which they are
    checked when they are read. It is listed only when all of that is on disk.

    Args:
        distributed: the ranks.
        store: where checkpoints lie.
        run_id: the run that writes.
        restart: how often that run was restarted before.
        committing: called on the chief with a storage_id just before that checkpoint becomes complete.
        reports: made durable on the chief with each checkpoint.
        registered: called on the chief when a checkpoint is complete, before the call that wrote it returns; of one
            that is saved in the background, in a thread of its own.
        deleted: called with a storage_id and the resources that are left.
        restored: called with a storage_id, its steps_completed and the run that wrote it (None: it does not say), once
            per process and checkpoint, when a ``restore_path()`` begins.
        described: called with a storage_id; what a master has as its metadata, None: ask the store.
        latest: the checkpoint that this process starts from.
        elsewhere: by storage_id, the stores of checkpoints that lie in another one.
        cache: where this machine keeps copies of checkpoints; needed where ``store`` is no directory.
        progress: called with the number of bytes that were copied or checked since it was last called.
        deadline: until when, on the monotonic clock, this process may go on once it is preempted; None: as long as it
            likes. Asked when the context closes while a checkpoint is being saved.
        say: tells a person what becomes of that checkpoint.
    """

    def __init__(
        self,
        distributed: DistributedContext,
        store: Store,
        *,
        run_id: str,
        restart: int,
        committing: Callable[[str], None] = lambda _: None,
        reports: Reports | None = None,
        registered: Callable[[CheckpointRecord], None],
        deleted: Callable[[str, Mapping[str, int]], None],
        restored: Callable[[str, int | None, str | None], None],
        described: Callable[[str], dict[str, Any] | None] = lambda _: None,
        latest: str | None = None,
        elsewhere: Mapping[str, Store] = MappingProxyType({}),
        cache: CheckpointCache | None = None,
        progress: Progress | None = None,
        deadline: Callable[[], float | None] = lambda: None,
        say: Callable[[str], None] = log.info,
    ) -> None:
        self._distributed = distributed
        self._store = store
        self._run_id = run_id
        self._restart = restart
        self._deleted = deleted
        self._described = described
        self._latest = latest
        self._elsewhere = elsewhere
        self._writer = CheckpointWriter(
            distributed, store, run_id=run_id, restart=restart, owner=self._owner, committing=committing,
            reports=reports, registered=registered, closing=Closing(store, run_id, deadline, say), progress=progress,
        )  # fmt: skip
        self._reader = CheckpointReader(
            distributed, store, owner=self._owner, elsewhere=elsewhere, cache=cache, restored=restored,
            before=self._writer.raise_failures, progress=progress,
        )  # fmt: skip
        self._closed = False

    def upload(
        self,
        ckpt_dir: FolderOrFolders | None,
        metadata: Mapping[str, Any] | None = None,
        *,
        shard: bool = False,
        selector: Selector | None = None,
        blocking: bool = True,
        consume: bool = False,
        if_busy: IfBusy = "wait",
    ) -> str:
        """Copy a folder into a new checkpoint. The folder itself is left as it is, unless ``consume`` says otherwise.

        Links that stay inside the folder are followed and their content is copied; one that leads out of it is an
        error. A ``metadata.json`` at the top of the folder is not uploaded: the checkpoint's own, with the given
        metadata, has that name. Nor is a folder ``.det_core``, as restored checkpoints have one.

        Args:
            ckpt_dir: the folder; or several, as ``{"best": DIR, "last": DIR}``, each of which becomes a folder of that
                name in the checkpoint. With ``shard=True``, None for a rank that has nothing to upload.
            metadata: what to remember with it, at least ``{"steps_completed": N}``. With ``shard=True`` the
                dictionaries of all ranks are merged.
            shard: every rank calls, and the checkpoint is the union of their folders. Otherwise only the chief may.
            selector: called with paths as they will be in the checkpoint (folders end in a slash); says which to
                upload.
            blocking: False: return as soon as the files may be changed again (they are cloned where the file system
                can, else copied), and save them in the background. A failure is raised by the next call on
                ``ctx.checkpoint``, or when the context is closed, which waits.
            consume: the files are given up: they become the checkpoint's own, and are gone from the folder, so that
                nothing is copied where folder and store share a file system. If the checkpoint cannot be saved they are
                put back; if this process is killed before it is, they are lost.
            if_busy: what to do while an earlier checkpoint is still being saved: ``"wait"`` or ``"refuse"``.

        Returns:
            the checkpoint's storage_id.

        Raises:
            ValueError: the folder or the metadata cannot be used. Nothing was done.
            RuntimeError: called on a worker with ``shard=False``, or without any folder.
            CheckpointConflict: ranks have different files under one name, or different metadata.
            CheckpointBusy: an earlier one is still being saved, and ``if_busy="refuse"``.
            StorageError: the store refused.
            CheckpointError: an earlier one could not be saved in the background. Nothing else was done.

        With ``shard=True``, if one rank raises all do, and nothing is kept.
        """
        self._check()
        return self._writer.upload(ckpt_dir, metadata, shard, selector, blocking, consume, if_busy)

    def save(
        self,
        state: Any,
        metadata: Mapping[str, Any] | None = None,
        *,
        name: str = "state.pt",
        files: Mapping[str, bytes | os.PathLike[str]] | None = None,
        shard: bool = False,
        blocking: bool = True,
        if_busy: IfBusy = "wait",
    ) -> str:
        """Save a state of torch, such as ``{"model": model.state_dict(), …}``, as a file of a checkpoint, ``name``.

        ``torch.load`` reads the file, also with ``weights_only=True``. With ``blocking=False`` this is the way to save
        that costs a training loop least: the call copies the tensors, from whichever devices, into memory that is kept
        for that, pickles everything else, and returns; the state may be changed at once. A process beside this one
        writes the file and commits it. It is started by the first such call
        and ends with the context, and with this process however that ends.

        That takes memory of the size of the state, on this machine, and once more when a checkpoint of all ranks is
        begun while the one before is being saved. Where no such process can be started, a thread of this one does its
        work, and the log says so.

        Args:
            state: what ``torch.save`` takes.
            metadata: what to remember with it, at least ``{"steps_completed": N}``.
            name: the file's path in the checkpoint.
            files: what else is in the checkpoint: by path there, the bytes of a file, or a file or folder to copy. They
                are written or copied before the call returns, also with ``blocking=False``.
            shard: every rank calls, each with names of its own. Otherwise only the chief may.
            blocking: False: return as soon as the state is copied, as with :meth:`upload`.
            if_busy: as in :meth:`upload`.

        Returns:
            the checkpoint's storage_id.

        Raises:
            ValueError, RuntimeError, CheckpointConflict, CheckpointBusy, StorageError, CheckpointError: as in
                :meth:`upload`.
            TypeError: ``files`` holds something else.
            MissingExtra: torch is not installed.
            Exception: what in the state cannot be pickled. Nothing was done.
        """
        self._check()
        return self._writer.save(state, metadata, name, files or {}, shard, blocking, if_busy)

    @contextmanager
    def store_path(
        self,
        metadata: Mapping[str, Any] | None = None,
        *,
        shard: bool = False,
        blocking: bool = True,
        if_busy: IfBusy = "wait",
    ) -> Iterator[tuple[Path, str]]:
        """A folder to save into, as ``with ctx.checkpoint.store_path({"steps_completed": n}) as (path, storage_id):``.

        When the block ends, what is in the folder becomes the checkpoint, without being copied; nothing may be written
        into it after that. If the block raises, nothing is kept. A ``metadata.json`` or ``.det_core`` that the script
        puts there is replaced.

        With ``shard=True`` each rank has a folder of its own and the checkpoint is their union, so two ranks that
        write different files under one name are found out. A rank makes the subfolders that it needs itself, and does
        not see what the others write before the block has ended.

        Args:
            metadata: what to remember with it, at least ``{"steps_completed": N}``.
            shard: every rank enters. Otherwise only the chief may.
            blocking: False: the end of the block does not wait, and the checkpoint is saved in the background, as with
                :meth:`upload`.
            if_busy: as in :meth:`upload`.

        Raises:
            ValueError, RuntimeError, CheckpointConflict, CheckpointBusy, StorageError, CheckpointError: as in
                :meth:`upload`. If one rank's block or one rank's disk fails, every rank raises an error that names it.
        """
        self._check()
        handle = self._writer.begin("store_path", metadata, shard, if_busy)
        try:
            yield handle.path, handle.storage_id
        except BaseException as e:
            handle.abort(e, blocking)
            raise
        handle.commit(blocking)

    def begin(
        self, metadata: Mapping[str, Any] | None = None, *, shard: bool = False, if_busy: IfBusy = "wait"
    ) -> CheckpointHandle:
        """Start a checkpoint that is committed later, in any thread; arguments and errors as in :meth:`store_path`."""
        self._check()
        return self._writer.begin("begin", metadata, shard, if_busy)

    def download(
        self,
        storage_id: str,
        ckpt_dir: str | os.PathLike[str],
        download_mode: DownloadMode = DownloadMode.LocalWorkersShareDownload,
        *,
        selector: Selector | None = None,
    ) -> None:
        """Copy a checkpoint into a folder, comparing every byte with the manifest.

        All is copied aside and compared first, and then takes its place: if this raises, the folder is as it was.
        What else is in the folder stays. From an object store it is fetched by way of this machine's cache, where
        there is room, so that jobs share one fetch; with ``DownloadMode.NoSharedDownload`` straight into the folder.

        Args:
            storage_id: the checkpoint.
            ckpt_dir: the folder; made if need be.
            download_mode: who calls, see :class:`DownloadMode`. Ranks of a machine that share the download and name
                the same folder split the files among them.
            selector: called with the paths of the checkpoint (folders end in a slash); says which to copy. A file
                that any rank with the same folder selects is copied.

        Raises:
            CheckpointNotFound: there is no such checkpoint.
            CheckpointCorrupt: a file is missing, or differs from the manifest; the message names it.
            StorageError: the disk refused.

        Where ranks share the download, all of them raise if one does.
        """
        self._check()
        self._reader.download(storage_id, ckpt_dir, download_mode, selector)

    @contextmanager
    def restore_path(
        self,
        storage_id: str,
        download_mode: DownloadMode = DownloadMode.LocalWorkersShareDownload,
        *,
        selector: Selector | None = None,
        only_listed: bool = False,
    ) -> Iterator[Path]:
        """A folder with the checkpoint's files, as ``with ctx.checkpoint.restore_path(storage_id) as path:``.

        Only read from it. On a directory this is the stored checkpoint itself. From any other store, the ranks of a
        machine bring one copy up to date, in a cache that all jobs on the machine share and that keeps what was used
        last (``DET_CORE_CACHE``, ``DET_CORE_CACHE_BYTES``); with ``NoSharedDownload`` each has a copy of its own, which
        goes when the block ends.

        The files are compared with the manifest first: digests once per job, every rank its share, and sizes every
        time. What differs in a copy is fetched again. A checkpoint without a manifest, written by others, is taken as
        it is, and the log says so.

        Args:
            storage_id: the checkpoint.
            download_mode: who calls, see :class:`DownloadMode`.
            selector: called with the paths of the checkpoint; says which files are needed, and so are there. On one
                machine, what any rank selects is there for all.
            only_listed: refuse a checkpoint in which somebody has put files that its manifest does not list, before
                something looks for files by their names, as DeepSpeed does. Trainers ask for it.

        Raises:
            CheckpointNotFound, CheckpointCorrupt, StorageError: as in :meth:`download`.
        """
        self._check()
        with self._reader.restore_path(storage_id, download_mode, selector, only_listed=only_listed) as path:
            yield path

    @contextmanager
    def resume(
        self,
        download_mode: DownloadMode = DownloadMode.LocalWorkersShareDownload,
        *,
        selector: Selector | None = None,
        only_listed: bool = False,
    ) -> Iterator[Path | None]:
        """The folder to start from, or None, as ``with ctx.checkpoint.resume() as path:``.

        It is that of ``ctx.latest_checkpoint``: what the master hands over, or the newest checkpoint of a run that is
        resumed. It stays the same while this process runs, however often it is asked for.

        Arguments and errors as in :meth:`restore_path`: by default, every rank enters.
        """
        if self._latest is None:
            self._check()
            yield None
            return
        with self.restore_path(self._latest, download_mode, selector=selector, only_listed=only_listed) as path:
            yield path

    def get_metadata(self, storage_id: str) -> dict[str, Any]:
        """The metadata of a checkpoint, on any rank.

        Raises:
            CheckpointNotFound: there is no such checkpoint.
            CheckpointCorrupt: its metadata.json differs from the manifest.
        """
        self._check()
        self._writer.raise_failures()
        found = self._described(storage_id)
        return self._reader.metadata(storage_id) if found is None else found

    def previous(self, storage_id: str) -> str | None:
        """The checkpoint that this run wrote before another, or None. Every rank asks.

        For one that goes on from an older checkpoint, as the newest is damaged.
        """
        self._check()

        def find() -> str | None:
            known = [header.storage_id for header in self._store.list(self._run_id)]
            return ([None, *known])[known.index(storage_id)] if storage_id in known else None

        return on_chief(self._distributed, "user", find)

    def is_own(self, storage_id: str) -> bool:
        """Whether this run wrote a checkpoint, or under a master a trial of its experiment, on any rank.

        Its manifest says so, with which every file is compared when it is read; one without is nobody's. Ask before
        files are read that run code, such as pickles.

        Raises:
            CheckpointNotFound: there is no such checkpoint.
        """
        self._check()
        self._writer.raise_failures()
        run_id = self._reader.written_by(storage_id)
        if run_id is None or run_id == self._run_id:
            return run_id is not None
        experiment, of_a_trial, _ = self._run_id.partition(".")
        return bool(of_a_trial) and experiment.isdigit() and run_id.partition(".")[0] == experiment

    def delete(self, storage_id: str) -> None:
        """Delete a checkpoint, on any rank. It stops being listed before its bytes go; doing it again is no error.

        Raises:
            ValueError: ``storage_id`` can name no checkpoint.
            StorageError: the store refused.
        """
        self._check()
        self._writer.raise_failures()
        remaining = self._elsewhere.get(storage_id, self._store).delete(storage_id)
        self._reader.forget(storage_id)
        self._deleted(storage_id, remaining)

    def close(self) -> None:
        """Remove what was begun and never committed, and wait for what is being saved. Idempotent.

        If this process is preempted, it waits no longer than there is time.

        Raises:
            CheckpointError: a checkpoint was not saved in the background; the message says why.
        """
        if not self._closed:
            self._closed = True
            self._writer.close()

    def _check(self) -> None:
        if self._closed:
            raise ContextClosed("this CheckpointContext is closed")
        raise_if_ended(self._distributed)

    def _owner(self) -> Owner:
        return Owner.current(self._run_id, self._restart)

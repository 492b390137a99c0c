"""CheckpointContext: ``ctx.checkpoint``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from det_core import _clock
from det_core._errors import ContextClosed
from det_core.core._checkpoint._cache import CheckpointCache
from det_core.core._checkpoint._handle import CheckpointHandle, remove
from det_core.core._checkpoint._metadata import check_steps, merge_metadata, plain_metadata
from det_core.core._checkpoint._mode import DownloadMode
from det_core.core._checkpoint._reader import LANE, CheckpointReader
from det_core.core._checkpoint._record import CheckpointRecord, record_of
from det_core.core._checkpoint._together import Together
from det_core.core._checkpoint._upload import Upload, check_folder
from det_core.core._distributed import DistributedContext
from det_core.core._ranks import raise_if_ended
from det_core.storage import (
    FileEntry,
    Header,
    Owner,
    Progress,
    Selector,
    Staging,
    Store,
)


class CheckpointContext:
    """Stores checkpoints and gets them back. A checkpoint is complete, or it is not there.

    Each has files, a ``metadata.json``, and a manifest with the size and the digests of every file, by which they are
    checked when they are read. It is listed only when all of that is on disk.

    Args:
        distributed: the ranks.
        store: where checkpoints lie.
        run_id: the run that writes.
        restart: how often that run was restarted before.
        registered: called on the chief when a checkpoint is complete, before the call that wrote it returns.
        deleted: called with a storage_id and the resources that are left.
        restored: called with a storage_id and its steps_completed, once per process and checkpoint, when a
            ``restore_path()`` begins.
        cache: where this machine keeps copies of checkpoints; needed where ``store`` is no directory.
        progress: called with the number of bytes that were copied or checked since it was last called.
    """

    def __init__(
        self,
        distributed: DistributedContext,
        store: Store,
        *,
        run_id: str,
        restart: int,
        registered: Callable[[CheckpointRecord], None],
        deleted: Callable[[str, Mapping[str, int]], None],
        restored: Callable[[str, int | None], None],
        cache: CheckpointCache | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._distributed = distributed
        self._store = store
        self._run_id = run_id
        self._restart = restart
        self._registered = registered
        self._deleted = deleted
        self._reader = CheckpointReader(
            distributed, store, owner=self._owner, cache=cache, restored=restored, progress=progress
        )
        self._progress = progress
        self._ordinal = 0
        self._handles: set[CheckpointHandle] = set()
        self._closed = False

    def upload(
        self,
        ckpt_dir: str | os.PathLike[str] | None,
        metadata: Mapping[str, Any] | None = None,
        *,
        shard: bool = False,
        selector: Selector | None = None,
    ) -> str:
        """Copy a folder into a new checkpoint. The folder itself is left as it is.

        Links that stay inside the folder are followed and their content is copied; one that leads out of it is an
        error. A ``metadata.json`` at the top of the folder is not uploaded: the checkpoint's own, with the given
        metadata, has that name. Nor is a folder ``.det_core``, as restored checkpoints have one.

        Args:
            ckpt_dir: the folder. With ``shard=True``, None for a rank that has nothing to upload.
            metadata: what to remember with it, at least ``{"steps_completed": N}``. With ``shard=True`` the
                dictionaries of all ranks are merged.
            shard: every rank calls, and the checkpoint is the union of their folders. Otherwise only the chief may.
            selector: called with paths relative to the folder (folders end in a slash); says which to upload.

        Returns:
            the checkpoint's storage_id.

        Raises:
            ValueError: the folder or the metadata cannot be used. Nothing was done.
            RuntimeError: called on a worker with ``shard=False``, or without any folder.
            CheckpointConflict: ranks have different files under one name, or different metadata.
            StorageError: the store refused.

        With ``shard=True``, if one rank raises all do, and nothing is kept.
        """
        together = self._writers("upload", shard)

        def check() -> dict[str, Any]:
            if ckpt_dir is None and not shard:
                raise RuntimeError("upload(ckpt_dir=None) needs shard=True: there is nothing to upload")
            if ckpt_dir is None and selector is not None:
                raise RuntimeError("upload() was given a selector, but no ckpt_dir to select from")
            if ckpt_dir is not None:
                check_folder(ckpt_dir, self._store.root, selector)
            return self._metadata(metadata, shard)

        return Upload(
            together=together,
            disk=self._store.disk,
            folder=None if ckpt_dir is None else os.path.abspath(os.fspath(ckpt_dir)),
            selector=selector,
            check=check,
            begin=lambda: self._stage(together, shard),
            finish=self._finish,
            progress=self._progress,
        ).run()

    @contextmanager
    def store_path(
        self, metadata: Mapping[str, Any] | None = None, *, shard: bool = False
    ) -> Iterator[tuple[Path, str]]:
        """A folder to save into, as ``with ctx.checkpoint.store_path({"steps_completed": n}) as (path, storage_id):``.

        When the block ends, what is in the folder becomes the checkpoint, without being copied. If the block raises,
        nothing is kept. A ``metadata.json`` or ``.det_core`` that the script puts there is replaced.

        With ``shard=True`` each rank has a folder of its own and the checkpoint is their union, so two ranks that
        write different files under one name are found out. A rank makes the subfolders that it needs itself, and does
        not see what the others write before the block has ended.

        Args:
            metadata: what to remember with it, at least ``{"steps_completed": N}``.
            shard: every rank enters. Otherwise only the chief may.

        Raises:
            ValueError, RuntimeError, CheckpointConflict, StorageError: as in :meth:`upload`. If one rank's block or
                one rank's disk fails, every rank raises an error that names it.
        """
        handle = self._begin("store_path", metadata, shard)
        try:
            yield handle.path, handle.storage_id
        except BaseException as e:
            handle.abort(e)
            raise
        handle.commit()

    def begin(self, metadata: Mapping[str, Any] | None = None, *, shard: bool = False) -> CheckpointHandle:
        """Start a checkpoint that is committed later; arguments and errors as in :meth:`store_path`."""
        return self._begin("begin", metadata, shard)

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
        What else is in the folder stays.

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

        Raises:
            CheckpointNotFound, CheckpointCorrupt, StorageError: as in :meth:`download`.
        """
        self._check()
        with self._reader.restore_path(storage_id, download_mode, selector) as path:
            yield path

    def get_metadata(self, storage_id: str) -> dict[str, Any]:
        """The metadata of a checkpoint, on any rank.

        Raises:
            CheckpointNotFound: there is no such checkpoint.
            CheckpointCorrupt: its metadata.json differs from the manifest.
        """
        self._check()
        return self._reader.metadata(storage_id)

    def delete(self, storage_id: str) -> None:
        """Delete a checkpoint, on any rank. It stops being listed before its bytes go; doing it again is no error.

        Raises:
            ValueError: ``storage_id`` can name no checkpoint.
            StorageError: the store refused.
        """
        self._check()
        remaining = self._store.delete(storage_id)
        self._reader.forget(storage_id)
        self._deleted(storage_id, remaining)

    def close(self) -> None:
        """Remove what was begun and never committed. Idempotent."""
        self._closed = True
        for handle in list(self._handles):
            handle.drop()
        self._handles.clear()

    def _begin(self, call: str, metadata: Mapping[str, Any] | None, shard: bool) -> CheckpointHandle:
        together = self._writers(call, shard)
        given = together.gather(lambda: self._metadata(metadata, shard))
        together.chief(lambda: check_steps(merge_metadata(given or [])))
        staging = self._stage(together, shard)
        try:
            path = together.each(lambda: staging.path)
        except BaseException:
            if together.first:
                remove(staging)
            raise
        ended = self._handles.discard
        handle = CheckpointHandle(
            together, self._store.disk, staging, path, metadata, self._finish, ended, self._progress
        )
        self._handles.add(handle)
        return handle

    def _stage(self, together: Together, shard: bool) -> Staging:
        """Make a staging on the chief, and join it on every rank if they write together."""
        made: list[Staging] = []

        def begin() -> str:
            import uuid

            made.append(self._store.begin(str(uuid.uuid4()), self._owner()))
            return made[0].ticket

        ticket = together.chief(begin)
        if not shard:
            return made[0]
        try:
            return together.each(lambda: self._store.join(ticket, self._distributed.rank))
        except BaseException:
            if made:
                remove(made[0])
            raise

    def _finish(
        self, staging: Staging, files: dict[str, FileEntry], directories: list[str], metadata: dict[str, Any]
    ) -> None:
        """Commit, then tell. On the chief, when every rank's files are safe."""
        self._ordinal += 1
        header = Header(
            run_id=self._run_id,
            restart=self._restart,
            ordinal=self._ordinal,
            time=_clock.iso(_clock.now()),
            steps_completed=check_steps(metadata),
            storage_id=staging.storage_id,
        )
        manifest = staging.commit(files, directories, metadata, header)
        self._registered(record_of(manifest, metadata))

    def _metadata(self, metadata: Mapping[str, Any] | None, shard: bool) -> dict[str, Any]:
        if metadata is None and shard:
            return {}
        plain = plain_metadata(metadata)
        if not shard:
            check_steps(plain)
        return plain

    def _writers(self, call: str, shard: bool) -> Together:
        self._check()
        rank = self._distributed.rank
        if shard:
            return Together(call, self._distributed.lane(LANE), rank=rank, index=rank, size=self._distributed.size)
        if rank != 0:
            raise RuntimeError(
                f"checkpoint.{call}(shard=False) was called on rank {rank}, but only the chief (rank 0) may: call it "
                "under `if ctx.distributed.rank == 0:`, or on every rank with shard=True"
            )
        return Together(call, None, rank=rank, index=0, size=1)

    def _owner(self) -> Owner:
        return Owner.current(self._run_id, self._restart)

    def _check(self) -> None:
        if self._closed:
            raise ContextClosed("this CheckpointContext is closed")
        raise_if_ended(self._distributed)

"""``ctx.checkpoint``: saves a state, a folder, or what a script writes, and gets it back.

Every save is the same: a folder of ours is filled, its files are hashed and synced or uploaded, and one last step lists
it. The calls differ in who fills the folder, and in which thread the rest is done.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

from det_core._optional import require
from det_core.core._checkpoint._block import with_only
from det_core.core._checkpoint._commit import CheckpointHandle, CheckpointWriter, IfBusy
from det_core.core._checkpoint._events import CheckpointObserver
from det_core.core._checkpoint._per_rank import load_own, to_bytes, with_values
from det_core.core._checkpoint._reader import CHANNEL, CheckpointReader, DownloadMode
from det_core.core._checkpoint._sharding import (
    Contribution,
    abort_quietly,
    merge_metadata,
    plain_metadata,
    plan_shards,
    require_steps_completed,
    write_shards,
)
from det_core.core._checkpoint._snapshot import StateWriter
from det_core.core._checkpoint._sources import ExtraFiles, FolderOrFolders, UploadSource, check_file_name
from det_core.core._checkpoint._start import StartCheckpoint
from det_core.core._checkpoint._start_search import StartSearch
from det_core.core._distributed import DistributedContext
from det_core.core._rank_group import RankGroup, exit_if_job_ended
from det_core.errors import ContextClosed
from det_core.storage import Owner, Progress, Selector, Staging, Store, copy_in

log = logging.getLogger("det_core.checkpoint")
UPLOAD_CHANNEL = "upload"
"""Commits have a lane of their own: else their broadcasts were matched with those of the script."""


class CheckpointContext:
    """Stores checkpoints and gets them back. A checkpoint is complete, or it is not there.

    Each has files, a ``metadata.json``, and a manifest with the size and the digests of every file, by which they are
    checked when they are read. It is listed only when all of that is on disk. One is written at a time.

    Args:
        distributed: the ranks.
        store: where checkpoints lie.
        run_id: the run that writes.
        restart: how often that run was restarted before.
        events: told what becomes of checkpoints.
        start: the checkpoint that this job starts from.
        elsewhere: by storage_id, the stores of checkpoints that lie in another one.
        scratch: directory of this node for checkpoints from stores other than directories.
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
        observer: CheckpointObserver,
        start: StartCheckpoint | None = None,
        other_stores: Mapping[str, Store] = MappingProxyType({}),
        scratch: Path | None = None,
        progress: Progress | None = None,
        deadline: Callable[[], float | None] = lambda: None,
        say: Callable[[str], None] = log.info,
    ) -> None:
        self._distributed = distributed
        self._store = store
        self._observer = observer
        self._start = start or StartCheckpoint()
        self._run_id = run_id
        self._restart = restart
        self._progress = progress
        self._say = say
        self._writer = CheckpointWriter(
            store, run_id=run_id, restart=restart, observer=observer, progress=progress, deadline=deadline, say=say,
            latest=self._start.peek, is_chief=distributed.rank == 0,
        )  # fmt: skip
        self._reader = CheckpointReader(
            distributed, store, owner=self._owner, other_stores=other_stores, scratch=scratch, observer=observer,
            before=self._writer.raise_background_error, progress=progress,
        )  # fmt: skip
        self._start_search = StartSearch(distributed, store, self._reader, self._start, run_id=run_id, say=say)
        self._states = StateWriter(store.disk)
        self._closed = False

    # Saving.

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
        per_rank: Mapping[str, Any] | None = None,
    ) -> str:
        """Save a state of torch, such as ``{"model": model.state_dict(), …}``, as a file of a checkpoint, ``name``.

        ``torch.load`` reads the file, also with ``weights_only=True``. With ``blocking=False`` this is the way to save
        that costs a training loop least: the call copies the state, with its tensors from whichever devices, into
        memory that is kept for that, and returns; the state may be changed at once. The file is written and committed
        by a thread. That takes memory of the size of the state, on this machine. A state that cannot be copied, as one
        with a sparse CSR tensor, is written before the call returns, and a warning says so.

        Args:
            state: what ``torch.save`` takes.
            metadata: what to remember with it, at least ``{"steps_completed": N}``.
            name: the file's path in the checkpoint.
            files: what else is in the checkpoint: by path there, the bytes of a file, or a file or folder to copy. They
                are written or copied before the call returns, also with ``blocking=False``.
            shard: every rank calls, each with names of its own. Otherwise only the chief may.
            blocking: False: return as soon as the state is copied, as with :meth:`upload`.
            if_busy: as in :meth:`upload`.
            per_rank: this rank's own values, such as ``{"random": core.random_state()}``. Then every rank calls, with
                the same keys; the chief writes, and the ``state``, ``metadata`` and ``files`` of the others are not
                looked at. :meth:`load` gives each rank its own. They pass through the chief's memory: keep them small.

        Returns:
            the checkpoint's storage_id.

        Raises:
            ValueError, RuntimeError, CheckpointConflict, CheckpointBusy, StorageError, CheckpointError: as in
                :meth:`upload`. A ValueError, too, if a key is in ``state`` and in ``per_rank``, the ranks' keys differ,
                or ``shard=True`` comes with ``per_rank``; with it, all ranks raise if one does.
            TypeError: ``files`` holds something else; or ``state`` or ``per_rank`` is not a dictionary.
            MissingExtra: torch is not installed.
            Exception: If the state cannot be pickled; with ``blocking=False`` it may be raised like any failure in
                the background.
        """
        self._check()
        require("torch", extra="torch", purpose="checkpoint.save()")
        check_file_name(name)
        if blocking:
            call = "save"
        else:
            call = "save(blocking=False)"
        if per_rank is None:
            extras = ExtraFiles(self._store.disk, files or {}, beside=name)
            handle = self._begin(call, metadata, shard, if_busy)
            return self._write_state(handle, state, name, extras, blocking)
        if shard:
            raise ValueError("save(shard=True, per_rank=…): with shard=True each rank saves its values in its own file")
        ranks = self._writers(f"{call} with per_rank", shard=True)
        with self._writer.turn(ranks, if_busy):
            gathered = ranks.gather(lambda: to_bytes(per_rank))

            def write() -> str:
                whole = with_values(state, gathered or [])
                extras = ExtraFiles(self._store.disk, files or {}, beside=name)
                handle = self._open(RankGroup.alone(call), metadata, shard=False)
                return self._write_state(handle, whole, name, extras, blocking)

            return ranks.on_chief(write)

    def upload(
        self,
        ckpt_dir: FolderOrFolders | None,
        metadata: Mapping[str, Any] | None = None,
        *,
        shard: bool = False,
        selector: Selector | None = None,
        blocking: bool = True,
        if_busy: IfBusy = "wait",
    ) -> str:
        """Copy a folder into a new checkpoint. The folder itself is left as it is.

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
            if_busy: what to do while an earlier checkpoint is still being saved: ``"wait"`` or ``"raise"``.

        Returns:
            the checkpoint's storage_id.

        Raises:
            ValueError: the folder or the metadata cannot be used. Nothing was done.
            RuntimeError: called on a worker with ``shard=False``, or without any folder.
            CheckpointConflict: ranks have different files under one name, or different metadata.
            CheckpointBusy: an earlier one is still being saved, and ``if_busy="raise"``; or one was begun, and neither
                committed nor aborted.
            StorageError: the store refused.
            CheckpointError: an earlier one could not be saved in the background. Nothing else was done.

        With ``shard=True``, if one rank raises all do, and nothing is kept.
        """
        self._check()
        group = self._writers("upload" if blocking else "upload(blocking=False)", shard)
        disk = self._store.disk
        folder = UploadSource(disk, ckpt_dir, selector)

        def offer() -> Contribution:
            if ckpt_dir is None and not shard:
                raise RuntimeError("upload(ckpt_dir=None) needs shard=True: there is nothing to upload")
            folder.check(self._store.root)
            return folder.offer(self._plain(metadata, shard))

        with self._writer.turn(group, if_busy):
            plan = plan_shards(group, offer)
            staging = self._stage(group, shard)
            if blocking:
                try:
                    finish = functools.partial(self._writer.publish, staging)
                    write_shards(
                        group, disk, staging, plan,
                        lambda listing: staging.put(listing, self._progress), finish,
                    )  # fmt: skip
                except BaseException as e:
                    self._writer.note_abort(e, staging.storage_id, metadata)
                    abort_quietly(staging)
                    raise
                return staging.storage_id
            mine = plan.listing.without(plan.part.same)
            handle = self._handle(group, staging, None if metadata is None else plain_metadata(metadata))
            try:
                group.on_all(lambda: copy_in(disk, mine, os.fspath(handle.path)))
            except BaseException:
                handle.discard(quietly=True)  # every rank does
                raise
        handle.commit(blocking=False)
        return handle.storage_id

    @with_only("ctx.checkpoint.store_path(…) as (path, storage_id)")
    def store_path(
        self,
        metadata: Mapping[str, Any] | None = None,
        *,
        shard: bool = False,
        blocking: bool = True,
        if_busy: IfBusy = "wait",
    ) -> Iterator[tuple[Path, str]]:
        """Save into a folder, as ``with ctx.checkpoint.store_path({"steps_completed": n}) as (path, storage_id):``.

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
        handle = self._begin("store_path", metadata, shard, if_busy)
        try:
            yield handle.path, handle.storage_id
        except BaseException as e:
            handle.abort(e, blocking)
            raise
        handle.commit(blocking)

    def begin(
        self, metadata: Mapping[str, Any] | None = None, *, shard: bool = False, if_busy: IfBusy = "wait"
    ) -> CheckpointHandle:
        """Start a checkpoint that is committed later, in any thread; arguments and errors as in :meth:`store_path`.

        It is to be committed or aborted before the next one is begun, by whichever call.
        """
        self._check()
        return self._begin("begin", metadata, shard, if_busy)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no checkpoint is being saved in the background.

        Each rank asks for itself, in any thread. A checkpoint that was begun, and not yet committed, is not waited for.

        Args:
            timeout: maximum wait in seconds. Defaults to None: as long as it takes.

        Returns:
            whether nothing is being saved any more.

        Raises:
            CheckpointError: If the last one could not be saved and no call has said so; the message says why.
        """
        self._check()
        self._writer.check_process()
        return self._writer.wait(timeout)

    # Getting back.

    def load(
        self,
        path: str | os.PathLike[str],
        *,
        name: str = "state.pt",
        map_location: Any = "cpu",
        strict: bool = True,
    ) -> Any:
        """Load a state that :meth:`save` has written, on any rank, with this rank's own values of ``per_rank``.

        As ``torch.load(path / name, weights_only=True)`` does, which gives the values of all ranks as a list,
        ``["per_rank"]``.

        Args:
            path: the folder that :meth:`resume` or :meth:`restore_path` gives.
            name: the file's path in the checkpoint.
            map_location: where tensors go. Defaults to the CPU, from which ``load_state_dict()`` copies them.
            strict: raise an error where another number of ranks has saved ``per_rank``. False: leave its keys out.

        Raises:
            ValueError: If another number of ranks has saved ``per_rank``.
            CheckpointError: If the file holds objects, which could run code.
            MissingExtra: If torch is not installed.
        """
        self._check()
        rank = self._distributed.rank
        size = self._distributed.size
        return load_own(Path(path) / name, rank, size, map_location, strict=strict)

    def choose_start(self) -> None:
        """Choose the checkpoint to start from, before a message names it. Every rank calls."""
        self._start_search.choose()

    def download(
        self,
        storage_id: str,
        ckpt_dir: str | os.PathLike[str],
        download_mode: DownloadMode = DownloadMode.LocalWorkersShareDownload,
        *,
        selector: Selector | None = None,
    ) -> None:
        """Copy a checkpoint into a folder, comparing every byte with the manifest.

        All is copied aside and compared first, and then takes its place: if this raises, the folder is as it was,
        or a warning says what a disk that is gone kept from being put back.
        What else is in the folder stays.

        Args:
            storage_id: the checkpoint.
            ckpt_dir: the folder; made if need be.
            download_mode: who calls, see :class:`DownloadMode`. Ranks of a machine that share the download and name
                the same folder split the files among them.
            selector: called with the paths of the checkpoint (folders end in a slash); says which to copy. A file
                that any rank with the same folder selects is copied.

        Raises:
            CheckpointNotFound: If no checkpoint has this ID.
            CheckpointCorrupt: a file is missing, or differs from the manifest; the message names it.
            StorageError: the disk refused.

        Where ranks share the download, all of them raise if one does.
        """
        self._check()
        self._reader.download(storage_id, ckpt_dir, download_mode, selector)
        self._observer.on_given(storage_id)

    @with_only("ctx.checkpoint.restore_path(storage_id) as path")
    def restore_path(
        self,
        storage_id: str,
        download_mode: DownloadMode = DownloadMode.LocalWorkersShareDownload,
        *,
        selector: Selector | None = None,
        reject_unlisted: bool = False,
    ) -> Iterator[Path]:
        """Give a folder with the checkpoint's files, as ``with ctx.checkpoint.restore_path(storage_id) as path:``.

        Only read from it. On a directory this is the stored checkpoint itself, and a change of it is an error when
        the block ends. From any other store, the ranks of a machine fetch each file once, into a temporary folder,
        which goes when the block ends.

        The files are compared with the manifest first; on a directory digests once per job, every rank its share, and
        sizes every time. A checkpoint without a manifest, written by others, is taken as it is, and the log says so.

        Args:
            storage_id: the checkpoint.
            download_mode: who calls, see :class:`DownloadMode`.
            selector: called with the paths of the checkpoint; says which files are needed, and so are there. On one
                machine, what any rank selects is there for all.
            reject_unlisted: refuse a checkpoint in which somebody has put files that its manifest does not list, before
                something looks for files by their names, as DeepSpeed does. Trainers ask for it.

        Raises:
            CheckpointNotFound, CheckpointCorrupt, StorageError: as in :meth:`download`.
            ValueError: ``storage_id`` is None: see :meth:`resume`.
        """
        self._check()
        if storage_id is None:
            raise ValueError(
                "restore_path(storage_id=None): no checkpoint to start from. Use ctx.checkpoint.resume(), "
                "which gives None in a new run"
            )
        with self._reader.restore_path(storage_id, download_mode, selector, reject_unlisted=reject_unlisted) as path:
            self._observer.on_given(storage_id)
            yield path

    @with_only("ctx.checkpoint.resume() as path")
    def resume(
        self,
        download_mode: DownloadMode = DownloadMode.LocalWorkersShareDownload,
        *,
        selector: Selector | None = None,
        reject_unlisted: bool = False,
    ) -> Iterator[Path | None]:
        """Give the folder to start from, or None, as ``with ctx.checkpoint.resume() as path:``.

        It is that of ``ctx.latest_checkpoint``: what the master hands over, or the newest checkpoint of a run that is
        resumed. If that is damaged or gone it is the newest of this run before it that is intact; a line says which
        were passed over, and why, and every answer (``ctx.latest_checkpoint``, ``ctx.steps_completed``, …) is about the
        one that is taken. It stays the same while this process runs, however often it is asked for.

        ``core.init()`` chooses it. In a directory all its bytes are compared then; in an object store they are compared
        here, as they are fetched: if they differ, and the script has read an answer before, that is an error.

        Arguments as in :meth:`restore_path`: by default, every rank enters.

        Raises:
            CheckpointCorrupt: the run has saved checkpoints, and none of them is intact. It is never begun anew.
            CheckpointNotFound: likewise, where all of them are gone.
            StorageError: as in :meth:`download`.
        """
        self._check()
        with ExitStack() as stack:

            def restore(storage_id: str) -> Path:
                path = self._reader.restore_path(storage_id, download_mode, selector, reject_unlisted=reject_unlisted)
                return stack.enter_context(path)

            folder = self._start_search.first_intact(download_mode, restore)
            self._start.is_fixed = True
            if (storage_id := self._start.peek()) is not None:
                self._observer.on_given(storage_id)
            yield folder

    def get_metadata(self, storage_id: str) -> dict[str, Any]:
        """Return the metadata of a checkpoint, on any rank.

        Raises:
            CheckpointNotFound: If no checkpoint has this ID.
            CheckpointCorrupt: its metadata.json differs from the manifest.
        """
        self._check()
        self._writer.raise_background_error()
        found = self._observer.metadata_override(storage_id)
        if found is None:
            return self._reader.metadata(storage_id)
        return found

    def is_start(self, storage_id: str | None) -> bool:
        """Return whether a checkpoint is the one to start from, or was until :meth:`resume` had to take an older one.

        Args:
            storage_id: such as the ``latest_checkpoint`` that the master handed over.
        """
        return storage_id is not None and self._start.is_start(storage_id)

    def is_own(self, storage_id: str) -> bool:
        """Return whether this run wrote a checkpoint, or under a master a trial of its experiment, on any rank.

        Its manifest says so, with which every file is compared when it is read; one without is nobody's. Ask before
        files are read that run code, such as pickles.

        Raises:
            CheckpointNotFound: If no checkpoint has this ID.
        """
        self._check()
        self._writer.raise_background_error()
        run_id = self._reader.written_by(storage_id)
        if run_id is None or run_id == self._run_id:
            return run_id is not None
        experiment, of_a_trial, _ = self._run_id.partition(".")
        return bool(of_a_trial) and experiment.isdigit() and run_id.partition(".")[0] == experiment

    def delete(self, storage_id: str) -> None:
        """Delete a checkpoint, on any rank. It stops being listed before its bytes go. Idempotent.

        Raises:
            ValueError: ``storage_id`` can name no checkpoint.
            StorageError: the store refused.
        """
        self._check()
        self._writer.raise_background_error()
        self._observer.on_deleted(storage_id, self._reader.delete(storage_id))

    def close(self) -> None:
        """Remove what was begun and never committed, and wait for what is being saved. Idempotent.

        If this process is preempted, it waits no longer than there is time.

        Raises:
            CheckpointError: a checkpoint was not saved in the background; the message says why.
        """
        if not self._closed:
            self._closed = True
            self._writer.close()

    # How a checkpoint begins.

    def _begin(self, call: str, metadata: Mapping[str, Any] | None, shard: bool, if_busy: str) -> CheckpointHandle:
        group = self._writers(call, shard)
        with self._writer.turn(group, if_busy):
            return self._open(group, metadata, shard)

    def _open(self, group: RankGroup, metadata: Mapping[str, Any] | None, shard: bool) -> CheckpointHandle:
        given = group.gather(lambda: self._plain(metadata, shard))
        group.on_chief(lambda: require_steps_completed(merge_metadata(given or [])))
        return self._handle(group, self._stage(group, shard), metadata)

    def _writers(self, call: str, shard: bool) -> RankGroup:
        self._writer.check_process()
        rank = self._distributed.rank
        size = self._distributed.size
        if shard and size > 1:
            return RankGroup(call, self._distributed.channel(CHANNEL), rank=rank, index=rank, size=size)
        if rank != 0:
            raise RuntimeError(
                f"checkpoint.{call}(shard=False) was called on rank {rank}, but only the chief (rank 0) may: call it "
                "under `if ctx.distributed.rank == 0:`, or on every rank with shard=True"
            )
        return RankGroup.alone(call)

    def _stage(self, group: RankGroup, shard: bool) -> Staging:
        """Make a staging on the chief, and join it on every rank if they write together."""
        made: list[Staging] = []

        def begin() -> str:
            import uuid  # loads what a script that saves nothing does not need

            made.append(self._store.begin(str(uuid.uuid4()), self._owner()))
            self._observer.on_begin(made[0].storage_id)
            return made[0].ticket

        ticket = group.on_chief(begin)
        if not shard:
            return made[0]
        try:
            return group.on_all(lambda: self._store.join(ticket, self._distributed.rank))
        except BaseException:
            if made:
                abort_quietly(made[0])
            raise

    def _write_state(self, handle: CheckpointHandle, state: Any, name: str, extras: ExtraFiles, blocking: bool) -> str:
        """Write a state and what lies beside it into a checkpoint that has begun, and commit that."""
        try:
            extras.write(handle.path)
            handle.commit_after(self._states.write(state, handle.path / name, blocking), blocking)
        except BaseException as e:
            handle.abort(e, blocking)
            raise
        return handle.storage_id

    def _handle(self, group: RankGroup, staging: Staging, metadata: Mapping[str, Any] | None) -> CheckpointHandle:
        try:
            path = group.on_all(lambda: staging.path)
        except BaseException:
            abort_quietly(staging)
            raise
        ending = group
        if group.is_shared:
            ending = group.on_channel(self._distributed.channel(UPLOAD_CHANNEL))
        return self._writer.track(CheckpointHandle(self._writer, ending, staging, path, metadata))

    def _plain(self, metadata: Mapping[str, Any] | None, shard: bool) -> dict[str, Any]:
        if metadata is None and shard:
            return {}
        plain = plain_metadata(metadata)
        if not shard:
            require_steps_completed(plain)
        return plain

    def _check(self) -> None:
        if self._closed:
            raise ContextClosed("this CheckpointContext is closed")
        exit_if_job_ended(self._distributed)

    def _owner(self) -> Owner:
        return Owner.current(self._run_id, self._restart)

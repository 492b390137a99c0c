"""The reading half of ``ctx.checkpoint``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from det_core.core._checkpoint._cache import CheckpointCache
from det_core.core._checkpoint._download import download, foreign_steps, open_together, refuse_unlisted, verify
from det_core.core._checkpoint._fetch import Fetch, Identity
from det_core.core._checkpoint._mode import DownloadMode
from det_core.core._checkpoint._together import Together
from det_core.core._distributed import DistributedContext
from det_core.storage import Owner, Progress, Selector, Store, StoredCheckpoint

LANE = "checkpoint"


class CheckpointReader:
    """Gets checkpoints back, each rank its part; see :class:`CheckpointContext`, which hands these calls on.

    Args:
        distributed: the ranks.
        store: where checkpoints lie.
        owner: who marks a checkpoint as in use.
        elsewhere: by storage_id, the stores of checkpoints that lie in another one.
        cache: where the machine keeps copies; needed where the store is no directory.
        restored: called with a storage_id, its steps_completed and the run that wrote it (None: it does not say), once
            per process and checkpoint, when a ``restore_path()`` begins.
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
        cache: CheckpointCache | None = None,
        restored: Callable[[str, int | None, str | None], None],
        before: Callable[[], None],
        progress: Progress | None = None,
    ) -> None:
        self._distributed = distributed
        self._store = store
        self._owner = owner
        self._elsewhere = elsewhere
        self._cache = cache
        self._restored = restored
        self._before = before
        self._progress = progress
        self._verified: dict[tuple[str, DownloadMode], set[str]] = {}
        self._known: dict[str, dict[str, Identity]] = {}
        self._restores: set[str] = set()

    def download(
        self, storage_id: str, ckpt_dir: str | os.PathLike[str], mode: DownloadMode, selector: Selector | None
    ) -> None:
        """Copy a checkpoint into a folder."""
        together = self._readers("download", mode, local=True)
        folder = os.path.abspath(os.fspath(ckpt_dir))
        checkpoint = open_together(together, self._store_of(storage_id), storage_id, self._before)
        with ExitStack() as stack:
            together.each(lambda: self._hold_on_first(stack, together, storage_id))
            source = checkpoint
            if (cache := self._cache_for(together, checkpoint, mode)) is not None:
                fetch = Fetch(together, cache, checkpoint, selector, self._known, progress=self._progress)
                source = stack.enter_context(fetch.opened())
            download(together, self._store, source, folder, selector, self._progress)

    @contextmanager
    def restore_path(
        self, storage_id: str, mode: DownloadMode, selector: Selector | None, *, only_listed: bool = False
    ) -> Iterator[Path]:
        """A folder with the checkpoint's files, compared with the manifest."""
        together = self._readers("restore_path", mode, local=False)
        checkpoint = open_together(together, self._store_of(storage_id), storage_id, self._before)
        with ExitStack() as stack:
            if checkpoint.path is not None:
                together.each(lambda: stack.enter_context(self._hold(storage_id)))
                known = self._verified.setdefault((storage_id, mode), set())
                known |= verify(together, checkpoint, selector, known, self._progress)
                if only_listed:
                    together.chief(lambda: refuse_unlisted(self._store.disk, checkpoint))
                path = checkpoint.path
                stack.enter_context(checkpoint.unchanged())
            else:
                path = self._fetched(stack, together, checkpoint, mode, selector)
            self._note_restore(checkpoint)
            yield path

    def _fetched(
        self,
        stack: ExitStack,
        together: Together,
        checkpoint: StoredCheckpoint,
        mode: DownloadMode,
        selector: Selector | None,
    ) -> Path:
        """A copy on this machine, which stays until ``stack`` ends. What fails on one machine fails on all."""
        assert self._cache is not None, "a store that is no directory needs a cache"
        private = mode is DownloadMode.NoSharedDownload
        machine = self._readers("restore_path", mode, local=True)
        fetch = Fetch(machine, self._cache, checkpoint, selector, self._known, private, self._progress)
        try:
            machine.each(lambda: self._hold_on_first(stack, machine, checkpoint.storage_id))
            path = stack.enter_context(fetch.run())
        except BaseException as e:
            if machine.first:
                together.fail(e)
            else:
                with suppress(Exception):  # the first rank of this machine tells the others
                    together.gather(lambda: None)
            raise
        together.gather(lambda: None)
        return path

    def _cache_for(
        self, together: Together, checkpoint: StoredCheckpoint, mode: DownloadMode
    ) -> CheckpointCache | None:
        """The cache by way of which to download, so that jobs which do so at a time fetch once; None: straight."""
        cache = self._cache
        if cache is None or checkpoint.path is not None or mode is DownloadMode.NoSharedDownload:
            return None
        return cache if together.chief(lambda: cache.has_room_for(checkpoint.manifest)) else None

    def metadata(self, storage_id: str) -> dict[str, Any]:
        """The metadata of a checkpoint."""
        return self._store_of(storage_id).open(storage_id).metadata()

    def written_by(self, storage_id: str) -> str | None:
        """The run that wrote a checkpoint; None: it has no manifest that says so."""
        header = self._store_of(storage_id).open(storage_id).manifest.header
        return None if header is None else header.run_id

    def forget(self, storage_id: str) -> None:
        """What was compared of a checkpoint does not count any more: it was deleted."""
        for mode in DownloadMode:
            self._verified.pop((storage_id, mode), None)

    def _store_of(self, storage_id: str) -> Store:
        return self._elsewhere.get(storage_id, self._store)

    def _hold(self, storage_id: str) -> AbstractContextManager[None]:
        """Keep others from deleting a checkpoint that is being read."""
        return self._store_of(storage_id).hold(storage_id, self._owner())

    def _hold_on_first(self, stack: ExitStack, together: Together, storage_id: str) -> None:
        """One mark for all that read together."""
        if together.first:
            stack.enter_context(self._hold(storage_id))

    def _readers(self, call: str, mode: DownloadMode, *, local: bool) -> Together:
        if not isinstance(mode, DownloadMode):
            raise ValueError(f"checkpoint.{call}(download_mode={mode!r}): it must be a core.DownloadMode")
        ranks = self._distributed
        if mode is DownloadMode.NoSharedDownload:
            return Together(call, None, rank=ranks.rank, index=0, size=1)
        if local:
            lane, index, size = ranks.local_lane(LANE), ranks.local_rank, ranks.local_size
        else:
            lane, index, size = ranks.lane(LANE), ranks.rank, ranks.size
        return Together(call, lane, rank=ranks.rank, index=index, size=size)

    def _note_restore(self, checkpoint: StoredCheckpoint) -> None:
        if checkpoint.storage_id in self._restores:
            return
        self._restores.add(checkpoint.storage_id)
        header = checkpoint.manifest.header
        steps = header.steps_completed if header is not None else foreign_steps(checkpoint)
        self._restored(checkpoint.storage_id, steps, None if header is None else header.run_id)

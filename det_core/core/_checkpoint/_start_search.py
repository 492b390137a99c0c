"""The search for the checkpoint that a job starts from: the newest that is there and intact."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

from det_core.core._checkpoint._reader import CheckpointReader, DownloadMode
from det_core.core._checkpoint._start import StartCheckpoint
from det_core.core._distributed import DistributedContext
from det_core.core._rank_group import on_chief
from det_core.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound
from det_core.storage import Store

T = TypeVar("T")
FIXED = (
    "no older one is taken, as this script has restored it, or read ctx.latest_checkpoint or ctx.steps_completed: "
    "start it again; if that fails too, read those after ctx.checkpoint.resume(), or `det-core checkpoint rm` this one"
)


class StartSearch:
    """Looks for the newest checkpoint of a run that is there and intact, on all ranks in step.

    Args:
        distributed: the ranks.
        store: where the run's checkpoints lie.
        reader: checks and restores them.
        start: what is handed over, and then chosen.
        run_id: the run.
        say: tells a person what was passed over.
    """

    def __init__(
        self,
        distributed: DistributedContext,
        store: Store,
        reader: CheckpointReader,
        start: StartCheckpoint,
        *,
        run_id: str,
        say: Callable[[str], None],
    ) -> None:
        self._distributed = distributed
        self._store = store
        self._reader = reader
        self._start = start
        self._run_id = run_id
        self._say = say

    def choose(self) -> None:
        """Choose the checkpoint to start from, before a message names it.

        If none is intact, print that; restoring raises it: a script that restores nothing may run.
        """
        try:
            self.first_intact(DownloadMode.LocalWorkersShareDownload, self._check)
        except (CheckpointCorrupt, CheckpointNotFound) as e:
            self._say(str(e))

    def _check(self, storage_id: str) -> None:
        self._reader.check(storage_id, digests=storage_id in self._start.suspects)

    def first_intact(self, mode: DownloadMode, attempt: Callable[[str], T]) -> T | None:
        """Return what ``attempt`` makes of the newest checkpoint that is there and intact; None: there was never one.

        Raises:
            CheckpointCorrupt: None is intact; or the one that was chosen is not, and can no longer change.
            CheckpointNotFound: Likewise, where all are gone.
        """
        candidates = list(self._start.candidates)
        passed: list[CheckpointError] = []
        are_older = False
        while candidates:
            storage_id = candidates.pop(0)
            try:
                found = attempt(storage_id)
            except (CheckpointCorrupt, CheckpointNotFound) as e:
                if self._reader.on_any(mode, self._start.is_fixed):
                    self._reader.note_damage(storage_id)
                    raise type(e)(f"{e}; {FIXED}") from e
                passed.append(e)
                if not candidates and not are_older:
                    are_older = True
                    candidates = self._on_chief(mode, functools.partial(self._older, storage_id))
                continue
            if passed or len(self._start.candidates) > 1:
                self._start.choose(storage_id, self._on_chief(mode, functools.partial(self._steps, storage_id)))
            if passed:
                # It is one of this run. Rows that do not stand any more would answer until it is restored.
                self._reader.note_restore(storage_id, self._start.steps, self._run_id)
                self._say(f"checkpoint {storage_id} is taken, and newer ones are passed over: {_reasons(passed)}")
            return found
        if not passed:
            return None
        kind = next((type(e) for e in passed if isinstance(e, CheckpointCorrupt)), CheckpointNotFound)
        raise kind(f"no checkpoint of run {self._run_id} is intact: {_reasons(passed)}; to begin anew, start a new run")

    def _on_chief(self, mode: DownloadMode, work: Callable[[], T]) -> T:
        if mode is DownloadMode.NoSharedDownload:
            return work()
        return on_chief(self._distributed, "user", work)

    def _older(self, storage_id: str) -> list[str]:
        """Return the checkpoints of this run before another, newest first."""
        known = self._store.list(self._run_id)
        ids = [header.storage_id for header in known]
        if storage_id in ids:
            return ids[: ids.index(storage_id)][::-1]
        end = self._start.given_steps(storage_id)  # it is gone: what a master has handed over need not be the newest
        return [header.storage_id for header in known if end is None or header.steps_completed <= end][::-1]

    def _steps(self, storage_id: str) -> int:
        given = self._start.given_steps(storage_id)
        if given is not None:
            return given
        return self._reader.steps_completed(storage_id) or 0


def _reasons(passed: Sequence[CheckpointError]) -> str:
    return "; ".join(str(e) for e in passed)

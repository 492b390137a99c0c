"""The checkpoint that a job starts from, and what is asked about it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from det_core._info import ClusterInfo


class StartCheckpoint:
    """The one answer to "where do I start", equal on every rank.

    It is chosen when the context opens, and changes only if restoring it fails after all, before anybody has asked: a
    script that has read ``ctx.steps_completed`` would train other steps than those it goes on from.

    Args:
        storage_id: the checkpoint that was handed over, or the newest that the run's store lists; None: there is none.
        steps_completed: those of that checkpoint.
        unlisted: checkpoints that the run has recorded after it and that its store does not list, newest first.
        suspects: checkpoints that an earlier start has found damaged, too late to take others: their bytes are
            compared before this start answers.
        info: the cluster's description of this task, which follows every change.

    Attributes:
        candidates: the storage_ids to try, newest first; one, once it is chosen.
        steps: those of the first candidate, as far as they are known; to be looked at without fixing it.
        is_fixed: whether it can no longer change.
        is_id_read: whether the script has read the storage_id.
    """

    def __init__(
        self,
        storage_id: str | None = None,
        steps_completed: int = 0,
        *,
        unlisted: Sequence[str] = (),
        suspects: Collection[str] = (),
        info: ClusterInfo | None = None,
    ) -> None:
        self.suspects = suspects
        self.candidates = [*unlisted, *([] if storage_id is None else [storage_id])]
        self.is_fixed = False
        self.is_id_read = False
        self.steps = steps_completed
        if unlisted:
            self.steps = 0
        self._given = (storage_id, steps_completed)
        self._info = info

    @property
    def storage_id(self) -> str | None:
        """The checkpoint; None: this job starts from scratch."""
        self.is_fixed = True
        self.is_id_read = True
        return self.peek()

    @property
    def steps_completed(self) -> int:
        """The steps of the checkpoint; 0 without one."""
        self.is_fixed = True
        return self.steps

    def is_start(self, storage_id: str) -> bool:
        """Return whether this is the checkpoint, or the one that was handed over."""
        return storage_id in (self.peek(), self._given[0])

    def given_steps(self, storage_id: str) -> int | None:
        """Return the steps that were handed over with a checkpoint: 0 with that of another trial, whatever it says."""
        if storage_id == self._given[0]:
            return self._given[1]
        return None

    def peek(self) -> str | None:
        """Return the checkpoint without fixing it."""
        if self.candidates:
            return self.candidates[0]
        return None

    def choose(self, storage_id: str, steps_completed: int) -> None:
        """Start from this checkpoint."""
        self.candidates = [storage_id]
        self.steps = steps_completed
        if self._info is not None and self._info.task_type == "TRIAL":
            self._info._start_from(storage_id, steps_completed)

"""What happens to checkpoints, told to those who are to know."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from det_core.core._run import Run
from det_core.core._tensorboard import Tensorboard
from det_core.errors import MasterError, TensorboardError
from det_core.storage import RetentionPolicy

if TYPE_CHECKING:
    from det_core.core._checkpoint._retention import Retention

logger = logging.getLogger("det_core.core")


class CheckpointFacts:
    """Journals what happens to checkpoints, tells the backend, and lets older ones go.

    Restoring one that this run has written rolls the run
    back to its step; restoring another run's is a start, and rolls back nothing.
    """

    def __init__(self, run: Run, tensorboard: Tensorboard, policy: RetentionPolicy | None) -> None:
        self._run_id = run.run_id
        self._journal = run.journal
        self._backend = run.backend
        self._tensorboard = tensorboard
        self._retention: Retention | None = None
        if policy is not None:
            from det_core.core._checkpoint._retention import Retention

            self._retention = Retention(policy, run.store, run.run_id, folder=run.path, deleted=self._let_go)

    def committing(self, storage_id: str) -> None:
        """One is about to be complete: if this process dies before it has said more, somebody is to look for it."""
        self._journal.record("checkpoint_commit", {"storage_id": storage_id})

    def registered(self, checkpoint: Mapping[str, Any]) -> None:
        """One is complete."""
        self._journal.record("checkpoint", checkpoint)
        self._backend.register_checkpoint(checkpoint)
        try:
            self._tensorboard.sync()
        except (TensorboardError, OSError) as e:  # the checkpoint is safe; close() tries again
            logger.warning("event files were not copied beside checkpoint %s: %s", checkpoint["storage_id"], e)
        if self._retention is not None:
            self._retention.apply(checkpoint)

    def deleted(self, storage_id: str, remaining: Mapping[str, int]) -> None:
        """The script has deleted one, or a part of it."""
        self._journal.record("checkpoint_deleted", {"storage_id": storage_id, "resources": dict(remaining)})
        if self._retention is not None and not remaining:
            self._retention.forget(storage_id)
        self._backend.checkpoint_deleted(storage_id, remaining)

    def restored(self, storage_id: str, steps_completed: int | None, written_by: str | None) -> None:
        """One is being restored."""
        rolls_back = steps_completed if written_by == self._run_id else None
        body = {"storage_id": storage_id, "run_id": written_by, "steps_completed": rolls_back}
        self._journal.record("restore", body)

    def _let_go(self, storage_id: str, remaining: Mapping[str, int]) -> None:
        """Retention has deleted one; that nobody can be told is no reason to stop training."""
        try:
            self.deleted(storage_id, remaining)
        except MasterError as e:
            logger.warning("the master was not told that checkpoint %s is deleted: %s", storage_id, e)

"""Observers of checkpoints: record their events, notify the backend, and apply retention."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypedDict

from det_core import _clock
from det_core.errors import MasterError, TensorboardError
from det_core.storage import Manifest, RetentionPolicy

if TYPE_CHECKING:
    from det_core.core._checkpoint._retention import Retention
    from det_core.core._checkpoint._script_checks import ScriptChecks
    from det_core.core._run import Run
    from det_core.core._tensorboard import TensorboardFiles

logger = logging.getLogger("det_core.core")


class CheckpointRecord(TypedDict):
    """A complete checkpoint, as it is registered and journaled."""

    storage_id: str
    steps_completed: int
    metadata: dict[str, Any]
    resources: dict[str, int]
    """Relative POSIX path to size in bytes; folders end in a slash and have size 0."""
    run_id: str
    restart: int
    ordinal: int
    """Counts the checkpoints of one restart, from 1."""
    time: str
    """When it was committed, RFC 3339 in UTC."""


def record_of(manifest: Manifest, metadata: dict[str, Any]) -> CheckpointRecord:
    """Return the record of a checkpoint that has just been committed."""
    header = manifest.header
    assert header is not None, "what was committed has a header"
    return CheckpointRecord(
        storage_id=header.storage_id,
        steps_completed=header.steps_completed,
        metadata=metadata,
        resources=manifest.resources,
        run_id=header.run_id,
        restart=header.restart,
        ordinal=header.ordinal,
        time=header.time,
    )


class CheckpointObserver:
    """Observer of checkpoint events; ignores them by default."""

    def on_begin(self, storage_id: str) -> None:
        """Note that the script begins one, on the chief."""

    def on_given(self, storage_id: str) -> None:
        """Note that the script has been given the files of one."""

    def on_committing(self, storage_id: str) -> None:
        """One is about to be complete. On the chief, in the thread that commits, as :meth:`committed`."""

    def on_committed(self, checkpoint: CheckpointRecord) -> None:
        """One is complete; called before the call that wrote it returns, if that waits."""

    def on_deleted(self, storage_id: str, remaining: Mapping[str, int]) -> None:
        """Handle that the script has deleted one, or a part of it. On any rank."""

    def on_restored(self, storage_id: str, steps_completed: int | None, written_by: str | None) -> None:
        """One is being restored, for the first time in this process.

        Args:
            storage_id: which.
            steps_completed: None: it does not say.
            written_by: the run that wrote it; None: it does not say.
        """

    def on_damaged(self, storage_id: str) -> None:
        """Handle that the checkpoint to start from is damaged, too late to use another. On any rank."""

    def metadata_override(self, storage_id: str) -> dict[str, Any] | None:
        """Return the backend's metadata, or None."""


class RunObserver(CheckpointObserver):
    """Journals what happens to the checkpoints of a run, tells its backend, and lets older ones go.

    Restoring one that this run has written rolls the run back to its step; restoring another run's is a start, and
    rolls back nothing.

    Args:
        run: the run.
        tensorboard: its event files are copied beside each checkpoint.
        policy: which checkpoints stay; None: all.
        checks: warns of what a resume would not like.

    Attributes:
        last_commit: steps of the newest checkpoint that this process has committed, and when, on the monotonic clock;
            None: it has committed none. The chief knows.
    """

    def __init__(
        self, run: Run, tensorboard: TensorboardFiles, policy: RetentionPolicy | None, checks: ScriptChecks
    ) -> None:
        self._run = run
        self._checks = checks
        self._tensorboard = tensorboard
        self.last_commit: tuple[int, float] | None = None
        self._retention: Retention | None = None
        if policy is not None:
            from det_core.core._checkpoint._retention import Retention

            self._retention = Retention(policy, run.store, run.run_id, folder=run.path, deleted=self._on_retired)

    def on_begin(self, storage_id: str) -> None:
        """Note what has been reported by now."""
        self._checks.on_begun(storage_id)

    def on_given(self, storage_id: str) -> None:
        """Say that the script has resumed."""
        self._checks.on_given(storage_id)

    def on_committing(self, storage_id: str) -> None:
        """If this process dies before it has said more, somebody is to look for it; and what was reported is kept."""
        body = {"storage_id": storage_id, "reported": self._checks.reported(storage_id)}
        self._run.journal.record("checkpoint_commit", body)
        self._run.journal.flush()

    def on_committed(self, checkpoint: CheckpointRecord) -> None:
        """Register it; then event files may follow, and older ones go."""
        self.last_commit = (checkpoint["steps_completed"], _clock.monotonic())
        self._checks.on_committed(checkpoint["storage_id"], checkpoint["steps_completed"])
        self._run.journal.record("checkpoint", checkpoint)
        self._run.backend.register_checkpoint(checkpoint)
        try:
            self._tensorboard.sync()
        except (TensorboardError, OSError) as e:  # the checkpoint is safe; close() tries again
            logger.warning("event files were not copied beside checkpoint %s: %s", checkpoint["storage_id"], e)
        if self._retention is not None:
            self._retention.apply(checkpoint)

    def on_deleted(self, storage_id: str, remaining: Mapping[str, int]) -> None:
        """Journal and tell what is left."""
        self._run.journal.record("checkpoint_deleted", {"storage_id": storage_id, "resources": dict(remaining)})
        self._run.backend.checkpoint_deleted(storage_id, remaining)

    def on_restored(self, storage_id: str, steps_completed: int | None, written_by: str | None) -> None:
        """Journal it."""
        rolls_back = None
        if written_by == self._run.run_id:
            rolls_back = steps_completed
        body = {"storage_id": storage_id, "run_id": written_by, "steps_completed": rolls_back}
        self._run.journal.record("restore", body)

    def on_damaged(self, storage_id: str) -> None:
        """Journal it, for the next start of a bare run, which has another journal under a master."""
        if not self._run.managed:
            self._run.journal.record("checkpoint_damaged", {"storage_id": storage_id})

    def metadata_override(self, storage_id: str) -> dict[str, Any] | None:
        """Ask the backend."""
        return self._run.backend.checkpoint_metadata(storage_id)

    def _on_retired(self, storage_id: str, remaining: Mapping[str, int]) -> None:
        """Notify the backend that retention has deleted one; a failure of that does not stop training."""
        try:
            self.on_deleted(storage_id, remaining)
        except MasterError as e:
            logger.warning("the master was not told that checkpoint %s is deleted: %s", storage_id, e)

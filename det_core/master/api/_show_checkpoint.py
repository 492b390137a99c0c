"""A checkpoint as clients see it (§4, §5.7)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from det_core.master.api._show_trial import Metrics
from det_core.master.api._types import Int64Out, Reply, TimeOut, state_out

if TYPE_CHECKING:
    from det_core.master.service._views import CheckpointView


class Training(Reply):
    """What is known of the trial that made a checkpoint."""

    experiment_config: dict[str, Any]
    experiment_id: int
    trial_id: int
    hparams: dict[str, Any]
    training_metrics: Metrics
    validation_metrics: Metrics
    searcher_metric: float | None = None


class Checkpoint(Reply):
    """A checkpoint.

    ``resources``: its files and their sizes; a folder ends in ``/``. ``storage``: where it lies, as in a configuration.
    """

    uuid: str
    task_id: str
    allocation_id: str | None = None
    storage_id: int | None = None
    storage: dict[str, Any] | None = None
    state: str
    metadata: dict[str, Any]
    resources: dict[str, Int64Out]
    size: Int64Out
    steps_completed: int
    report_time: TimeOut
    training: Training

    @classmethod
    def of(cls, view: CheckpointView) -> Checkpoint:
        """As the service tells it."""
        training = Training(
            experiment_config=view["experiment_config"],
            experiment_id=view["experiment_id"],
            trial_id=view["trial_id"],
            hparams=view["hparams"],
            training_metrics=Metrics(avg_metrics=view["training_metrics"]),
            validation_metrics=Metrics(avg_metrics=view["validation_metrics"]),
            searcher_metric=view["searcher_metric"],
        )
        return cls(
            uuid=view["uuid"],
            task_id=view["task_id"],
            allocation_id=view["allocation_id"],
            storage_id=view["storage_id"],
            storage=view["storage"],
            state=state_out(view["state"]),
            metadata=view["metadata"],
            resources=view["resources"],
            size=view["size"],
            steps_completed=view["steps_completed"],
            report_time=view["report_time"],
            training=training,
        )


class CheckpointReply(Reply):
    """One checkpoint."""

    checkpoint: Checkpoint


class BestCheckpointReply(Reply):
    """The best checkpoint; absent as long as there is none with a validation."""

    checkpoint: Checkpoint | None = None


class CheckpointsReply(Reply):
    """Some checkpoints, newest first."""

    checkpoints: list[Checkpoint]

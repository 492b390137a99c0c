"""Shapes of answers: the service's views as the wire contract's clients expect them (section 4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from det_core.protocol.wire import to_wire

if TYPE_CHECKING:
    from det_core.master.service._views import (
        CheckpointView,
        ExperimentView,
        LogView,
        MetricView,
        TrialView,
        ValidationView,
    )

USER = "determined"
"""Name of the one user, which the contract's clients expect."""
_OWNER = {
    "username": USER,
    "displayName": USER,
    "userId": 1,
    "projectId": 1,
    "projectOwnerId": 1,
    "workspaceId": 1,
}
_TRAINING_KEYS = ("experiment_config", "experiment_id", "trial_id", "hparams", "searcher_metric")


def experiment(view: ExperimentView) -> dict[str, Any]:
    """Return an experiment."""
    shape = to_wire(
        view,
        parent_id="forked_from",
        external_id="external_experiment_id",
        best_metric="best_trial_searcher_metric",
        warnings="config_warnings",
    )
    return {**shape, **_OWNER, "jobId": f"experiment-{view['id']}"}


def experiment_reply(view: ExperimentView) -> dict[str, Any]:
    """Return the answer with one experiment and its configuration."""
    return {"experiment": experiment(view), "config": view["config"]}


def trial(view: TrialView) -> dict[str, Any]:
    """Return a trial."""
    return to_wire(
        {
            **view,
            "latest_validation": _validation(view["latest_validation"]),
            "best_validation": _validation(view["best_validation"]),
        },
        external_id="external_trial_id",
        status="runner_state",
        seed="trial_seed",
        total_batches="total_batches_processed",
        latest_checkpoint="latest_checkpoint_uuid",
    )


def _validation(view: ValidationView | None) -> dict[str, Any] | None:
    if view is None:
        return None
    return {**to_wire({**view, "metrics": _metrics(view["metrics"])}, metric="searcher_metric"), "numInputs": 0}


def metric_row(view: MetricView) -> dict[str, Any]:
    """Return the report of a trial for one step of a group."""
    row: dict[str, Any] = {**view, "metrics": _metrics(view["metrics"], view["batch_metrics"])}
    del row["batch_metrics"]
    return to_wire(row, text=("id",))


def _metrics(average: Mapping[str, Any], batches: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return to_wire({"avg_metrics": average, "batch_metrics": batches})


def checkpoint(view: CheckpointView) -> dict[str, Any]:
    """Return a checkpoint with its trial's training."""
    record: dict[str, Any] = dict(view)
    training = {key: record.pop(key) for key in _TRAINING_KEYS}
    for key in ("training_metrics", "validation_metrics"):
        training[key] = _metrics(record.pop(key))
    record["resources"] = {path: str(size) for path, size in view["resources"].items()}
    return {**to_wire(record), "training": to_wire(training)}


def log_line(view: LogView) -> dict[str, Any]:
    """Return one line of a log."""
    level = "LOG_LEVEL_" + view["level"].removeprefix("LOG_LEVEL_")
    return to_wire({**view, "level": level, "message": view["log"]}, text=("id",), rank="rank_id")

"""Checkpoints as they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from det_core.config import Experiment
from det_core.master.service import _storages
from det_core.master.service._access import no_experiment, no_trial
from det_core.master.service._checkpoints import no_checkpoint
from det_core.master.store import checkpoints, experiments, series, trials, validations
from det_core.protocol.records import CheckpointView

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from det_core.master.service._hub import Hub
    from det_core.master.store.checkpoints import CheckpointRow


async def page(
    hub: Hub, limit: int, offset: int, *, experiment_id: int | None = None, trial_id: int | None = None
) -> tuple[list[CheckpointView], int]:
    """Return some checkpoints of an experiment or a trial, newest first, and how many it has."""

    def look(conn: Session) -> tuple[list[CheckpointView], int]:
        if experiment_id is not None and experiments.get(conn, experiment_id) is None:
            raise no_experiment(experiment_id)
        if trial_id is not None and trials.get(conn, trial_id) is None:
            raise no_trial(trial_id)
        rows, total = checkpoints.page(conn, limit, offset, experiment_id=experiment_id, trial_id=trial_id)
        return show(conn, rows), total

    return await hub.store.read(look)


def one(conn: Session, uuid: str) -> CheckpointView:
    """One checkpoint."""
    row = checkpoints.get(conn, uuid)
    if row is None:
        raise no_checkpoint(uuid)
    return show(conn, [row])[0]


def best(conn: Session, experiment_id: int) -> CheckpointView | None:
    """Of the checkpoints whose files are all there, the one with the best searched metric.

    Of equals it is the newest of the earliest trial, as that is the one which stays when the experiment has ended.
    """
    row = experiments.get(conn, experiment_id)
    if row is None:
        raise no_experiment(experiment_id)
    sign = 1 if Experiment(row.config).smaller_is_better else -1
    found = show(conn, checkpoints.of_experiment(conn, experiment_id, states=[checkpoints.COMPLETED]))
    known = [(sign * v.searcher_metric, v.trial_id, v) for v in found if v.searcher_metric is not None]
    real = [k for k in known if k[0] == k[0]]
    return min(real, key=lambda k: k[:2])[2] if real else None  # the first of equals, and the newest come first


def show(conn: Session, rows: Sequence[CheckpointRow]) -> list[CheckpointView]:
    """Checkpoints with what is known of their trials."""
    owners = {number: trials.get(conn, number) for number in {row.trial_id for row in rows}}
    specs = {number: experiments.get(conn, number) for number in {row.experiment_id for row in rows}}
    views = []
    for row in rows:
        owner, spec = owners[row.trial_id], specs[row.experiment_id]
        assert owner is not None and spec is not None
        views.append(_show(conn, row, owner.hparams, spec.config))
    return views


def _show(conn: Session, row: CheckpointRow, hparams: dict[str, Any], config: dict[str, Any]) -> CheckpointView:
    validation = _at(conn, row, "validation")
    return CheckpointView(
        uuid=row.uuid,
        task_id=row.task_id,
        allocation_id=row.allocation_id,
        storage_id=row.storage_id,
        storage=_storages.of_checkpoint(conn, row),
        state=row.state,
        metadata=row.metadata,
        resources=row.resources,
        size=row.size,
        steps_completed=row.steps_completed,
        report_time=row.report_time,
        trial_id=row.trial_id,
        experiment_id=row.experiment_id,
        experiment_config=config,
        hparams=hparams,
        searcher_metric=validations.number(validation, Experiment(config).metric),
        training_metrics=_at(conn, row, "training"),
        validation_metrics=validation,
    )


def _at(conn: Session, row: CheckpointRow, group: str) -> dict[str, Any]:
    """What a checkpoint's trial has reported for its step."""
    step = row.steps_completed
    before = series.Cursor(step, -1, -1, -1, -1)
    found = series.read(conn, row.trial_id, group, after=before, limit=1)
    return found[0].metrics if found and found[0].steps_completed == step else {}

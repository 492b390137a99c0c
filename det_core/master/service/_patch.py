"""What people change about experiments beside their course."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from det_core._storage_settings import RETENTION_KEYS
from det_core.config import Experiment
from det_core.master._errors import Invalid
from det_core.master.service import _queries, _steering
from det_core.master.service._access import experiment_row
from det_core.master.store import experiments

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from det_core.master.service._state import ServiceState
    from det_core.protocol.records import ExperimentView


async def patch_experiment(
    hub: ServiceState,
    experiment_id: int,
    *,
    name: str | None = None,
    description: str | None = None,
    labels: Sequence[str] | None = None,
    priority: int | None = None,
    checkpoint_storage: Mapping[str, Any] | None = None,
) -> ExperimentView:
    """Change what is given and return the experiment.

    Args:
        hub: Parts of the service.
        experiment_id: ID of the experiment.
        name: New name.
        description: New description.
        labels: New labels, instead of all that it has.
        priority: New priority, 1 (first) to 99, of an experiment that has not ended.
        checkpoint_storage: New counts of checkpoints to keep, ``save_…``; applied at once if it has ended.

    Raises:
        NotFound: If the experiment does not exist.
        WrongState: If the priority cannot be changed because it has ended.
        Invalid: If a value is not allowed.
    """
    if priority is not None:
        await _steering.set_priority(hub, experiment_id, priority)
    await experiment_row(hub, experiment_id)
    if name is not None and not name.strip():
        raise Invalid(f"experiment {experiment_id}: a name cannot be empty")
    counts = {} if checkpoint_storage is None else _counts(experiment_id, checkpoint_storage)

    def write(conn: Session) -> dict[str, Any] | None:
        row = experiments.get(conn, experiment_id)
        assert row is not None
        data = dict(row.config)
        if name is not None:
            data["name"] = name
        if description is not None:
            data["description"] = description
        if labels is not None:
            data["labels"] = list(labels)
        data["checkpoint_storage"] = {**data["checkpoint_storage"], **counts}
        experiments.change(
            conn,
            experiment_id,
            name=row.name if name is None else name,
            description=row.description if description is None else description,
            labels=row.labels if labels is None else list(labels),
            config=data,
        )
        return data

    data = await hub.store.write(write)
    hub.subscriptions.publish(("experiment", experiment_id))
    live = hub.live.experiments.get(experiment_id)
    if live is not None and data is not None:
        live.spec = Experiment(data, live.spec.warnings)
    elif counts:
        hub.runner.retain(experiment_id)
    return await _queries.experiment(hub, experiment_id)


def _counts(experiment_id: int, storage: Mapping[str, Any]) -> dict[str, int]:
    wrong = [
        k
        for k, v in storage.items()
        if k not in RETENTION_KEYS or isinstance(v, bool) or not isinstance(v, int) or v < 0
    ]
    if wrong:
        raise Invalid(
            f"experiment {experiment_id}: checkpoint_storage.{wrong[0]} cannot be changed to {storage[wrong[0]]!r}; "
            f"only {', '.join(RETENTION_KEYS)} can, to integers of 0 or more"
        )
    return {k: int(v) for k, v in storage.items()}

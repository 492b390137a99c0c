"""Where checkpoints lie: what experiments and scripts say of it (§5.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from det_core._storage_settings import location
from det_core.master.store import allocations, checkpoints, experiments, storages

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from det_core.master.service._hub import Hub
    from det_core.master.store.checkpoints import CheckpointRow

CHOSEN = "storage_id"
"""Under which an allocation's facts say where its checkpoints go."""


async def choose(hub: Hub, trial_id: int, storage: Mapping[str, Any]) -> int:
    """Note where the run of a trial that goes on keeps its checkpoints; returns the id of that storage."""
    trial, config = hub.live.trials.get(trial_id), location(storage)
    allocation_id = None if trial is None or trial.allocation is None else trial.allocation.id

    def write(conn: Session) -> int:
        number = storages.ensure(conn, config)
        row = None if allocation_id is None else allocations.get(conn, allocation_id)
        if row is not None:
            allocations.change(conn, row.id, facts={**row.facts, CHOSEN: number})
        return number

    return await hub.store.write(write)


def of_run(conn: Session, allocation_id: str | None) -> int | None:
    """The storage that an allocation's script has chosen; None: that of its experiment's configuration."""
    row = None if allocation_id is None else allocations.get(conn, allocation_id)
    return None if row is None else row.facts.get(CHOSEN)


def of_checkpoint(conn: Session, row: CheckpointRow) -> dict[str, Any] | None:
    """The configuration of the storage that a checkpoint is in, without what says how many stay."""
    return config_of(conn, row.storage_id, row.experiment_id)


def config_of(conn: Session, storage_id: int | None, experiment_id: int) -> dict[str, Any] | None:
    """The configuration of a storage; of None, or of one that is unknown, the experiment's."""
    found = None if storage_id is None else storages.get(conn, storage_id)
    if found is None:
        experiment = experiments.get(conn, experiment_id)
        found = None if experiment is None else experiment.config.get("checkpoint_storage")
    return None if found is None else location(found)


def of_experiment(conn: Session, experiment_id: int) -> list[dict[str, Any] | None]:
    """Return the configurations of the storages that an experiment's runs were given, each once."""
    numbers = {row.facts.get(CHOSEN) for row in allocations.of_experiment(conn, experiment_id)}
    numbers |= {row.storage_id for row in checkpoints.of_experiment(conn, experiment_id)}
    found: list[dict[str, Any] | None] = []
    for number in numbers:
        config = config_of(conn, number, experiment_id)
        if config not in found:
            found.append(config)
    return found

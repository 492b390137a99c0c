"""Where checkpoints lie: what experiments and scripts say of it (§5.1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from det_core._storage_settings import location
from det_core.master.service._access import know_trial
from det_core.master.store import allocations, checkpoints, experiments, storages

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from det_core.master.service._state import ServiceState
    from det_core.master.store.checkpoints import CheckpointRow

CHOSEN = "storage_id"
"""Under which an allocation's facts say where its checkpoints go."""


async def prepare_run(hub: ServiceState, trial_id: int, storage: Mapping[str, Any] | None) -> int | None:
    """Record where the run of a trial keeps its checkpoints; return the number of that storage, None without one.

    Equal storages have the same number (§5.1).
    """
    await know_trial(hub, trial_id)
    if storage is None:
        return None
    return await _choose(hub, trial_id, storage)


async def _choose(hub: ServiceState, trial_id: int, storage: Mapping[str, Any]) -> int:
    config = location(storage)
    trial = hub.live.trials.get(trial_id)
    allocation = None if trial is None else trial.allocation

    def write(conn: Session) -> int:
        number = storages.ensure(conn, config)
        if allocation is not None:
            row = allocations.get(conn, allocation.id)
            if row is not None:
                allocations.change(conn, row.id, facts={**row.facts, CHOSEN: number})
        return number

    return await hub.store.write(write)


def of_run(conn: Session, allocation_id: str | None) -> int | None:
    """Return the number of the storage that an allocation's script has chosen, None for its experiment's."""
    if allocation_id is None:
        return None
    row = allocations.get(conn, allocation_id)
    if row is None:
        return None
    return row.facts.get(CHOSEN)


def of_checkpoint(conn: Session, row: CheckpointRow) -> dict[str, Any] | None:
    """Return the configuration of the storage that a checkpoint is in, without what says how many stay."""
    return config_of(conn, row.storage_id, row.experiment_id)


def config_of(conn: Session, storage_id: int | None, experiment_id: int) -> dict[str, Any] | None:
    """Return the configuration of a storage; for None, or an unknown one, that of the experiment's."""
    if storage_id is not None:
        storage = storages.get(conn, storage_id)
        if storage is not None:
            return location(storage)
    experiment = experiments.get(conn, experiment_id)
    if experiment is None or experiment.config.get("checkpoint_storage") is None:
        return None
    return location(experiment.config["checkpoint_storage"])


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

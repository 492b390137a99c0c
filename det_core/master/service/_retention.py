"""Deletion of checkpoints: at an experiment's end (§11.3), on request, and with their experiment."""

from __future__ import annotations

import errno
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from sqlalchemy import delete as delete_from
from sqlalchemy import select

from det_core.config import Experiment
from det_core.errors import CheckpointCorrupt, CheckpointNotFound, DetCoreError
from det_core.master._errors import Invalid, WrongState
from det_core.master.engines import delete_folders
from det_core.master.scheduler import Kept, State, expired
from det_core.master.service import _checkpoints
from det_core.master.service._access import experiment_row
from det_core.master.service._checkpoints import no_checkpoint, run_in_daemon_thread
from det_core.master.store import change, checkpoints, experiments, models, trials, validations
from det_core.storage import Store, event_files_of_experiment, open_store

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from det_core.master.service._state import ServiceState

LOG = logging.getLogger("det_core")

THERE = (checkpoints.COMPLETED, checkpoints.PARTIALLY_DELETED)
UNFINISHED = [state.value for state in State if not state.terminal]
WHOLE = ("**/*",)
RETRY_DELAY = 3600.0
"""Seconds until checkpoints that could not be deleted at their experiment's end are tried again."""
DUE = "checkpoints to look through"
"""Key of the ended experiments whose retention was not applied yet."""


async def retain(service: ServiceState, experiment_id: int) -> None:
    """Delete the checkpoints of an ended experiment that its configuration does not keep.

    People may have removed some from their storage, of which the master is not told. So before any goes, the storages
    are looked at: what is no longer there does not count among those that are kept.
    """
    rows = await service.store.read(lambda session: to_go(session, experiment_id))
    if rows:
        try:
            there = await _present(service, experiment_id)
        except (DetCoreError, OSError, ValueError) as e:
            LOG.warning("checkpoints of experiment %d were not looked through, and stay for now: %s", experiment_id, e)
            return
        # Read again, as checkpoints may have been deleted while the storages were looked at.
        still = {row.uuid for row in await service.store.read(lambda session: to_go(session, experiment_id, there))}
        rows = [row for row in rows if row.uuid in still or row.uuid not in there]
    if failed := await delete_rows(service, rows, WHOLE):
        LOG.warning("%d checkpoint(s) of experiment %d stay until the next try", len(failed), experiment_id)
        service.runner.later(RETRY_DELAY, partial(service.runner.retain, experiment_id))
        return
    await service.store.write(lambda session: due(session, remove=experiment_id))


def due(session: Session, *, add: int | None = None, remove: int | None = None) -> list[int]:
    """Return the experiments whose retention is still to be applied, after one was added or removed."""
    row = session.get(models.KeyValue, DUE)
    before: list[int] = [] if row is None else row.value
    after = [number for number in before if number not in (add, remove)]
    if add is not None:
        after = sorted([*after, add])
    if after != before:
        session.merge(models.KeyValue(key=DUE, value=after))
    return after


def to_go(session: Session, experiment_id: int, there: Collection[str] | None = None) -> list[models.Checkpoint]:
    """Return the checkpoints that an experiment's retention does not keep, oldest first.

    Args:
        session: the database.
        experiment_id: the experiment.
        there: the uuids of the checkpoints that count. Defaults to all that are recorded as not deleted.
    """
    row = session.get(models.Experiment, experiment_id)
    if row is None or row.unmanaged:
        return []
    spec = Experiment(row.config)
    # The newest come first; the rules count from the oldest.
    found = checkpoints.of_experiment(session, experiment_id, states=THERE)[::-1]
    found = [c for c in found if there is None or c.uuid in there]
    protected = _sources(session, without=experiment_id)
    by_trial = {t: _at_steps(session, t, spec.metric) for t in {c.trial_id for c in found}}
    gone = set(
        expired(
            [
                Kept(
                    uuid=c.uuid,
                    trial_id=c.trial_id,
                    steps_completed=c.steps_completed,
                    ordinal=ordinal,
                    metric=by_trial[c.trial_id].get(c.steps_completed),
                    protected=c.uuid in protected,
                )
                for ordinal, c in enumerate(found)
            ],
            save_experiment_best=spec.save_experiment_best,
            save_trial_best=spec.save_trial_best,
            save_trial_latest=spec.save_trial_latest,
            smaller_is_better=spec.smaller_is_better,
        )
    )
    return [c for c in found if c.uuid in gone]


async def _present(service: ServiceState, experiment_id: int) -> set[str]:
    """Return the IDs of an experiment's checkpoints that their storages have."""

    def recorded(session: Session) -> list[tuple[str, dict[str, Any] | None]]:
        rows = checkpoints.of_experiment(session, experiment_id, states=THERE)
        return [(row.uuid, _checkpoints.storage_of(session, row)) for row in rows]

    def look(config: Mapping[str, Any] | None, uuids: Sequence[str]) -> set[str]:
        with _opened(service, config) as store:
            return {uuid for uuid in uuids if _has(store, uuid)}

    by_storage: dict[str, tuple[dict[str, Any] | None, list[str]]] = {}
    for uuid, config in await service.store.read(recorded):
        by_storage.setdefault(repr(config), (config, []))[1].append(uuid)
    found = [await run_in_daemon_thread(look, config, uuids) for config, uuids in by_storage.values()]
    return set().union(*found)


def _has(store: Store, uuid: str) -> bool:
    try:
        store.open(uuid)
    except CheckpointNotFound:
        return False
    # It is there, and can be deleted.
    except CheckpointCorrupt:
        pass
    return True


def _at_steps(session: Session, trial_id: int, metric: str) -> dict[int, float]:
    return {row.steps_completed or 0: value for row, value in validations.of_trial(session, trial_id, metric)}


def _sources(session: Session, *, without: int) -> set[str]:
    """Return the checkpoints that trials of other experiments start from."""
    starts = select(models.Trial.warm_start).where(models.Trial.experiment_id != without).distinct()
    return {uuid for uuid in session.scalars(starts) if uuid is not None}


async def delete(service: ServiceState, uuids: Sequence[str], globs: Sequence[str] = WHOLE) -> None:
    """Delete checkpoints, or the files in them that match, in the background."""
    if not globs or not all(isinstance(g, str) and g for g in globs):
        raise Invalid("checkpointGlobs must be patterns of files, such as **/*")

    def look(session: Session) -> list[models.Checkpoint]:
        rows = []
        for uuid in dict.fromkeys(uuids):
            row = session.get(models.Checkpoint, uuid)
            if row is None:
                raise no_checkpoint(uuid)
            rows.append(row)
        return rows

    rows = [row for row in await service.store.read(look) if row.state in THERE]

    async def delete_all() -> None:
        await delete_rows(service, rows, globs)  # files deleted from the storage already are not an error

    service.runner.keep_running(delete_all, f"deletion of {len(rows)} checkpoint(s)")


async def delete_rows(service: ServiceState, rows: Sequence[models.Checkpoint], globs: Sequence[str]) -> list[str]:
    """Delete checkpoints from their storages and record it; return the IDs of those that could not be deleted."""
    return [row.uuid for row in rows if not await _delete_one(service, row, globs)]


async def _delete_one(service: ServiceState, row: models.Checkpoint, globs: Sequence[str]) -> bool:
    config = await service.store.read(lambda session: _checkpoints.storage_of(session, row))
    try:
        async with service.deletions:
            # A daemon's: one that hangs for ever must not keep the master from ending.
            left = await run_in_daemon_thread(_delete, service, config, row.uuid, globs)
    except (DetCoreError, OSError, ValueError) as e:
        LOG.warning("checkpoint %s could not be deleted: %s", row.uuid, e)
        return False
    await service.store.write(lambda session: checkpoints.set_resources(session, row.uuid, left))
    service.subscriptions.publish(("trial", row.trial_id))
    return True


def _delete(service: ServiceState, config: Mapping[str, Any] | None, uuid: str, globs: Sequence[str]) -> dict[str, int]:
    with _opened(service, config) as store:
        return store.delete(uuid, tuple(globs))


async def _delete_event_files(service: ServiceState, experiment_id: int) -> list[str]:
    """Delete TensorBoard files from the storages of an experiment's runs; return the errors."""

    def remove(config: Mapping[str, Any] | None) -> None:
        with _opened(service, config) as store:
            store.remove_folder(event_files_of_experiment(service.settings.cluster_id, experiment_id))

    problems = []
    for config in await service.store.read(lambda session: _checkpoints.storages_of(session, experiment_id)):
        try:
            async with service.deletions:
                await run_in_daemon_thread(remove, config)
        except (DetCoreError, OSError, ValueError) as e:
            if isinstance(e, OSError) and e.errno == errno.ENOENT:  # a bucket that does not exist has no files
                continue
            problems.append(f"event files could not be deleted: {e}")
    return problems


async def _delete_logs(service: ServiceState, experiment_id: int) -> list[str]:
    """Delete the logs of an experiment's trials; return what failed."""
    rows = await service.store.read(lambda session: trials.of_experiment(session, experiment_id))
    try:
        await run_in_daemon_thread(delete_folders, service.settings.allocations, {row.task_id for row in rows})
    except OSError as e:
        return [f"logs could not be deleted: {e}"]
    return []


@contextmanager
def _opened(service: ServiceState, config: Mapping[str, Any] | None) -> Iterator[Store]:
    store = open_store(config, service.settings.home / "checkpoints")
    try:
        yield store
    finally:
        store.close()


async def delete_experiment(service: ServiceState, experiment_id: int) -> None:
    """Delete an ended experiment; its checkpoints and reports go in the background.

    Raises:
        NotFound: If the experiment does not exist.
        WrongState: If it has not ended, or an experiment that has not ended starts from one of its checkpoints.
    """
    await experiment_row(service, experiment_id)
    if await service.store.write(lambda session: _begin_deletion(session, experiment_id)):
        service.subscriptions.publish(("experiment", experiment_id))
        service.runner.keep_running(partial(erase, service, experiment_id), f"deletion of experiment {experiment_id}")


def _begin_deletion(session: Session, experiment_id: int) -> bool:
    """Set an experiment's state to DELETING; return whether it was another one."""
    row = session.get(models.Experiment, experiment_id)
    # Here, and not before: it may have been continued, or deleted, since it was looked up.
    if row is None or row.state in (State.DELETING, State.DELETED):
        return False
    if not State(row.state).terminal and not (row.unmanaged and row.end_time is not None):
        raise WrongState(f"experiment {experiment_id} has not ended ({row.state}): cancel or kill it first")
    # In the transaction that begins the deletion: an experiment that starts from one is recorded before it or refused.
    own = {checkpoint.uuid for checkpoint in checkpoints.of_experiment(session, experiment_id)}
    for trial in trials.in_states(session, UNFINISHED):
        if trial.experiment_id != experiment_id and trial.warm_start in own:
            raise WrongState(
                f"experiment {experiment_id} cannot be deleted: experiment {trial.experiment_id} has not ended, and "
                f"starts from its checkpoint {trial.warm_start}: wait for it, or kill it first"
            )
    change(session, models.Experiment, experiment_id, state=State.DELETING.value)
    return True


async def erase(service: ServiceState, experiment_id: int) -> None:
    """Delete what belongs to an experiment in state DELETING."""
    rows = await service.store.read(lambda session: checkpoints.of_experiment(session, experiment_id, states=THERE))
    failed = await delete_rows(service, rows, WHOLE)
    problems = []
    if failed:
        problems.append(f"{len(failed)} checkpoint(s) could not be deleted: {', '.join(failed[:3])}")
    problems += await _delete_event_files(service, experiment_id)
    problems += await _delete_logs(service, experiment_id)

    def write(session: Session) -> None:
        if problems:
            error = "; ".join(problems)
            # Its rows stay, so that it can be deleted again.
            change(session, models.Experiment, experiment_id, state=State.DELETE_FAILED.value, error=error)
            return
        experiments.erase(session, experiment_id)
        change(session, models.Experiment, experiment_id, state=State.DELETED.value)
        drop_unused_contexts(session)

    await service.store.write(write)
    service.subscriptions.publish(("experiment", experiment_id))


def drop_unused_contexts(session: Session) -> None:
    """Delete the context archives of no experiment but deleted ones."""
    row = models.Experiment
    used = select(row.context).where(row.context.is_not(None), row.state != State.DELETED)
    session.execute(delete_from(models.Context).where(models.Context.digest.not_in(used)))

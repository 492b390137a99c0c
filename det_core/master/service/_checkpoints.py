"""Checkpoints and their storages: register, read, and record deletions (§5.1, §5.7).

A process journals that it is about to make a checkpoint complete, makes it so, journals what it has made, and then
registers it. It may be killed between any two of these, and the checkpoint must not be lost: neither for the trial's
next run, nor for those who clear the storage. After the first step only the storage knows whether it is complete.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import select

from det_core import _clock
from det_core._storage_settings import location
from det_core.config import Experiment
from det_core.errors import CheckpointNotFound, StoreConflict
from det_core.master._errors import Conflict, Fenced, Invalid, NotFound, is_content_error
from det_core.master.service._access import experiment_row, know_trial, no_experiment, no_trial
from det_core.master.store import change, checkpoints, models, series, trials, validations
from det_core.protocol.records import CheckpointView
from det_core.storage import check_storage_id, open_store

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from det_core.master.service._actor import Transaction
    from det_core.master.service._live import LiveTrial
    from det_core.master.service._state import ServiceState
    from det_core.master.store.models import Record

LOG = logging.getLogger("det_core")
T = TypeVar("T")
STORAGE_TIMEOUT = 60.0
"""Maximum wait in seconds for the answer of a storage; then the trial goes on without."""
STEPS = "steps_completed"
CHOSEN = "storage_id"
"""Key of the number of its storage among the facts of an allocation."""


async def register(
    service: ServiceState,
    uuid: str,
    task_id: str,
    *,
    allocation_id: str | None = None,
    storage_id: int | None = None,
    metadata: Mapping[str, Any],
    resources: Mapping[str, int],
    state: str = "COMPLETED",
    report_time: float | None = None,
) -> None:
    """Record a checkpoint that is complete in its storage.

    Raises:
        Invalid: If the metadata lack ``steps_completed``, or the state is not COMPLETED.
        NotFound: If the task is not a trial.
        Fenced: If the allocation has ended.
        Conflict: If another checkpoint has this ID.
    """
    # Clients that are generated from protobuf send UNSPECIFIED where they set none.
    if state not in ("COMPLETED", "UNSPECIFIED"):
        raise Invalid(f"checkpoint {uuid}: only COMPLETED ones can be reported, not {state}")
    check(uuid, metadata)
    # A zombie's checkpoint could otherwise become the latest of its trial.
    if allocation_id is not None and allocation_id not in service.live.allocations:
        raise Fenced(f"checkpoint {uuid}: allocation {allocation_id} has ended")

    def write(session: Session) -> int:
        trial = trials.by_task_id(session, task_id)
        if trial is None:
            raise NotFound(f"checkpoint {uuid}: trial of task {task_id} not found")
        if storage_id is not None and session.get(models.Storage, storage_id) is None:
            raise Invalid(f"checkpoint {uuid}: unknown storage {storage_id}")
        checkpoints.register(
            session,
            uuid,
            experiment_id=trial.experiment_id,
            trial_id=trial.id,
            task_id=task_id,
            allocation_id=allocation_id,
            storage_id=storage_of_run(session, allocation_id) if storage_id is None else storage_id,
            steps_completed=metadata[STEPS],
            metadata=metadata,
            resources=resources,
            report_time=_clock.now() if report_time is None else report_time,
        )
        return trial.id

    try:
        trial_id = await service.store.write(write)
    except StoreConflict as e:
        raise Conflict(str(e)) from None
    service.subscriptions.publish(("trial", trial_id))


def check(uuid: str, metadata: Mapping[str, Any]) -> None:
    """Make sure that a checkpoint can be kept.

    Raises:
        Invalid: If its ID cannot name a directory, or its metadata lack the step.
    """
    try:
        check_storage_id(uuid)
    except (TypeError, ValueError) as e:
        raise Invalid(f"checkpoint: {e}") from None
    steps = metadata.get(STEPS)
    if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps < 2**63:
        raise Invalid(f"checkpoint {uuid}: metadata.{STEPS} must be an integer, 0 or more, not {steps!r}")


async def from_journal(
    service: ServiceState,
    task_id: str,
    allocation_id: str | None,
    body: Mapping[str, Any],
    time: float,
    storage_id: int | None = None,
) -> None:
    """Register a checkpoint by its record in a journal: its process is dead, or had no master.

    Raises:
        Invalid: If the record does not describe a checkpoint.
    """
    uuid = str(body.get("storage_id"))
    metadata = body.get("metadata")
    resources = body.get("resources")
    if not isinstance(metadata, Mapping) or not isinstance(resources, Mapping):
        raise Invalid(f"checkpoint {uuid}: metadata and resources must be objects")
    sizes = list(resources.values())
    # The columns are 64 bits wide, and a bool is an int.
    if not all(type(size) is int and 0 <= size < 2**63 for size in sizes) or sum(sizes) >= 2**63:
        raise Invalid(f"checkpoint {uuid}: resources must be sizes in bytes")
    await register(
        service,
        uuid,
        task_id,
        allocation_id=allocation_id,
        storage_id=storage_id,
        metadata=metadata,
        resources=resources,
        state="COMPLETED",
        report_time=time,
    )


async def page(
    service: ServiceState, limit: int, offset: int, *, experiment_id: int | None = None, trial_id: int | None = None
) -> tuple[list[CheckpointView], int]:
    """Return some checkpoints of an experiment or a trial, newest first, and how many it has."""

    def look(session: Session) -> tuple[list[CheckpointView], int]:
        if experiment_id is not None and session.get(models.Experiment, experiment_id) is None:
            raise no_experiment(experiment_id)
        if trial_id is not None and session.get(models.Trial, trial_id) is None:
            raise no_trial(trial_id)
        of_one = models.Checkpoint.trial_id == trial_id
        if experiment_id is not None:
            of_one = models.Checkpoint.experiment_id == experiment_id
        rows, total = checkpoints.page(session, of_one, limit, offset)
        return _show(session, rows), total

    return await service.store.read(look)


async def get(service: ServiceState, uuid: str) -> CheckpointView:
    """Return one checkpoint."""

    def look(session: Session) -> CheckpointView:
        row = session.get(models.Checkpoint, uuid)
        if row is None:
            raise no_checkpoint(uuid)
        return _show(session, [row])[0]

    return await service.store.read(look)


async def best(service: ServiceState, experiment_id: int) -> CheckpointView | None:
    """Return the checkpoint with the best searched metric of those whose files are all there, or None.

    Of equals it is the newest of the earliest trial, as that is the one which stays when the experiment has ended.
    """
    experiment = await experiment_row(service, experiment_id)
    sign = 1
    if not Experiment(experiment.config).smaller_is_better:
        sign = -1

    def look(session: Session) -> CheckpointView | None:
        views = _show(session, checkpoints.of_experiment(session, experiment_id, states=[checkpoints.COMPLETED]))
        ranked = [(sign * v.searcher_metric, v.trial_id, v) for v in views if v.searcher_metric is not None]
        numbers = [entry for entry in ranked if not math.isnan(entry[0])]
        # min() returns the first of equals, and the newest come first.
        _, _, view = min(numbers, key=lambda entry: entry[:2], default=(None, None, None))
        return view

    return await service.store.read(look)


async def patch(service: ServiceState, remaining: Sequence[tuple[str, Mapping[str, int] | None]]) -> None:
    """Record what remains of checkpoints, in pairs of ID and files; one without any files is DELETED."""

    def write(session: Session) -> None:
        for uuid, resources in remaining:
            if session.get(models.Checkpoint, uuid) is None:
                raise no_checkpoint(uuid)
            if resources is not None:
                checkpoints.set_resources(session, uuid, resources)

    await service.store.write(write)


def no_checkpoint(uuid: str) -> NotFound:
    """Return the error for a checkpoint that does not exist."""
    return NotFound(f"checkpoint {uuid} not found")


async def set_metadata(service: ServiceState, uuid: str, metadata: Mapping[str, Any]) -> CheckpointView:
    """Replace the recorded metadata of a checkpoint and return it."""

    def write(session: Session) -> None:
        if session.get(models.Checkpoint, uuid) is None:
            raise no_checkpoint(uuid)
        change(session, models.Checkpoint, uuid, user_metadata=dict(metadata))

    await service.store.write(write)
    return await get(service, uuid)


async def use(service: ServiceState, trial_id: int, uuid: str) -> None:
    """Accept that a trial uses a checkpoint, if both exist; stock clients report it, and nothing reads it.

    Raises:
        NotFound: If the trial or the checkpoint does not exist.
    """

    def check(session: Session) -> None:
        if session.get(models.Trial, trial_id) is None:
            raise no_trial(trial_id)
        if session.get(models.Checkpoint, uuid) is None:
            raise no_checkpoint(uuid)

    await service.store.read(check)


def _show(session: Session, rows: Sequence[models.Checkpoint]) -> list[CheckpointView]:
    # Each trial and experiment once, however many checkpoints are shown.
    owners = {number: session.get(models.Trial, number) for number in {row.trial_id for row in rows}}
    specs = {number: session.get(models.Experiment, number) for number in {row.experiment_id for row in rows}}
    views = []
    for row in rows:
        owner = owners[row.trial_id]
        spec = specs[row.experiment_id]
        assert owner is not None and spec is not None
        views.append(_show_one(session, row, owner.hparams, spec.config))
    return views


def _show_one(
    session: Session, row: models.Checkpoint, hparams: dict[str, Any], config: dict[str, Any]
) -> CheckpointView:
    validation = _at(session, row, "validation")
    return CheckpointView(
        uuid=row.uuid,
        task_id=row.task_id,
        allocation_id=row.allocation_id,
        storage_id=row.storage_id,
        storage=storage_of(session, row),
        state=row.state,
        metadata=row.user_metadata,
        resources=row.resources,
        size=row.size,
        steps_completed=row.steps_completed,
        report_time=row.report_time,
        trial_id=row.trial_id,
        experiment_id=row.experiment_id,
        experiment_config=config,
        hparams=hparams,
        searcher_metric=validations.number(validation, Experiment(config).metric),
        training_metrics=_at(session, row, "training"),
        validation_metrics=validation,
    )


def _at(session: Session, row: models.Checkpoint, group: str) -> dict[str, Any]:
    """Return the metrics that a checkpoint's trial has reported for its step."""
    step = row.steps_completed
    # Before all rows of that step.
    before = series.Cursor(step, -1, -1, -1, -1)
    found = series.read(session, row.trial_id, group, after=before, limit=1)
    if found and found[0].steps_completed == step:
        return found[0].metrics
    return {}


async def prepare_run(service: ServiceState, trial_id: int, storage: Mapping[str, Any] | None) -> int | None:
    """Record where the run of a trial keeps its checkpoints; return the number of that storage, None without one.

    Equal storages have the same number (§5.1).
    """
    await know_trial(service, trial_id)
    if storage is None:
        return None
    return await _choose(service, trial_id, storage)


async def _choose(service: ServiceState, trial_id: int, storage: Mapping[str, Any]) -> int:
    config = location(storage)
    number = await service.store.write(lambda session: add_storage(session, config))

    def command(tx: Transaction) -> None:
        trial = service.live.trials.get(trial_id)
        if trial is not None and trial.allocation is not None:
            row = trial.allocation.row
            tx.change(row, facts={**row.facts, CHOSEN: number})

    if trial_id in service.live.trials:
        await service.actor.do(command)
    return number


def add_storage(session: Session, config: Mapping[str, Any]) -> int:
    """Return the number of a storage, which is stored if it is new; equal configurations have one number."""
    # Sorted, so that the order of keys makes no other storage.
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    row = session.scalar(select(models.Storage).where(models.Storage.digest == digest))
    if row is None:
        row = models.Storage(digest=digest, config=dict(config))
        session.add(row)
        session.flush()
    return row.id


def storage_of_run(session: Session, allocation_id: str | None) -> int | None:
    """Return the number of the storage that an allocation's script has chosen, None for its experiment's."""
    if allocation_id is None:
        return None
    row = session.get(models.Allocation, allocation_id)
    if row is None:
        return None
    return row.facts.get(CHOSEN)


def storage_of(session: Session, row: models.Checkpoint) -> dict[str, Any] | None:
    """Return the configuration of the storage that a checkpoint is in, without what says how many stay."""
    return find_storage(session, row.storage_id, row.experiment_id)


def find_storage(session: Session, storage_id: int | None, experiment_id: int) -> dict[str, Any] | None:
    """Return the configuration of a storage; for None, or an unknown one, that of the experiment's."""
    if storage_id is not None:
        storage = session.get(models.Storage, storage_id)
        if storage is not None:
            return location(storage.config)
    experiment = session.get(models.Experiment, experiment_id)
    if experiment is None or experiment.config.get("checkpoint_storage") is None:
        return None
    return location(experiment.config["checkpoint_storage"])


def storages_of(session: Session, experiment_id: int) -> list[dict[str, Any] | None]:
    """Return the configurations of the storages that an experiment's runs were given, each once."""
    facts = select(models.Allocation.facts).join(models.Trial).where(models.Trial.experiment_id == experiment_id)
    numbers = {fact.get(CHOSEN) for fact in session.scalars(facts)}
    numbers |= {row.storage_id for row in checkpoints.of_experiment(session, experiment_id)}
    found: list[dict[str, Any] | None] = []
    for number in numbers:
        config = find_storage(session, number, experiment_id)
        if config not in found:
            found.append(config)
    return found


async def run_in_daemon_thread(work: Callable[..., T], *args: Any) -> T:
    """Return what ``work(*args)`` returns, called in a thread of its own.

    A storage that hangs would hold one of the few threads of the loop's pool, which all else shares, and keep the
    process from ending, which waits for that pool.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not future.done():
            set_outcome(outcome)

    def run() -> None:
        try:
            outcome: Any = work(*args)
            set_outcome: Callable[[Any], None] = future.set_result
        except BaseException as e:
            outcome = e
            set_outcome = future.set_exception
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, set_outcome, outcome)

    threading.Thread(target=run, name=f"det_core master: {work.__name__}", daemon=True).start()
    return await future


@dataclass(frozen=True)
class Doubt:
    """Checkpoints that were announced, and that only their storage can show to be complete.

    Attributes:
        trial: whose they are.
        storage: the configuration of the storage.
        records: where they were announced.
    """

    trial: LiveTrial
    storage: Mapping[str, Any] | None
    records: Sequence[Record]


async def make_up(service: ServiceState, allocation_id: str) -> Doubt | None:
    """Register what the process of an allocation has journaled; return what is to be looked for in the storage.

    Raises:
        Exception: If our database failed; to be called again.
    """
    allocation = service.live.allocations.get(allocation_id)
    if allocation is None:
        return None
    trial = allocation.trial
    run_id = allocation.row.run_id

    def unknown(session: Session, kind: str) -> Sequence[Record]:
        rows = series.records(session, trial.id, kind=kind, run_id=run_id)
        return [row for row in rows if not _is_registered(session, row)]

    def doubt(session: Session) -> Doubt | None:
        rows = unknown(session, "checkpoint_commit")
        chosen = storage_of_run(session, allocation_id)
        if not rows:
            return None
        return Doubt(trial, find_storage(session, chosen, trial.experiment.id), rows)

    for row in await service.store.read(lambda session: unknown(session, "checkpoint")):
        await _register_record(service, trial, row.body, row.time)
    return await service.store.read(doubt)


def _is_registered(session: Session, row: Record) -> bool:
    """Return whether the checkpoint of a record is registered, or can never be: its ID is not a string to look for."""
    uuid = row.body.get("storage_id")
    try:
        return not isinstance(uuid, str) or session.get(models.Checkpoint, uuid) is not None
    except ValueError:  # half a surrogate pair, or a NUL, which not every database takes
        return True


async def look_for(service: ServiceState, doubt: Doubt) -> None:
    """Look for announced checkpoints in their storage, and register those that are complete."""
    for row in doubt.records:
        uuid = str(row.body.get("storage_id"))
        try:
            found = await asyncio.wait_for(
                run_in_daemon_thread(_look_in_storage, service, doubt.storage, uuid), STORAGE_TIMEOUT
            )
        except Exception as e:  # a driver may raise anything, and the trial is to go on
            what = str(e) or "its storage does not answer"  # a timeout has no text
            LOG.warning("trial %d: whether checkpoint %s is complete is not known: %s", doubt.trial.id, uuid, what)
            continue
        if found is not None:
            LOG.info("trial %d: checkpoint %s was complete when its process died", doubt.trial.id, uuid)
            await _register_record(service, doubt.trial, found, row.time)


async def _register_record(service: ServiceState, trial: LiveTrial, body: Mapping[str, Any], time: float) -> None:
    try:
        allocation_id = None if trial.allocation is None else trial.allocation.id
        await from_journal(service, trial.row.task_id, allocation_id, body, time)
    except Exception as e:
        if not is_content_error(e):
            raise
        LOG.warning("trial %d: ignoring a checkpoint in its journal: %r", trial.id, e)


def _look_in_storage(service: ServiceState, storage: Mapping[str, Any] | None, uuid: str) -> dict[str, Any] | None:
    """Return a checkpoint as it would have been journaled, None if it is incomplete."""
    store = open_store(storage, service.settings.home / "checkpoints")
    try:
        checkpoint = store.open(uuid)
        if not checkpoint.manifest.verified:
            return None
        resources = checkpoint.manifest.resources
        return {"storage_id": uuid, "metadata": checkpoint.metadata(), "resources": resources}
    except CheckpointNotFound:
        return None
    finally:
        store.close()

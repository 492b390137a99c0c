"""Experiments whose trials are run by others (§9): recorded, never scheduled."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sqlalchemy import bindparam, func, select

from det_core import _clock
from det_core._metadata import validate_metadata
from det_core.master._errors import Invalid, NotFound, WrongState, is_content_error
from det_core.master.scheduler import State
from det_core.master.service import _checkpoints, _queries
from det_core.master.service._access import experiment_row, no_trial, trial_row
from det_core.master.store import change, checkpoints, models, trials
from det_core.protocol.records import StartView, TrialView

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from det_core.master.service._actor import Transaction
    from det_core.master.service._state import ServiceState

STATES = {
    "PAUSED": State.PAUSED,
    "ERROR": State.ERROR,
    "CANCELED": State.CANCELED,
    "COMPLETED": State.COMPLETED,
    "ACTIVE": State.ACTIVE,
    "QUEUED": State.ACTIVE,
    "PULLING": State.ACTIVE,
    "STARTING": State.ACTIVE,
    "RUNNING": State.ACTIVE,
}
"""State of a trial by the state that is reported of it."""
_RECORDS = ("checkpoint", "checkpoint_deleted", "metadata")
"""Kinds of records that are applied like their requests."""
CLOCK_JUMP = 5.0
"""Seconds by which the time of day and the monotonic clock may drift apart before that counts as a jump."""
_RANKS = [State.PAUSED, State.CANCELED, State.ERROR, State.COMPLETED, State.ACTIVE]
"""An experiment is in the last of these that any of its trials is in."""


async def create_trial(
    service: ServiceState,
    experiment_id: int,
    hparams: Mapping[str, Any],
    *,
    external_id: str | None = None,
    start_time: float | None = None,
) -> TrialView:
    """Create a trial of an unmanaged experiment and return it; there is one of each external ID.

    Args:
        service: State of the service.
        experiment_id: Experiment.
        hparams: Hyperparameters of a new one.
        external_id: ID chosen by the caller, or None.
        start_time: When its training began, if that was before now.

    Raises:
        NotFound: If the experiment does not exist.
        WrongState: If it is managed.
    """
    row = await experiment_row(service, experiment_id)
    if not row.unmanaged:
        raise WrongState(f"experiment {experiment_id} is managed: its search creates its trials")
    name = external_id
    if name is None:
        name = str(uuid.uuid4())
    # Filled by the thread that writes, and read once the command is answered.
    made: list[models.Trial] = []

    def command(tx: Transaction) -> None:
        # By the actor, which alone gives out IDs.
        tx.write(write, service.live.new_trial_id())

    def write(session: Session, trial_id: int) -> None:
        now = _clock.now()
        trial = trials.create(
            session,
            experiment_id,
            name,
            id=trial_id,
            state=State.ACTIVE.value,
            hparams=dict(hparams),
            external_id=external_id,
            unmanaged=True,
            last_activity=now,
        )
        made.append(trial)
        trial.last_activity = now
        if start_time is not None:
            trial.start_time = start_time
        _follow(session, experiment_id, State(trial.state))

    await service.actor.do(command)
    service.subscriptions.publish(("trial", made[-1].id), ("experiment", experiment_id))
    return await _queries.trial(service, made[-1].id)


async def start_trial(service: ServiceState, trial_id: int, *, resume: bool) -> StartView:
    """Begin another run of an unmanaged trial.

    Raises:
        NotFound: If the trial does not exist.
        WrongState: If it is managed, or was started before and ``resume`` is false.
    """

    def write(session: Session) -> tuple[StartView, int]:
        row = _unmanaged(session, trial_id)
        if row.run_id > 0 and not resume:
            raise WrongState(f"trial {trial_id} was started before; say resume to go on with it")
        run_id = row.run_id + 1
        change(
            session,
            models.Trial,
            trial_id,
            run_id=run_id,
            state=State.ACTIVE.value,
            end_time=None,
            last_activity=_clock.now(),
        )
        _follow(session, row.experiment_id, State.ACTIVE)
        started = StartView(trial_run_id=run_id, steps_completed=0)
        latest = checkpoints.latest(session, trial_id)
        if latest is not None and run_id > 1:
            started = StartView(
                trial_run_id=run_id, steps_completed=latest.steps_completed, latest_checkpoint=latest.uuid
            )
        return started, row.experiment_id

    started, experiment_id = await service.store.write(write)
    service.subscriptions.publish(("trial", trial_id), ("experiment", experiment_id))
    return started


async def apply_records(
    service: ServiceState, trial_id: int, records: Sequence[Mapping[str, Any]], storage_id: int | None
) -> None:
    """Apply what the journal of an unmanaged trial says of checkpoints and metadata; repeats change nothing.

    Args:
        service: State of the service.
        trial_id: ID of the trial; nothing is applied to a managed one, which asks by itself.
        records: Records as they stand in the journal.
        storage_id: Number of the storage of its checkpoints. Defaults to the experiment's.

    Raises:
        Invalid: If a record's content cannot be taken.
    """
    told = [record for record in records if record["kind"] in _RECORDS]
    if not told:
        return
    trial = await trial_row(service, trial_id)
    if not trial.unmanaged:
        return
    for record in told:
        try:
            await _apply(service, trial, record, storage_id)
        except Exception as e:
            if not is_content_error(e):
                raise
            # The client halves its batch until it has found the record, and leaves it out.
            raise Invalid(f"trial {trial_id}, a record of kind {record['kind']}: {e}") from e


async def _apply(service: ServiceState, trial: models.Trial, record: Mapping[str, Any], storage_id: int | None) -> None:
    body = record["body"]
    if record["kind"] == "checkpoint":
        await _checkpoints.from_journal(service, trial.task_id, None, body, record["time"], storage_id)
    elif record["kind"] == "metadata":
        metadata = validate_metadata(body["metadata"])
        await service.store.write(lambda session: trials.set_metadata(session, trial.id, metadata))
    else:
        # A checkpoint that was deleted before this master knew it is not recorded here.
        with suppress(NotFound):
            await _checkpoints.patch(service, [(str(body["storage_id"]), dict(body["resources"]))])


async def patch_trial(
    service: ServiceState, trial_id: int, *, state: str | None = None, end_time: float | None = None
) -> TrialView:
    """Record a sign of life of an unmanaged trial and return the trial.

    Args:
        service: State of the service.
        trial_id: Trial.
        state: New state. Defaults to the same.
        end_time: When it ended. Defaults to now, if the new state is an end.

    Raises:
        NotFound: If the trial does not exist.
        WrongState: If it is managed.
        Invalid: If the state is unknown.
    """

    def write(session: Session) -> models.Trial:
        row = _unmanaged(session, trial_id)
        if state is not None and state not in STATES:
            raise Invalid(f"trial {trial_id}: state is {state!r}, and must be one of {', '.join(STATES)}")
        if state is None:
            change(session, models.Trial, trial_id, last_activity=_clock.now())
        else:
            _set(session, row, STATES[state], end_time=end_time)
        return row

    row = await service.store.write(write)
    service.subscriptions.publish(("trial", trial_id), ("log", row.task_id), ("experiment", row.experiment_id))
    return await _queries.trial(service, trial_id)


def _unmanaged(session: Session, trial_id: int) -> models.Trial:
    row = session.get(models.Trial, trial_id)
    if row is None:
        raise no_trial(trial_id)
    if not row.unmanaged:
        raise WrongState(f"trial {trial_id} is managed: the master starts and ends it")
    return row


def _set(
    session: Session, row: models.Trial, state: State, error: str | None = None, end_time: float | None = None
) -> None:
    now = _clock.now()
    if not state.terminal:
        end_time = None
    elif end_time is None:
        end_time = now
    change(session, models.Trial, row.id, state=state.value, error=error, last_activity=now, end_time=end_time)
    _follow(session, row.experiment_id, state)


def _follow(session: Session, experiment_id: int, state: State) -> None:
    """Set the state of an experiment to that of its furthest trial, and its end to that of the last one to end.

    Args:
        session: Session that writes.
        experiment_id: Experiment.
        state: New state of one of its trials.
    """
    session.flush()
    execute = session.connection().execute
    key = {"experiment": experiment_id}
    end_time = None
    # While a trial is active no other state counts, and its trials, which may be many, need not be read.
    if state is not State.ACTIVE and execute(_ACTIVE_TRIAL, key).first() is None:
        ends = {state: end for state, end in execute(_LATEST_ENDS, key)}
        state = max(map(State, ends), key=_RANKS.index, default=State.ACTIVE)
        if state.terminal:
            end_time = max((end for end in ends.values() if end is not None), default=_clock.now())
    else:
        state = State.ACTIVE
    if execute(_STATE_AND_END, key).one() != (state.value, end_time):
        change(session, models.Experiment, experiment_id, state=state.value, end_time=end_time)


# Built once: each of these is executed for each request of an unmanaged trial.
_OF_EXPERIMENT = models.Trial.experiment_id == bindparam("experiment")
_ACTIVE_TRIAL = (
    select(models.Trial.id)
    .where(_OF_EXPERIMENT, models.Trial.state == State.ACTIVE.value)
    .order_by(models.Trial.id.desc())
    .limit(1)
)
_LATEST_ENDS = (
    select(models.Trial.state, func.max(models.Trial.end_time)).where(_OF_EXPERIMENT).group_by(models.Trial.state)
)
_STATE_AND_END = select(models.Experiment.state, models.Experiment.end_time).where(
    models.Experiment.id == bindparam("experiment")
)


async def sweep(service: ServiceState) -> None:
    """End trials that have given no sign of life for long, again and again.

    A trial gets its whole timeout after the master's start and after a jump of the clock: while the master was down or
    the machine slept, no sign of life could arrive.
    """
    timeout = service.settings.unmanaged_timeout
    since = _clock.now()
    skew = since - _clock.monotonic()
    while True:
        await asyncio.sleep(service.settings.sweep_interval)
        now = _clock.now()
        if abs(now - _clock.monotonic() - skew) > CLOCK_JUMP:
            since = now
            skew = now - _clock.monotonic()
        if now - since >= timeout:
            await service.store.write(lambda session: bury(session, _clock.now() - timeout))


def bury(session: Session, before: float) -> None:
    """End unmanaged trials whose last sign of life is older than ``before``."""
    for row in trials.in_states(session, [State.ACTIVE.value], unmanaged=True):
        if row.last_activity is not None and row.last_activity < before:
            _set(session, row, State.ERROR, "it has given no sign of life for too long")

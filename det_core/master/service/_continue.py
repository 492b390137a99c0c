"""Experiments that have ended go on (§10): incomplete trials resume from their latest checkpoints."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from det_core.config import ConfigError, Experiment, parse_experiment, read_changes
from det_core.master._errors import Invalid, WrongState
from det_core.master.scheduler import State
from det_core.master.service import _queries, _retention
from det_core.master.service._access import experiment_row
from det_core.master.store import change, models, searcher_events, trials
from det_core.search import Exited, Shutdown

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from det_core.master.service._state import ServiceState
    from det_core.protocol.records import ExperimentView

LENGTH = "max_length"
ENDED = (State.COMPLETED, State.CANCELED, State.ERROR)
"""States of an experiment that can be continued."""


async def continue_experiment(service: ServiceState, experiment_id: int, override: str | None = None) -> ExperimentView:
    """Continue an ended experiment and return it.

    Args:
        service: State of the service.
        experiment_id: ID of the experiment.
        override: Configuration text with another ``searcher.max_length`` for a single trial.

    Raises:
        NotFound: If the experiment does not exist.
        WrongState: If it has not ended, is unmanaged, or has nothing left to do.
        Invalid: If the override changes anything but the length of a single trial.
    """
    row = await experiment_row(service, experiment_id)
    if row.unmanaged or row.state not in ENDED:
        what = "unmanaged" if row.unmanaged else row.state
        raise WrongState(f"experiment {experiment_id} is {what}: only one that has ended can be continued")
    spec = await asyncio.to_thread(_changed, row, override)
    await service.store.write(lambda session: _reopen(session, experiment_id, spec))
    await service.actor.refresh()
    service.subscriptions.publish(("experiment", experiment_id))
    return await _queries.experiment(service, experiment_id)


def _changed(row: models.Experiment, override: str | None) -> Experiment:
    """Return the configuration to continue with: the experiment's, perhaps with another length of its only trial."""
    changes = {}
    try:
        if override is not None and override.strip():
            changes = read_changes(override)
        if not changes:
            return Experiment(row.config, row.warnings)
        searcher = row.config["searcher"]
        length = changes.get("searcher")
        if searcher["name"] != "single" or len(changes) > 1 or not isinstance(length, dict) or set(length) != {LENGTH}:
            raise Invalid(
                f"experiment {row.id}: only {LENGTH} of a single trial's searcher can be changed by continuing it; "
                "for another change create an experiment with searcher.source_trial_id"
            )
        return parse_experiment({**row.config, "searcher": {**searcher, **length}})
    except ConfigError as e:
        raise Invalid(str(e)) from None


def _reopen(session: Session, experiment_id: int, spec: Experiment) -> None:
    row = session.get(models.Experiment, experiment_id)
    # Looked at again, as it may have been continued or deleted since.
    if row is None or row.state not in ENDED:
        what = "deleted" if row is None else row.state
        raise WrongState(f"experiment {experiment_id} is {what}: only one that has ended can be continued")
    if spec.searcher["name"] == "single":
        searcher_events.erase(session, experiment_id)  # it begins anew, with the same trial
        for trial in trials.of_experiment(session, experiment_id):
            _revive(session, trial, closed=False, reopened=False)
    else:
        _reopen_some(session, experiment_id)
    change(
        session,
        models.Experiment,
        experiment_id,
        state=State.ACTIVE.value,
        config=spec.data,
        error=None,
        end_time=None,
    )
    _retention.due(session, remove=experiment_id)


@dataclass(frozen=True)
class _ReceivedEnds:
    """Ends that a search has received: of trials, and its own."""

    exited: frozenset[str]
    over: bool


def _received_ends(session: Session, experiment_id: int) -> _ReceivedEnds:
    rows = searcher_events.after(session, experiment_id)
    exited = frozenset(row.event["request_id"] for row in rows if row.event["kind"] == Exited.kind)
    return _ReceivedEnds(exited, any(a["kind"] == Shutdown.kind for row in rows for a in row.actions or ()))


def _reopen_some(session: Session, experiment_id: int) -> None:
    """Revive the trials that have something left to train."""
    received = _received_ends(session, experiment_id)
    given = trials.current_operations(session, models.Trial.experiment_id == experiment_id)
    some = not received.over
    for trial in trials.of_experiment(session, experiment_id, states=[State.CANCELED.value, State.ERROR.value]):
        seen = received.over or trial.request_id in received.exited
        last = given.get(trial.id)
        if seen and last is not None and last.completed:
            continue
        _revive(session, trial, closed=trial.closed or seen, reopened=seen)
        some = True
    if not some:
        raise WrongState(f"experiment {experiment_id}: its search is complete, and no trial has anything left to train")


def _revive(session: Session, trial: models.Trial, *, closed: bool, reopened: bool) -> None:
    if trial.validated >= 0 and not closed:
        change(session, models.Trial, trial.id, validated=-1)
    change(
        session,
        models.Trial,
        trial.id,
        state=State.ACTIVE.value,
        closed=closed,
        reopened=reopened,
        restarts=0,
        early_exit=None,
        error=None,
        end_time=None,
    )

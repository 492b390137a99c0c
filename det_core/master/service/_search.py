"""What searches are told, what they decide, and how that is recorded and carried out."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from det_core.master.scheduler import State
from det_core.master.service import _ending, _trials
from det_core.master.store import searcher_events
from det_core.search import Close, Create, Shutdown, Stop, TrainTo, TrialCreated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from det_core.master.service._actor import Transaction
    from det_core.master.service._live import LiveExperiment, LiveTrial
    from det_core.master.service._state import ServiceState
    from det_core.search import Action, Event

LOG = logging.getLogger("det_core")


def settle(hub: ServiceState, tx: Transaction) -> None:
    """Tell the searches all that has happened, and carry out what they decide, until nothing follows."""
    while hub.live.touched:
        experiment = hub.live.touched.pop(min(hub.live.touched))
        if experiment.broken is not None and experiment.alive:
            _ending.fail(hub, tx, experiment, experiment.broken)
        while experiment.pending:
            event = experiment.pending.popleft()
            if experiment.alive and experiment.search is not None and event.kind in experiment.search.event_kinds:
                _tell(hub, tx, experiment, event)
        _ending.finish(hub, tx, experiment)


def _tell(hub: ServiceState, tx: Transaction, experiment: LiveExperiment, event: Event) -> None:
    """Tell a search one event. What it decides is carried out, and recorded with the event."""
    assert experiment.search is not None
    try:
        actions = experiment.search.handle(event)
    except Exception as e:
        # The method may be the user's: whatever it raises ends the experiment, and no other one.
        LOG.warning("experiment %d: its search failed at %r: %s", experiment.id, event, e)
        _ending.fail(hub, tx, experiment, f"its search failed at {event!r}: {type(e).__name__}: {e}")
        return
    record(hub, tx, experiment, event, actions)
    for action in actions:
        _carry_out(hub, tx, experiment, action)


def record(
    hub: ServiceState, tx: Transaction, experiment: LiveExperiment, event: Event, actions: Sequence[Action]
) -> None:
    """Keep an event with the decisions taken: they are all that a search is recovered from."""
    experiment.events += 1
    tx.write(searcher_events.add, experiment.id, event.to_dict(), [action.to_dict() for action in actions])


def _carry_out(hub: ServiceState, tx: Transaction, experiment: LiveExperiment, action: Action) -> None:
    if isinstance(action, Create):
        if action.request_id not in experiment.known:
            _trials.create(hub, tx, experiment, action.request_id, action.hparams, action.seed)
            experiment.pending.append(TrialCreated(action.request_id))
        return
    if isinstance(action, Shutdown):
        state = State.STOPPING_ERROR if action.failure else State.STOPPING_COMPLETED
        _ending.stop(hub, tx, experiment, State.STOPPING_CANCELED if action.cancel else state, "its search is over")
        return
    trial: LiveTrial | None = experiment.trials.get(getattr(action, "request_id", ""))
    if trial is None:
        return
    if isinstance(action, TrainTo):
        _trials.train_to(hub, tx, trial, action.length)
    elif isinstance(action, Close):
        _trials.close(hub, tx, trial)
    elif isinstance(action, Stop):
        trial.stopped = True
        _trials.stop(hub, tx, trial, State.STOPPING_COMPLETED, "its search has stopped it")

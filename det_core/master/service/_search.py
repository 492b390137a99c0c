"""Decisions of searches: asked for, recorded and carried out.

The searches of this package decide within microseconds, in the transaction that records the event. Those that may take
long have a worker: the event is recorded without an answer, the worker decides, and a second transaction records and
carries out its decisions. An event without an answer is asked again at the start of the next master.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from det_core.master._errors import Stopping
from det_core.master.scheduler import State
from det_core.master.service import _facts, _steering, _trials
from det_core.master.service._search_workers import SearchDied, SearchFailed, SearchWorker
from det_core.master.store import searcher_events
from det_core.search import Close, Create, Shutdown, Stop, TrainTo, TrialCreated, event_from_dict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from det_core.master.service._actor import Transaction
    from det_core.master.service._live import LiveExperiment, LiveTrial
    from det_core.master.service._state import ServiceState
    from det_core.search import Action, Event, Search

LOG = logging.getLogger("det_core")


def settle(service: ServiceState, tx: Transaction) -> None:
    """Tell the searches all that has happened, and carry out what they decide, until nothing follows."""
    while service.live.touched:
        # The oldest first, so that equal histories give equal decisions.
        experiment = service.live.touched.pop(min(service.live.touched))
        if experiment.broken is not None and experiment.alive:
            _steering.fail(service, tx, experiment, experiment.broken)
        while experiment.pending:
            event = experiment.pending.popleft()
            search = experiment.search
            # Most searches take few kinds of events; others are neither decided on nor recorded.
            if not experiment.alive or search is None or event.kind not in search.event_kinds:
                continue
            if isinstance(search, SearchWorker):
                _put_off(tx, experiment, search, event)
            else:
                _tell(service, tx, experiment, search, event)
        _steering.finish(service, tx, experiment)


def _tell(service: ServiceState, tx: Transaction, experiment: LiveExperiment, search: Search, event: Event) -> None:
    """Have a search decide on an event; the decisions, all that it is recovered from, are recorded with the event."""
    try:
        actions = search.handle(event)
    except Exception as e:
        LOG.warning("experiment %d: its search failed at %r: %s", experiment.id, event, e)
        _steering.fail(service, tx, experiment, f"its search failed at {event!r}: {type(e).__name__}: {e}")
        return
    # Before the actions: the record alone makes the search again, whatever became of its trials.
    tx.write(searcher_events.add, experiment.id, event.to_dict(), [action.to_dict() for action in actions])
    for action in actions:
        _carry_out(service, tx, experiment, action)


def _put_off(tx: Transaction, experiment: LiveExperiment, worker: SearchWorker, event: Event) -> None:
    """Record an event on which a worker decides later."""
    experiment.unanswered.append(event)
    tx.write(searcher_events.add, experiment.id, event.to_dict(), None)
    tx.then(worker.wake)


def employ(service: ServiceState, experiment_id: int, worker: SearchWorker) -> None:
    """Begin to ask a worker, unless that has begun."""
    if worker.experiment_id is None:
        worker.experiment_id = experiment_id
        service.workers[experiment_id] = worker
        service.runner.keep_running(
            partial(_ask_events, service, experiment_id, worker), f"search of experiment {experiment_id}"
        )


async def _ask_events(service: ServiceState, experiment_id: int, worker: SearchWorker) -> None:
    """Have a worker decide on the recorded events, one after the other, until its experiment ends.

    If this fails, as by a database error, it is begun again: the process is replaced, and replays what is recorded.
    """
    try:
        await service.runner.until_recovered()  # as nothing can be decided before
        ordinal = 0
        deaths = 0
        while not worker.is_stopped:
            event = None
            try:
                if not worker.is_open:
                    ordinal = await _open(service, experiment_id, worker)
                read = partial(searcher_events.after, experiment_id=experiment_id, ordinal=ordinal - 1, limit=1)
                rows = await service.store.read(read)
                if not rows:
                    await worker.wait()
                    continue
                event = event_from_dict(rows[0].event)
                actions = await worker.handle(event)
            except SearchDied as e:
                await worker.close()
                # Killed once, it may have been for want of memory; twice in a row at one event is its own doing.
                deaths += 1
                if deaths == 1 and not worker.is_stopped:
                    LOG.warning("experiment %d: %s; starting it again", experiment_id, e)
                    continue
                error = str(e)
            except SearchFailed as e:
                error = str(e)
            else:
                await service.actor.do(partial(_answered, service, experiment_id, worker, ordinal, event, actions))
                ordinal += 1
                deaths = 0
                continue
            await service.actor.do(partial(_failed, service, experiment_id, worker, event, error))
    except Stopping:
        return
    finally:
        await worker.close()
    # A continued experiment may have another one by now.
    if service.workers.get(experiment_id) is worker:
        del service.workers[experiment_id]


async def _open(service: ServiceState, experiment_id: int, worker: SearchWorker) -> int:
    """Start the process of a worker as its search was; return the ordinal of the first event without an answer."""
    rows = await service.store.read(lambda session: searcher_events.after(session, experiment_id))
    # Those without an answer are asked again, in order.
    record = [(row.event, row.actions) for row in rows if row.actions is not None]
    await worker.open(record)
    for trial in list(service.live.trials.values()):
        if trial.experiment.id == experiment_id and _facts.goes_by_validations(trial):
            await _facts.catch_up(service, trial)
    return len(record)


def _answered(
    service: ServiceState,
    experiment_id: int,
    worker: SearchWorker,
    ordinal: int,
    event: Event,
    actions: Sequence[Action],
    tx: Transaction,
) -> None:
    """Record and carry out the decisions on an event."""
    experiment = service.live.experiments.get(experiment_id)
    if experiment is None or experiment.search is not worker or not experiment.alive:
        return
    experiment.unanswered.popleft()
    tx.write(searcher_events.decide, experiment_id, ordinal, [action.to_dict() for action in actions])
    trial = experiment.trials.get(getattr(event, "request_id", ""))
    if trial is not None:  # it may wait for this
        tx.publish(("trial", trial.id))
    for action in actions:
        if isinstance(action, Shutdown):
            tx.then(worker.conclude)
        _carry_out(service, tx, experiment, action)
    service.live.touch(experiment)


def _failed(
    service: ServiceState, experiment_id: int, worker: SearchWorker, event: Event | None, error: str, tx: Transaction
) -> None:
    """End an experiment whose search failed at an event, or at its start."""
    experiment = service.live.experiments.get(experiment_id)
    if experiment is None or experiment.search is not worker or not experiment.alive:
        return
    text = f"its search cannot be made again from what is kept: {error}"
    if event is not None:
        text = f"its search failed at {event!r}: {error}"
    LOG.warning("experiment %d: %s", experiment_id, text)
    _steering.fail(service, tx, experiment, text)


def _carry_out(service: ServiceState, tx: Transaction, experiment: LiveExperiment, action: Action) -> None:
    if isinstance(action, Create):
        # A search that begins anew, as by a continue, asks for a trial that it has.
        if action.request_id not in experiment.known:
            _trials.create(service, tx, experiment, action.request_id, action.hparams, action.seed)
            experiment.pending.append(TrialCreated(action.request_id))
        return
    if isinstance(action, Shutdown):
        state = State.STOPPING_COMPLETED
        if action.cancel:
            state = State.STOPPING_CANCELED
        elif action.failure:
            state = State.STOPPING_ERROR
        _steering.stop(service, tx, experiment, state, "its search is over")
        return
    trial: LiveTrial | None = experiment.trials.get(getattr(action, "request_id", ""))
    if trial is None:
        return
    if isinstance(action, TrainTo):
        _trials.train_to(service, tx, trial, action.length)
    elif isinstance(action, Close):
        _trials.close(service, tx, trial)
    elif isinstance(action, Stop):
        trial.stopped = True
        _trials.stop(service, tx, trial, State.STOPPING_COMPLETED, "its search has stopped it")

"""Start, recovery and stop of the service. The live state is recovered at the start, and after a refused write."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from sqlalchemy import Row, func, select

from det_core import _clock
from det_core.config import Experiment
from det_core.master.scheduler import ExitKind, State
from det_core.master.service import _facts, _operations, _retention, _search, _trials, _unmanaged
from det_core.master.service._actor import Actor
from det_core.master.service._allocations import schedule
from det_core.master.service._live import Launch, Live, LiveAllocation, LiveExperiment, LiveTrial
from det_core.master.service._runner import Runner
from det_core.master.service._search_workers import SearchWorker, has_worker, is_over, prepare_worker, recall
from det_core.master.service._tickets import EventListener
from det_core.master.store import experiments, models, searcher_events, trials
from det_core.search import Started, event_from_dict

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from det_core.master.service._state import ServiceState

LOG = logging.getLogger("det_core")
GOING_ON = [s.value for s in State if not s.terminal]


async def start(service: ServiceState) -> None:
    """Read the store, adopt the allocations that still run, and continue what an earlier master did not finish."""
    service.runner = Runner(service)
    service.actor = Actor(
        service.store,
        partial(_search.settle, service),
        partial(schedule, service),
        partial(reload, service),
        service.subscriptions.publish,
    )
    await reload(service)
    rows, kept = await service.store.read(
        lambda session: (trials.running_allocations(session), trials.last_runs(session))
    )
    known = {row.id: Launch.from_facts(row.facts).ref for row in rows}
    service.actor.start()
    await service.engine.recover(known, EventListener(service), kept)
    service.runner.watch()
    await resume(service)


async def stop(service: ServiceState) -> None:
    """Decide nothing more; allocations go on, and the next :func:`start` finds them."""
    await service.actor.stop()
    service.subscriptions.close()
    await service.runner.stop()
    for worker in list(service.workers.values()):  # those whose tasks were given up before their processes were gone
        await worker.close()
    for threads in (service.log_readers, service.log_writer):
        await asyncio.to_thread(threads.shutdown)


Kept = tuple[LiveExperiment, Sequence[Row[Any]]]
"""An experiment that has not ended, without its search, and the events of that."""


def _read(session: Session) -> tuple[list[Kept], Sequence[models.Allocation], int, int]:
    rows = [row for row in experiments.find(session, states=GOING_ON)[0] if not row.unmanaged]
    kept = [(_read_one(session, row), searcher_events.after(session, row.id)) for row in rows]
    last_experiment = session.scalar(select(func.max(models.Experiment.id))) or 0
    last_trial = session.scalar(select(func.max(models.Trial.id))) or 0
    return kept, trials.running_allocations(session), last_experiment, last_trial


def _read_one(session: Session, row: models.Experiment) -> LiveExperiment:
    trial = models.Trial
    operation = models.Operation
    allocation = models.Allocation
    experiment = LiveExperiment(row, Experiment(row.config, row.warnings))
    # Most trials of a long search have ended: these are no objects.
    named = select(trial.request_id, trial.warm_start).where(trial.experiment_id == row.id).order_by(trial.id)
    for name, warm_start in session.execute(named):
        if not experiment.known:
            experiment.warm_start = warm_start
        experiment.known.add(name)
    found: dict[int, LiveTrial] = {}
    for one in trials.of_experiment(session, row.id, states=GOING_ON):
        stopped = one.state == State.STOPPING_COMPLETED and experiment.alive
        experiment.trials[one.request_id] = found[one.id] = LiveTrial(one, experiment, stopped=stopped)
    live = (trial.experiment_id == row.id) & trial.state.in_(GOING_ON)
    for given in session.scalars(select(operation).join(trial).where(live).order_by(operation.ordinal)):
        found[given.trial_id].operations.append(given)
    ends = select(allocation.trial_id, allocation.exit_kind, allocation.latest_checkpoint).join(trial)
    ended = ends.where(live, allocation.exit_kind.is_not(None)).order_by(allocation.run_id)
    for trial_id, kind, start in session.execute(ended):
        found[trial_id].losses.note(ExitKind(kind), start)
    return experiment


async def reload(service: ServiceState) -> None:
    """Replace the live state by that of the store: what is not stored has not happened."""
    kept, running, last_experiment, last_trial = await service.store.read(_read)
    # One that cannot be made again ends its own experiment, not the start of the master.
    for experiment, events in kept:
        await _recall_safely(service, experiment, events)
    # From here on nothing waits, so that nobody sees half of it.
    before = service.live
    live = Live(next_experiment=last_experiment + 1, next_trial=last_trial + 1)
    service.live = live
    for experiment, _ in kept:
        live.experiments[experiment.id] = experiment
        live.trials |= {trial.id: trial for trial in experiment.trials.values()}
    for row in running:
        _allocation(service, row, before.allocations.get(row.id))
    for trial in live.trials.values():
        _trials.enqueue(service, trial)
    for experiment in live.experiments.values():
        live.touch(experiment)
        if isinstance(experiment.search, SearchWorker) and experiment.alive:
            _search.employ(service, experiment.id, experiment.search)
    for number, worker in service.workers.items():
        # Its experiment has ended, or was never recorded.
        if number not in live.experiments:
            worker.stop()


async def _recall_safely(service: ServiceState, experiment: LiveExperiment, events: Sequence[Row[Any]]) -> None:
    """Give an experiment its search as it was, or note why not. That of a worker replays later, by itself."""
    worker = service.workers.get(experiment.id)
    try:
        if not has_worker(experiment.spec):
            experiment.search = await asyncio.to_thread(recall, experiment.spec, events)
        # A worker that lives keeps its search: it replays nothing, and its process is not started again.
        elif worker is None or worker.is_stopped:
            worker = await prepare_worker(service, experiment.spec, experiment.row.context)
            worker.over = any(is_over(event) for event in events)
    except Exception as e:
        LOG.error("experiment %d: its search cannot be made again: %s", experiment.id, e)
        experiment.broken = f"its search cannot be made again from what is kept: {e}"
        return
    if worker is not None:
        experiment.search = worker
        experiment.unanswered.extend(event_from_dict(event.event) for event in events if event.actions is None)
    # As after a continue, which has the search of a single trial begin anew.
    if not events and experiment.alive:
        experiment.pending.append(Started())


def _allocation(service: ServiceState, row: models.Allocation, before: LiveAllocation | None) -> None:
    trial = service.live.trials.get(row.trial_id)
    if trial is None:
        return
    allocation = LiveAllocation(
        row,
        trial,
        Launch.from_facts(row.facts),
        is_preempted=row.preempt_time is not None,
        idle=_may_be_idle(trial) if before is None else before.idle,
    )
    trial.allocation = service.live.allocations[row.id] = allocation
    # Its poll may have begun on the state before.
    service.subscriptions.publish(("allocation", row.id))


def _may_be_idle(trial: LiveTrial) -> bool:
    """Return whether an earlier master may have answered a trial's allocation that nothing is left to do.

    It died before the acknowledgement, and such answers are not recorded. It cannot have given one for a trial whose
    first operation is still its only one, and is not done.
    """
    return len(trial.operations) > 1 or trial.completed


async def resume(service: ServiceState) -> None:
    """Take up what an earlier master did not finish: validations that no search has seen, deletions, deadlines."""
    await service.actor.refresh()
    for trial in list(service.live.trials.values()):
        if trial.row.early_exit is not None and trial.allocation is not None:
            _operations.watch_exit(service, trial.id, trial.allocation.id)
        if _facts.goes_by_validations(trial):
            await _facts.catch_up(service, trial)
    for allocation in list(service.live.allocations.values()):
        if allocation.row.kill_time is not None:
            service.runner.kill(allocation.id)
        elif allocation.row.preempt_time is not None:
            timeout = allocation.trial.experiment.spec.preemption_timeout
            # Bounded on both sides, as the clock may have been set meanwhile.
            left = allocation.row.preempt_time + timeout - _clock.now()
            service.runner.terminate(allocation.id, min(max(left, 0.0), timeout))
    due, deleting = await service.store.read(
        lambda session: (_retention.due(session), experiments.find(session, states=["DELETING"])[0])
    )
    for number in due:
        service.runner.retain(number)
    for row in deleting:
        service.runner.keep_running(partial(_retention.erase, service, row.id), f"deletion of experiment {row.id}")
    service.runner.keep_running(partial(_unmanaged.sweep, service), "unmanaged trials")

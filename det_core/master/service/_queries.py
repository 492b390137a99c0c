"""Reads of the master, experiments, searches, trials and metrics."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from sqlalchemy import select

from det_core import _clock
from det_core.config import Experiment
from det_core.master._errors import NotFound, WrongState
from det_core.master.scheduler import State
from det_core.master.service import _show
from det_core.master.service._access import experiment_row, no_experiment, no_task, no_trial, read_context
from det_core.master.service._search_workers import has_worker, recall
from det_core.master.store import experiments, models, searcher_events, series, trials, validations
from det_core.protocol.records import ExperimentView, MetricView, SearchView, TrialView

if TYPE_CHECKING:
    from sqlalchemy import Row
    from sqlalchemy.orm import Session

    from det_core.master.service._state import ServiceState
    from det_core.master.store import Store
    from det_core.master.store.validations import BestTrial

T = TypeVar("T")


class MasterView(TypedDict):
    """Description of the master."""

    cluster_id: str
    cluster_name: str
    version: str
    slots: list[int]
    slots_in_use: list[int]


def master(service: ServiceState) -> MasterView:
    """Return the description of the master."""
    in_use = {slot for allocation in service.live.allocations.values() for slot in allocation.row.slot_ids}
    return MasterView(
        cluster_id=service.settings.cluster_id,
        cluster_name=service.settings.cluster_name,
        version=service.settings.version,
        slots=list(service.engine.pool.slot_ids),
        slots_in_use=sorted(in_use),
    )


async def find_experiments(
    service: ServiceState,
    *,
    states: Sequence[str] = (),
    name: str | None = None,
    newest_first: bool = False,
    by_start: bool = False,
    limit: int | None = None,
    offset: int = 0,
) -> tuple[list[ExperimentView], int]:
    """Return experiments that match each filter given, and how many do without ``limit`` and ``offset``.

    Args:
        service: State of the service.
        states: Only those in one of these states; none for all.
        name: Only those whose name contains this text.
        newest_first: Whether to reverse the order.
        by_start: Whether to sort them by when they started. Defaults to their IDs.
        limit: Maximum number. Defaults to all.
        offset: Experiments to skip.
    """

    live = _show.snapshot_experiments(service)

    def look(session: Session) -> tuple[list[ExperimentView], int]:
        rows, total = experiments.find(
            session,
            states=list(states),
            name=name,
            newest_first=newest_first,
            by_start=by_start,
            limit=limit,
            offset=offset,
        )
        return _show.show_experiments(session, service, rows, live), total

    return await service.store.read(look)


async def experiment(service: ServiceState, experiment_id: int) -> ExperimentView:
    """Return one experiment."""
    row = await experiment_row(service, experiment_id)
    live = _show.snapshot_experiment(service, experiment_id)
    (view,) = await service.store.read(lambda session: _show.show_experiments(session, service, [row], live))
    return view


async def wait(service: ServiceState, experiment_id: int, timeout: float) -> ExperimentView:
    """Return an experiment once it has ended, or as it is after ``timeout`` seconds."""
    until = _clock.monotonic() + timeout
    while True:
        cursor = service.subscriptions.cursor
        view = await experiment(service, experiment_id)
        ended = view.end_time is not None and view.state != State.ACTIVE
        left = until - _clock.monotonic()
        if ended or left <= 0 or service.subscriptions.is_closed:
            return view
        await service.subscriptions.wait(("experiment", experiment_id), cursor, left)


async def find_trials(
    service: ServiceState,
    experiment_id: int,
    states: Sequence[str] = (),
    *,
    best_first: bool = False,
    limit: int | None = None,
    offset: int = 0,
) -> tuple[list[TrialView], int]:
    """Return trials of an experiment, and how many match without ``limit`` and ``offset``.

    Args:
        service: State of the service.
        experiment_id: Experiment.
        states: Only those that show one of these; none for all.
        best_first: Whether to sort them by their best validation, the best first. Defaults to their IDs.
        limit: Maximum number. Defaults to all.
        offset: Trials to skip.
    """
    row = await experiment_row(service, experiment_id)
    live = _show.snapshot_trials(service.live.experiments.get(experiment_id))
    order = validations.BY_ID
    if best_first:
        order = validations.best_first(Experiment(row.config).smaller_is_better)

    def look(session: Session) -> tuple[list[TrialView], int]:
        chosen = _show.in_states(states, live)
        page = select(models.Trial).where(models.Trial.experiment_id == experiment_id, chosen).order_by(*order)
        rows = session.scalars(page.limit(limit).offset(offset)).all()
        return list(_show.show_trials(session, row, rows, live)), trials.count(session, experiment_id, chosen)

    return await service.store.read(look)


async def trial(service: ServiceState, trial_id: int, *, summarize: bool = False) -> TrialView:
    """Return one trial; ``summarize``: with the summary of its metrics, for which all its rows are read."""
    live = service.live.trials.get(trial_id)
    snapshot = _show.NOT_LIVE if live is None else _show.snapshot_trial(live)

    def look(session: Session) -> TrialView:
        row = session.get(models.Trial, trial_id)
        if row is None:
            raise no_trial(trial_id)
        experiment = session.get(models.Experiment, row.experiment_id)
        if experiment is None:
            raise no_experiment(row.experiment_id)
        view = _show.show_trial(session, experiment, row, snapshot)
        if summarize:
            view = replace(view, summary_metrics=series.summaries(session, trial_id))
        return view

    if summarize:
        return await service.store.read_series(look)
    return await service.store.read(look)


async def best_trial(service: ServiceState, experiment_id: int) -> TrialView | None:
    """Return the trial with the best searched metric, or None."""
    best = await _best(service, await experiment_row(service, experiment_id))
    if best is None:
        return None
    return await trial(service, best.trial_id)


async def best_validation(service: ServiceState, experiment_id: int) -> float:
    """Return the best value of the searched metric."""
    row = await experiment_row(service, experiment_id)
    best = await _best(service, row)
    if best is None:
        raise NotFound(f"experiment {experiment_id} has no validation with {row.config['searcher']['metric']!r} yet")
    return best.value


async def _best(service: ServiceState, row: models.Experiment) -> BestTrial | None:
    best = await service.store.read(lambda session: _show.best_of(session, [row]))
    return best.get(row.id)


async def search(service: ServiceState, experiment_id: int) -> SearchView:
    """Return the state of a search; that of an ended experiment is replayed from its record."""
    row = await experiment_row(service, experiment_id)
    if row.unmanaged:
        raise WrongState(f"experiment {experiment_id} is unmanaged: it has no search")

    def look(session: Session) -> tuple[Sequence[Row[Any]], int, int, int]:
        found = trials.of_experiment(session, experiment_id)
        return (
            searcher_events.after(session, experiment_id),
            searcher_events.count(session, experiment_id),
            len(found),
            sum(trial.end_time is not None for trial in found),
        )

    events, count, requested, closed = await service.store.read(look)
    live = service.live.experiments.get(experiment_id)
    method = None if live is None else live.search
    spec = Experiment(row.config)
    progress = row.progress
    rungs: list[dict[str, Any]] = []
    if method is None and not has_worker(spec):
        method = await asyncio.to_thread(recall, spec, events)
    if method is not None:
        progress = method.progress()
        rungs = method.rungs()
    return SearchView(
        experiment_id=experiment_id,
        searcher=row.config["searcher"],
        progress=progress,
        rungs=rungs,
        events=count,
        trials_requested=requested,
        trials_closed=closed,
    )


async def context(service: ServiceState, experiment_id: int) -> bytes:
    """Return the context directory of an experiment as it was packed; empty if there was none."""
    row = await experiment_row(service, experiment_id)
    if row.context is None:
        return b""
    return await read_context(service, row.context) or b""


async def task_context(service: ServiceState, task_id: str) -> bytes:
    """Return the context directory of a task's experiment as it was packed."""
    row = await service.store.read(lambda session: trials.by_task_id(session, task_id))
    if row is None:
        raise no_task(task_id)
    return await context(service, row.experiment_id)


class MetricsReader:
    """Rows of metrics of some trials, read in parts, each from where the one before ended.

    Their IDs count them, in the order of trials, groups and steps.

    Args:
        store: Store to read.
        trial_ids: Trials.
        group: Metric group. Defaults to all.
        archived: Whether to include superseded rows.
    """

    def __init__(
        self, store: Store, trial_ids: Sequence[int], group: str | None = None, *, archived: bool = False
    ) -> None:
        self._store = store
        self._trial_ids = trial_ids
        self._group = group
        self._archived = archived
        self._left: deque[tuple[int, str]] | None = None
        self._cursor: series.Cursor | None = None
        self._number = 0

    async def read(self, limit: int) -> list[MetricView]:
        """Return the next rows, at least ``limit`` unless these are the last: those of one step stay together.

        Raises:
            NotFound: If one of the trials does not exist.
        """
        return await self.read_as(limit, list)

    async def read_as(self, limit: int, convert: Callable[[list[MetricView]], T]) -> T:
        """Return what ``convert`` makes of the next rows, called in the thread that reads them."""
        return await self._store.read_series(lambda session: convert(self._read(session, limit)))

    def _read(self, session: Session, limit: int) -> list[MetricView]:
        if self._left is None:
            self._left = deque(self._series_of_all(session))
        views: list[MetricView] = []
        while self._left and len(views) < limit:
            trial_id, group = self._left[0]
            missing = limit - len(views)
            rows = series.read(
                session, trial_id, group, superseded=self._archived, batches=True, after=self._cursor, limit=missing
            )
            for row in rows:
                self._number += 1
                views.append(_metric_view(self._number, trial_id, row))
            if len(rows) < missing:
                self._left.popleft()
                self._cursor = None
            else:
                self._cursor = rows[-1].cursor
        return views

    def _series_of_all(self, session: Session) -> Iterator[tuple[int, str]]:
        for trial_id in self._trial_ids:
            if session.get(models.Trial, trial_id) is None:
                raise no_trial(trial_id)
            groups = series.groups(session, trial_id)
            if self._group is not None:
                groups = [self._group]
            for name in groups:
                yield trial_id, name


def _metric_view(number: int, trial_id: int, row: series.MetricRow) -> MetricView:
    return MetricView(
        id=number,
        trial_id=trial_id,
        trial_run_id=row.run_id,
        group=row.group,
        total_batches=row.steps_completed,
        metrics=row.metrics,
        batch_metrics=row.batch_metrics,
        end_time=row.time,
        archived=row.superseded,
    )

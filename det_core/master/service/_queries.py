"""What people look up: experiments, trials, metrics, checkpoints, logs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from det_core import _clock
from det_core.config import Experiment
from det_core.master._errors import NotFound
from det_core.master.scheduler import State
from det_core.master.service import _show_experiments, _show_trials
from det_core.master.service._access import experiment_row, no_experiment, trial_row
from det_core.master.service._checkpoints import no_checkpoint
from det_core.master.service._views import CheckpointView, ExperimentView, LogPage, LogView, MetricView, TrialView
from det_core.master.store import checkpoints, experiments, logs, metrics, trials

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from det_core.master.service._hub import Hub
    from det_core.master.store.checkpoints import CheckpointRow
    from det_core.master.store.logs import LogRow


def find_experiments(
    conn: Connection,
    hub: Hub,
    states: Sequence[str],
    labels: Sequence[str],
    name: str | None,
    archived: bool | None,
    newest_first: bool,
    limit: int | None,
    offset: int,
) -> list[ExperimentView]:
    """Experiments that match each filter given."""
    rows = experiments.find(
        conn,
        states=list(states),
        labels=labels,
        name=name,
        archived=archived,
        newest_first=newest_first,
        limit=limit,
        offset=offset,
    )
    return _show_experiments.show(conn, rows, hub.live.experiments)


async def experiment(hub: Hub, experiment_id: int) -> ExperimentView:
    """One experiment."""
    row = await experiment_row(hub, experiment_id)
    (view,) = await hub.store.read(lambda conn: _show_experiments.show(conn, [row], hub.live.experiments))
    return view


async def wait(hub: Hub, experiment_id: int, timeout: float) -> ExperimentView:
    """An experiment once it has ended, or when the time is over."""
    until = _clock.monotonic() + timeout
    with hub.news.watch(("experiment", experiment_id)) as watch:
        while True:
            view = await experiment(hub, experiment_id)
            ended = view["end_time"] is not None and view["state"] != State.ACTIVE
            left = until - _clock.monotonic()
            if ended or left <= 0 or hub.news.stopped:
                return view
            await watch.wait(left)


async def find_trials(hub: Hub, experiment_id: int, states: Sequence[str]) -> list[TrialView]:
    """The trials of an experiment."""
    row = await experiment_row(hub, experiment_id)

    def look(conn: Connection) -> list[TrialView]:
        found = trials.of_experiment(conn, experiment_id)
        known = _show_trials.know(conn, row, found, summaries=False)
        spec = Experiment(row.config)
        return [_show_trials.show(t, spec, known, hub.live.trials.get(t.id)) for t in found]

    views = await hub.store.read(look)
    return [view for view in views if not states or view["state"] in states]


async def trial(hub: Hub, trial_id: int) -> TrialView:
    """One trial."""
    row = await trial_row(hub, trial_id)

    def look(conn: Connection) -> TrialView:
        of = experiments.get(conn, row.experiment_id)
        if of is None:
            raise no_experiment(row.experiment_id)
        known = _show_trials.know(conn, of, [row], summaries=True)
        return _show_trials.show(row, Experiment(of.config), known, hub.live.trials.get(row.id))

    return await hub.store.read(look)


async def best_trial(hub: Hub, experiment_id: int) -> TrialView | None:
    """The trial with the best searched metric."""
    row = await experiment_row(hub, experiment_id)
    best = await hub.store.read(lambda conn: _show_experiments.best_of(conn, row))
    return None if best is None else await trial(hub, best.trial_id)


async def best_validation(hub: Hub, experiment_id: int) -> float:
    """The best value of the searched metric."""
    row = await experiment_row(hub, experiment_id)
    best = await hub.store.read(lambda conn: _show_experiments.best_of(conn, row))
    if best is None:
        raise NotFound(f"experiment {experiment_id} has no validation with {row.config['searcher']['metric']!r} yet")
    return best.value


def find_metrics(
    conn: Connection, trial_ids: Sequence[int], group: str | None, after: int, limit: int | None, archived: bool
) -> list[MetricView]:
    """Rows of metrics; their ids count them, in the order of trials, groups and steps."""
    found: list[MetricView] = []
    number = 0
    for trial_id in trial_ids:
        if trials.get(conn, trial_id) is None:
            raise NotFound(f"there is no trial {trial_id}")
        for name in metrics.groups(conn, trial_id) if group is None else [group]:
            for row in metrics.series(conn, trial_id, name, superseded=archived, batches=True, limit=None):
                number += 1
                if number <= after:
                    continue
                if limit is not None and len(found) >= limit:
                    return found
                found.append(
                    MetricView(
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
                )
    return found


def checkpoints_of_experiment(conn: Connection, experiment_id: int) -> list[CheckpointView]:
    """The checkpoints of an experiment, newest first."""
    if experiments.get(conn, experiment_id) is None:
        raise no_experiment(experiment_id)
    return show_checkpoints(conn, checkpoints.of_experiment(conn, experiment_id))


def checkpoints_of_trial(conn: Connection, trial_id: int) -> list[CheckpointView]:
    """The checkpoints of a trial, newest first."""
    if trials.get(conn, trial_id) is None:
        raise NotFound(f"there is no trial {trial_id}")
    return show_checkpoints(conn, checkpoints.of_trial(conn, trial_id))


def checkpoint(conn: Connection, uuid: str) -> CheckpointView:
    """One checkpoint."""
    row = checkpoints.get(conn, uuid)
    if row is None:
        raise no_checkpoint(uuid)
    return show_checkpoints(conn, [row])[0]


def best_checkpoint(conn: Connection, experiment_id: int) -> CheckpointView | None:
    """Of the checkpoints whose files are all there, the one with the best searched metric; of equals the earliest."""
    row = experiments.get(conn, experiment_id)
    if row is None:
        raise no_experiment(experiment_id)
    sign = 1 if Experiment(row.config).smaller_is_better else -1
    found = show_checkpoints(conn, checkpoints.of_experiment(conn, experiment_id, states=[checkpoints.COMPLETED]))
    known = [(sign * v["searcher_metric"], v["report_time"], v) for v in found if v["searcher_metric"] is not None]
    real = [k for k in known if k[0] == k[0]]
    return min(real, key=lambda k: k[:2])[2] if real else None


def show_checkpoints(conn: Connection, rows: Sequence[CheckpointRow]) -> list[CheckpointView]:
    """Checkpoints with what is known of their trials."""
    of_trial = {number: trials.get(conn, number) for number in {row.trial_id for row in rows}}
    specs = {number: experiments.get(conn, number) for number in {row.experiment_id for row in rows}}
    series = {
        (number, group): {r.steps_completed: r for r in metrics.series(conn, number, group, limit=None)}
        for number in of_trial
        for group in ("training", "validation")
    }
    views = []
    for row in rows:
        trial_of, experiment_of = of_trial[row.trial_id], specs[row.experiment_id]
        assert trial_of is not None and experiment_of is not None
        training = series[row.trial_id, "training"].get(row.steps_completed)
        validation = series[row.trial_id, "validation"].get(row.steps_completed)
        name = Experiment(experiment_of.config).metric
        views.append(
            CheckpointView(
                uuid=row.uuid,
                task_id=row.task_id,
                allocation_id=row.allocation_id,
                storage_id=row.storage_id,
                state=row.state,
                metadata=row.metadata,
                resources=row.resources,
                size=row.size,
                steps_completed=row.steps_completed,
                report_time=row.report_time,
                trial_id=row.trial_id,
                experiment_id=row.experiment_id,
                experiment_config=experiment_of.config,
                hparams=trial_of.hparams,
                searcher_metric=None if validation is None else metrics.number(validation.metrics, name),
                training_metrics={} if training is None else training.metrics,
                validation_metrics={} if validation is None else validation.metrics,
            )
        )
    return views


async def log_page(hub: Hub, task_id: str, after: int, limit: int, wait_for: float) -> LogPage:
    """Lines of a task's log; waits for the first one, unless its trial has ended."""
    until = _clock.monotonic() + wait_for

    def look(conn: Connection) -> LogPage:
        row = trials.by_task_id(conn, task_id)
        if row is None:
            raise NotFound(f"there is no task {task_id}")
        found = logs.after(conn, task_id, after, limit=limit)
        return LogPage(lines=[_line(line) for line in found], ended=row.end_time is not None and len(found) < limit)

    with hub.news.watch(("log", task_id)) as watch:
        while True:
            page = await hub.store.read(look)
            left = until - _clock.monotonic()
            if page["lines"] or page["ended"] or left <= 0 or hub.news.stopped:
                return page
            await watch.wait(left)


def _line(row: LogRow) -> LogView:
    return LogView(
        id=row.id,
        task_id=row.task_id,
        allocation_id=row.allocation_id,
        rank=row.rank,
        timestamp=row.timestamp,
        level=row.level,
        stdtype=row.stdtype,
        source=row.source,
        log=row.log,
    )

"""What people look up: experiments, trials, metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from det_core import _clock
from det_core.config import Experiment
from det_core.master._errors import NotFound
from det_core.master.scheduler import State
from det_core.master.service import _show_experiments, _show_trials
from det_core.master.service._access import experiment_row, no_experiment, trial_row
from det_core.master.service._views import ExperimentView, MetricView, TrialView
from det_core.master.store import experiments, metrics, trials

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from det_core.master.service._hub import Hub


def find_experiments(
    conn: Connection,
    hub: Hub,
    states: Sequence[str],
    labels: Sequence[str],
    name: str | None,
    archived: bool | None,
    newest_first: bool,
    by_start: bool,
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
        by_start=by_start,
        limit=limit,
        offset=offset,
    )
    return _show_experiments.show(conn, hub, rows)


async def experiment(hub: Hub, experiment_id: int) -> ExperimentView:
    """One experiment."""
    row = await experiment_row(hub, experiment_id)
    (view,) = await hub.store.read(lambda conn: _show_experiments.show(conn, hub, [row]))
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

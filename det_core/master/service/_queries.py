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
from det_core.master.store import experiments, series, trials, validations

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from det_core.master.service._hub import Hub
    from det_core.master.store.experiments import ExperimentRow
    from det_core.master.store.validations import BestTrial


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


async def find_trials(
    hub: Hub,
    experiment_id: int,
    states: Sequence[str] = (),
    *,
    best_first: bool = False,
    limit: int | None = None,
    offset: int = 0,
) -> tuple[list[TrialView], int]:
    """Return trials of an experiment, and how many match without ``limit`` and ``offset``.

    Args:
        hub: Parts of the service.
        experiment_id: Experiment.
        states: Only those that show one of these; none for all.
        best_first: Whether to sort them by their best validation, the best first. Defaults to their IDs.
        limit: Maximum number. Defaults to all.
        offset: Trials to skip.
    """
    row = await experiment_row(hub, experiment_id)
    live = _show_trials.snapshots(hub.live.experiments.get(experiment_id))
    order = validations.best_first(Experiment(row.config).smaller_is_better) if best_first else validations.BY_ID

    def look(conn: Connection) -> tuple[list[TrialView], int]:
        chosen = _show_trials.in_states(states, live)
        rows = trials.page(conn, experiment_id, chosen, order, limit=limit, offset=offset)
        return list(_show_trials.show(conn, row, rows, live)), trials.count(conn, experiment_id, chosen)

    return await hub.store.read(look)


async def trial(hub: Hub, trial_id: int) -> TrialView:
    """Return one trial."""
    row = await trial_row(hub, trial_id)
    live = hub.live.trials.get(trial_id)
    snapshot = None if live is None else _show_trials.snapshot(live)

    def look(conn: Connection) -> TrialView:
        experiment = experiments.get(conn, row.experiment_id)
        if experiment is None:
            raise no_experiment(row.experiment_id)
        return _show_trials.show_one(conn, experiment, row, snapshot)

    return await hub.store.read(look)


async def best_trial(hub: Hub, experiment_id: int) -> TrialView | None:
    """Return the trial with the best searched metric, or None."""
    best = await _best(hub, await experiment_row(hub, experiment_id))
    return None if best is None else await trial(hub, best.trial_id)


async def best_validation(hub: Hub, experiment_id: int) -> float:
    """Return the best value of the searched metric."""
    row = await experiment_row(hub, experiment_id)
    best = await _best(hub, row)
    if best is None:
        raise NotFound(f"experiment {experiment_id} has no validation with {row.config['searcher']['metric']!r} yet")
    return best.value


async def _best(hub: Hub, row: ExperimentRow) -> BestTrial | None:
    best = await hub.store.read(lambda conn: _show_experiments.best_of(conn, [row]))
    return best.get(row.id)


def find_metrics(
    conn: Connection, trial_ids: Sequence[int], group: str | None, after: int, limit: int | None, archived: bool
) -> list[MetricView]:
    """Rows of metrics; their ids count them, in the order of trials, groups and steps."""
    found: list[MetricView] = []
    number = 0
    for trial_id in trial_ids:
        if trials.get(conn, trial_id) is None:
            raise NotFound(f"there is no trial {trial_id}")
        for name in series.groups(conn, trial_id) if group is None else [group]:
            for row in series.read(conn, trial_id, name, superseded=archived, batches=True, limit=None):
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

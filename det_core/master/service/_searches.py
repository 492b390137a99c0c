"""Searches as they are shown, and the files of their experiments."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from det_core.config import Experiment
from det_core.master._errors import WrongState
from det_core.master.service._access import experiment_row, no_task, read_context
from det_core.master.service._search_workers import has_worker, recall
from det_core.master.store import models, searcher_events, trials
from det_core.protocol.records import SearchView

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy.orm import Session

    from det_core.master.service._state import ServiceState


async def state(service: ServiceState, experiment_id: int) -> SearchView:
    """Return the state of a search; that of an ended experiment is replayed from its record."""
    row = await experiment_row(service, experiment_id)
    if row.unmanaged:
        raise WrongState(f"experiment {experiment_id} is unmanaged: it has no search")

    def look(session: Session) -> tuple[Sequence[models.SearcherEvent], int, int, int]:
        found = trials.of_experiment(session, experiment_id)
        return (
            searcher_events.after(session, experiment_id),
            searcher_events.count(session, experiment_id),
            len(found),
            sum(trial.end_time is not None for trial in found),
        )

    events, count, requested, closed = await service.store.read(look)
    live = service.live.experiments.get(experiment_id)
    search = None if live is None else live.search
    spec = Experiment(row.config)
    progress = row.progress
    rungs: list[dict[str, Any]] = []
    if search is None and not has_worker(spec):
        search = await asyncio.to_thread(recall, spec, events)
    if search is not None:
        progress = search.progress()
        rungs = search.rungs()
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

"""The logs of tasks, page by page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from det_core import _clock
from det_core.master.service._access import no_task, trial_row
from det_core.master.service._views import LogPage, LogView
from det_core.master.store import logs, trials

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from det_core.master.service._state import ServiceState
    from det_core.master.store.models import Log


async def page_of_trial(
    hub: ServiceState, trial_id: int, *, after: int = 0, limit: int = 1000, wait: float = 0.0
) -> LogPage:
    """Return lines of a trial's log, as :func:`page`."""
    row = await trial_row(hub, trial_id)
    return await page(hub, row.task_id, after=after, limit=limit, wait=wait)


async def page(hub: ServiceState, task_id: str, *, after: int = 0, limit: int = 1000, wait: float = 0.0) -> LogPage:
    """Return lines of a task's log.

    Args:
        hub: Parts of the service.
        task_id: Task.
        after: ID of the last line to skip.
        limit: Maximum number of lines.
        wait: Maximum wait for the first line in seconds, unless the trial has ended.
    """
    until = _clock.monotonic() + wait

    def look(conn: Session) -> LogPage:
        row = trials.by_task_id(conn, task_id)
        if row is None:
            raise no_task(task_id)
        found = logs.after(conn, task_id, after, limit=limit)
        return LogPage(lines=[_line(line) for line in found], ended=row.end_time is not None and len(found) < limit)

    while True:
        cursor = hub.subscriptions.cursor
        found = await hub.store.read(look)
        left = until - _clock.monotonic()
        if found["lines"] or found["ended"] or left <= 0 or hub.subscriptions.is_closed:
            return found
        await hub.subscriptions.wait(("log", task_id), cursor, left)


def _line(row: Log) -> LogView:
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

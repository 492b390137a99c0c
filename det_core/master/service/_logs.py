"""The logs of tasks, page by page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from det_core import _clock
from det_core.master._errors import NotFound
from det_core.master.service._views import LogPage, LogView
from det_core.master.store import logs, trials

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from det_core.master.service._hub import Hub
    from det_core.master.store.logs import LogRow


async def page(hub: Hub, task_id: str, after: int, limit: int, wait_for: float) -> LogPage:
    """Lines of a task's log; waits for the first one, unless its trial has ended."""
    until = _clock.monotonic() + wait_for

    def look(conn: Session) -> LogPage:
        row = trials.by_task_id(conn, task_id)
        if row is None:
            raise NotFound(f"there is no task {task_id}")
        found = logs.after(conn, task_id, after, limit=limit)
        return LogPage(lines=[_line(line) for line in found], ended=row.end_time is not None and len(found) < limit)

    while True:
        cursor = hub.subscriptions.cursor
        found = await hub.store.read(look)
        left = until - _clock.monotonic()
        if found["lines"] or found["ended"] or left <= 0 or hub.subscriptions.is_closed:
            return found
        await hub.subscriptions.wait(("log", task_id), cursor, left)


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

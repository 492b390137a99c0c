"""The logs of trials: read from their files, and appended to by the master and by ``POST /task/logs``."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from det_core import _clock
from det_core.errors import StoreError
from det_core.master._errors import Stopping
from det_core.master.engines import (
    EVERY_LINE,
    LineFilter,
    LogLine,
    Page,
    Position,
    TrialLog,
    append_lines,
)
from det_core.master.scheduler import State
from det_core.master.service._access import no_task, trial_row
from det_core.master.store import models, trials
from det_core.protocol.records import LogView

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from det_core.master.service._state import ServiceState
    from det_core.master.service._subscriptions import Cursor

POLL_INTERVAL = 0.2
"""Seconds between looks at the files of a log that is followed."""
SEARCH_TIMEOUT = 5.0
"""Seconds after which a search for lines that has found none yet is answered, for its reader to go on with it."""
ROW_INTERVAL = 1.0
"""Seconds between looks at whether its trial has ended, or runs anew; that is published, too."""
T = TypeVar("T")


@dataclass(frozen=True)
class LogQuery:
    """Choice of lines of a trial's log.

    Attributes:
        after: ID of a line; only newer ones. Empty: any.
        before: ID of a line; only older ones. Empty: any.
        since: Only lines that came at this time or later.
        until: Only lines that came before this time.
        tail: Only the last of all these, so many; None: all.
        choice: Which level and rank.
        follow: Whether to wait for more until the trial has ended.
    """

    after: str = ""
    before: str = ""
    since: float | None = None
    until: float | None = None
    tail: int | None = None
    choice: LineFilter = EVERY_LINE
    follow: bool = False


class LogReader:
    """Reads the chosen lines of a trial's log, page by page.

    Args:
        service: State of the service.
        row: The trial.
        query: The lines.

    Attributes:
        is_over: Whether no line follows those that were read.
    """

    def __init__(self, service: ServiceState, row: models.Trial, query: LogQuery) -> None:
        self.is_over = False
        self._service = service
        self._row = row
        self._row_time = _clock.monotonic()
        self._query = query
        self._begin: Position | None = None
        self._end: Position | None = None
        self._tail: Position | None = None
        """Where the search for the last lines has come to."""
        self._missing = query.tail or 0

    async def read(self, max_lines: int, timeout: float) -> list[LogView]:
        """Return the next lines, as many as one look at the files gives; wait for the first one if it is followed.

        Raises:
            NotFound: If the trial does not exist any more.
            Stopping: If the master stops.
            StoreError: If a file cannot be read.
        """
        began = _clock.monotonic()
        while True:
            cursor = self._service.subscriptions.cursor
            has_ended = self._row.end_time is not None  # before the look: what is written later is seen by the next one
            page = await _in_thread(self._service, self._service.log_readers, partial(self._read, max_lines))
            self.is_over = page.is_end and (has_ended or not self._query.follow)
            left = began + (timeout if page.is_end else SEARCH_TIMEOUT) - _clock.monotonic()
            if page.lines or self.is_over or left <= 0:
                return [_view(self._row, line_id, line) for line_id, line in page.lines]
            if page.is_end:
                await self._wait(cursor, min(left, POLL_INTERVAL))

    def _read(self, max_lines: int) -> Page:
        """Look at the files once."""
        log = TrialLog(self._service.settings.allocations, self._row.task_id, self._row.run_id)
        if self._begin is None:
            self._begin, self._end = _bounds(log, self._query)
            self._tail = self._end or log.end
        if self._missing > 0:
            self._look_for_tail(log)
            if self._missing > 0:
                return Page([], self._begin, is_end=False)
        page = log.read(self._begin, self._query.choice, end=self._end, max_lines=max_lines)
        self._begin = page.next
        return page

    def _look_for_tail(self, log: TrialLog) -> None:
        """Go back one step towards the line with which the last ones begin."""
        assert self._begin is not None and self._tail is not None
        found = log.tail(self._tail, self._missing, self._query.choice)
        self._missing -= found.count
        self._tail = found.begin
        begin = self._begin.latest(found.begin)
        if self._missing <= 0 or found.is_begin or begin != found.begin:
            self._missing = 0
            self._begin = begin

    async def _wait(self, cursor: Cursor, timeout: float) -> None:
        """Wait for a change of the trial or the time of another look; read its row if it may have changed."""
        has_changed = await self._service.subscriptions.wait(("log", self._row.task_id), cursor, timeout)
        if has_changed or _clock.monotonic() - self._row_time > ROW_INTERVAL:
            self._row_time = _clock.monotonic()
            self._row = await trial_row(self._service, self._row.id)


async def open_log(
    service: ServiceState, query: LogQuery, *, trial_id: int | None = None, task_id: str = ""
) -> LogReader:
    """Return a reader of the log of a trial, by its ID or that of its task.

    Raises:
        NotFound: If it does not exist.
    """
    row = await (_task_row(service, task_id) if trial_id is None else trial_row(service, trial_id))
    return LogReader(service, row, query)


async def _task_row(service: ServiceState, task_id: str) -> models.Trial:
    row = await service.store.read(lambda session: trials.by_task_id(session, task_id))
    if row is None:
        raise no_task(task_id)
    return row


async def append_sent(service: ServiceState, lines: Sequence[tuple[str, LogLine]]) -> None:
    """Append lines that were sent, each with the task it belongs to, to the logs of the tasks' newest runs.

    Those of tasks that do not exist, or whose experiment is deleted, are dropped.

    Raises:
        StoreError: If they cannot be written.
    """
    by_task: dict[str, list[LogLine]] = defaultdict(list)
    for task_id, line in lines:
        by_task[task_id].append(line)
    await _append(service, "task", by_task)


async def append_own(service: ServiceState, task_id: str, line: LogLine) -> None:
    """Append a line of the master's own to the log of a task's newest run; see :func:`append_sent`."""
    await _append(service, "master", {task_id: [line]})


async def _append(service: ServiceState, writer: str, lines: Mapping[str, Sequence[LogLine]]) -> None:
    def find(session: Session) -> list[models.Trial]:
        rows = [trials.by_task_id(session, task_id) for task_id in lines]
        return [row for row in rows if row is not None and not _is_deleted(session, row)]

    def write(rows: Sequence[models.Trial]) -> None:
        for row in rows:
            append_lines(service.settings.allocations, f"{row.task_id}.{row.run_id}", writer, lines[row.task_id])

    rows = await service.store.read(find)
    await _in_thread(service, service.log_writer, partial(write, rows))
    service.subscriptions.publish(*(("log", row.task_id) for row in rows))


def _is_deleted(session: Session, row: models.Trial) -> bool:
    experiment = session.get(models.Experiment, row.experiment_id)
    return experiment is None or experiment.state in (State.DELETING, State.DELETED)


async def _in_thread(service: ServiceState, threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    if service.subscriptions.is_closed:
        raise Stopping("the master is about to stop")
    try:
        return await asyncio.get_running_loop().run_in_executor(threads, work)
    except OSError as e:
        raise StoreError(f"cannot access the logs in {service.settings.allocations}: {e}") from e


def _bounds(log: TrialLog, query: LogQuery) -> tuple[Position, Position | None]:
    """Return where the lines of a query begin and end; the end is None where the log goes on."""
    begin = Position()
    if query.after:
        begin = log.after(query.after)
    if query.since is not None:
        begin = begin.latest(log.at(query.since))
    end = None
    if query.before:
        end = log.before(query.before)
    if query.until is not None:
        until = log.at(query.until)
        end = until if end is None else end.earliest(until)
    return begin, end


def _view(row: models.Trial, line_id: str, line: LogLine) -> LogView:
    return LogView(
        id=line_id,
        task_id=row.task_id,
        allocation_id=line.allocation_id,
        rank=line.rank,
        timestamp=line.time,
        level=line.level or "INFO",
        stdtype=line.stream,
        source=line.source,
        log=line.text + line.end,
    )

"""The logs of trials: read from their files, and appended to by the master and by ``POST /task/logs``."""

from __future__ import annotations

import asyncio
import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from sqlalchemy import select

from det_core import _clock
from det_core.errors import StoreError
from det_core.master._errors import Stopping
from det_core.master.engines import (
    EVERY_LINE,
    POSITION_PATTERN,
    LineFilter,
    LogLine,
    PlacedLine,
    Position,
    TrialLog,
    append_lines,
)
from det_core.master.scheduler import State
from det_core.master.service._access import experiment_row, no_task, no_trial
from det_core.master.store import models, trials
from det_core.protocol.records import LogView

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import ColumnElement
    from sqlalchemy.orm import Session

    from det_core.master.service._state import ServiceState

CURSOR_PATTERN = rf"^[0-9]{{1,11}}\.[0-9]{{6}}(,[0-9]{{1,10}}:{POSITION_PATTERN})*$"
POLL_INTERVAL = 0.2
"""Seconds between looks at the files of logs that are followed."""
LOOK_TIME = 0.2
"""Seconds after which a look ends, as others wait for its thread."""
SEARCH_TIMEOUT = 5.0
"""Seconds after which a search for lines that has found none yet is answered, for its reader to go on with it."""
ROW_INTERVAL = 1.0
"""Seconds between looks at which trials there are, and which have ended; that is published, too."""
LATE_LINES_TIMEOUT = 60.0
"""Seconds after the end of a trial in which lines may still be sent."""
MAX_CHARS = 256 << 10
"""Characters of lines after which a look ends."""
BUFFER_LINES = 200
"""Lines of one trial that are read at a time, to be merged with those of others."""
T = TypeVar("T")


@dataclass(frozen=True)
class LogCursor:
    """Place in the logs of an experiment's trials, at which a later query goes on.

    Attributes:
        time: Time of a look, before which all was written that was read of the trials without a place.
        places: Places in the logs of trials, by ID.
    """

    time: float
    places: Mapping[int, Position]

    @classmethod
    def from_text(cls, text: str) -> LogCursor:
        """Return the cursor with a text, which has the form of :data:`CURSOR_PATTERN`."""
        time, *places = text.split(",")
        pairs = (place.split(":") for place in places)
        return cls(float(time), {int(trial_id): Position.from_text(place) for trial_id, place in pairs})

    def __str__(self) -> str:
        places = [f"{trial_id}:{place.to_text()}" for trial_id, place in self.places.items()]
        return ",".join([f"{self.time:.6f}", *places])


@dataclass(frozen=True)
class LogQuery:
    """Choice of lines of a log.

    Attributes:
        after: ID of a line of the trial; only newer ones. Empty: any.
        cursor: Cursor of the trials of an experiment; only what comes behind it. None: any.
        before: ID of a line of the trial; only older ones. Empty: any.
        tail: Only the last of all these, so many; None: all.
        choice: Which level and rank.
        follow: Whether to wait for more until the trial, or the experiment, has ended.
    """

    after: str = ""
    cursor: LogCursor | None = None
    before: str = ""
    tail: int | None = None
    choice: LineFilter = EVERY_LINE
    follow: bool = False


class _Trial(NamedTuple):
    id: int
    task_id: str
    run_id: int
    unmanaged: bool
    start_time: float
    end_time: float | None


class LogReader:
    """Reads the chosen lines of the logs of a trial, or of all trials of an experiment merged by time, part by part.

    Args:
        service: State of the service.
        query: The lines.
        chosen: Condition that chooses the trials.
        experiment_id: Experiment whose trials they all are; None for a single trial.

    Attributes:
        is_over: Whether no line follows those that were read.
        is_followed: Whether the query waits for more lines.
    """

    def __init__(
        self, service: ServiceState, query: LogQuery, chosen: ColumnElement[bool], experiment_id: int | None = None
    ) -> None:
        self.is_over = False
        self.is_followed = query.follow
        self._service = service
        self._query = query
        self._experiment_id = experiment_id
        self._rows = select(*(getattr(models.Trial, name) for name in _Trial._fields)).where(chosen)
        self._sources: dict[int, _Source] = {}
        self._has_ended = False
        self._rows_time = 0.0
        self._look_time = _clock.now()
        # Before the first look, so that no change after it is missed.
        self._last_change = service.subscriptions.cursor
        self._lines_to_skip: int | None = None if query.tail else 0
        """Lines before the last ones; None until the last ones of each trial are found."""

    async def read(self, max_lines: int, timeout: float) -> list[LogView]:
        """Return the next lines, as many as one look at the files gives; wait for the first one if they are followed.

        Raises:
            NotFound: If the experiment does not exist any more.
            Stopping: If the master stops.
            StoreError: If a file cannot be read.
        """
        began = _clock.monotonic()
        while True:
            has_ended = self._has_ended  # before the look: what is written later is seen by the next one
            self._look_time = _clock.now()
            lines = await _in_thread(self._service, self._service.log_readers, partial(self._look, max_lines))
            is_end = all(source.is_drained for source in self._sources.values())
            self.is_over = is_end and (has_ended or not self.is_followed)
            left = began + (timeout if is_end else SEARCH_TIMEOUT) - _clock.monotonic()
            if lines or self.is_over or left <= 0:
                return lines
            if is_end:
                await self._wait(min(left, POLL_INTERVAL))

    @property
    def cursor(self) -> LogCursor:
        """The place behind the lines that were read from the trials of an experiment."""
        places = {}
        for trial_id, source in self._sources.items():
            may_write = self._is_running(source) or (source.row.unmanaged and source.row.end_time is None)
            # The others need no place: nothing of theirs is newer than the look.
            if may_write or not source.is_drained or source.time >= self._look_time:
                places[trial_id] = source.position
        return LogCursor(self._look_time, places)

    def _look(self, max_lines: int) -> list[LogView]:
        """Look at the files once."""
        deadline = _clock.monotonic() + LOOK_TIME
        for source in self._sources.values():
            source.open(self._query)
        if self._lines_to_skip is None and not self._find_tails(deadline):
            return []
        assert self._lines_to_skip is not None
        lines: list[LogView] = []
        chars = 0
        # A trial whose lines are not known yet comes at the time from which on it can have some.
        following = [(source.time, trial_id) for trial_id, source in self._sources.items() if not source.is_drained]
        heapq.heapify(following)
        while following and len(lines) < max_lines and chars < MAX_CHARS and _clock.monotonic() < deadline:
            trial_id = following[0][1]
            source = self._sources[trial_id]
            # Its next line is wanted only now: few trials of many are read at a time.
            if not source.lines:
                source.fill(self._query.choice, max_lines if len(self._sources) == 1 else BUFFER_LINES)
            elif self._lines_to_skip:
                self._lines_to_skip -= 1
                source.take()
            else:
                placed = source.take()
                lines.append(_view(source.row, placed.id, placed.line))
                chars += len(placed.line.text)
            if source.is_drained:
                heapq.heappop(following)
            else:
                heapq.heapreplace(following, (source.time, trial_id))
        return lines

    def _find_tails(self, deadline: float) -> bool:
        """Go back towards the last lines of each trial; return whether all are found."""
        assert self._query.tail is not None
        count = 0
        for source in self._sources.values():
            while not source.find_tail(self._query.tail, self._query.choice):
                if _clock.monotonic() > deadline:
                    return False
            count += source.tail_lines
        self._lines_to_skip = max(count - self._query.tail, 0)
        return True

    async def _wait(self, timeout: float) -> None:
        """Wait for the time of another look, and find out which trials may have new lines then."""
        subscriptions = self._service.subscriptions
        if self._experiment_id is None:
            (source,) = self._sources.values()
            await subscriptions.wait(("log", source.row.task_id), self._last_change, timeout)
        else:
            await asyncio.sleep(timeout)
        # Of a thousand trials only those are looked at that may have written.
        changes = subscriptions.since(self._last_change)
        self._last_change = subscriptions.cursor
        topics = set(changes or ())
        if changes != [] or _clock.monotonic() - self._rows_time > ROW_INTERVAL:
            await self.update()
        for source in self._sources.values():
            has_changed = {("trial", source.row.id), ("log", source.row.task_id)} & topics
            if changes is None or has_changed or self._has_ended or self._is_running(source):
                source.is_end = False

    async def update(self) -> int:
        """Find out which trials there are; return their number.

        Raises:
            NotFound: If the experiment does not exist.
        """
        self._rows_time = _clock.monotonic()
        rows = await self._service.store.read(lambda session: session.execute(self._rows).all())
        for row in (_Trial(*row) for row in rows):
            self._sources.setdefault(row.id, _Source(row, self._service.settings.allocations)).row = row
        if self._experiment_id is None:
            self._has_ended = all(row.end_time is not None for row in rows)
        else:
            self._has_ended = (await experiment_row(self._service, self._experiment_id)).end_time is not None
        return len(rows)

    def _is_running(self, source: _Source) -> bool:
        trial = self._service.live.trials.get(source.row.id)
        return trial is not None and trial.allocation is not None


class _Source:
    """The log of one trial, as far as it was read.

    Attributes:
        row: The trial.
        lines: Lines that were read from the files and not yet taken.
        is_end: Whether nothing follows these, as of the last look.
        time: When its next line was written; if there is none yet, the time of the last one or of the trial's start.
        tail_lines: Number of its last lines, once they are found.
    """

    def __init__(self, row: _Trial, allocations: Path) -> None:
        self.row = row
        self.lines: deque[PlacedLine] = deque()
        self.is_end = False
        self.time = row.start_time
        self.tail_lines = 0
        self._allocations = allocations
        self._is_open = False
        self._begin = Position()
        self._end: Position | None = None
        self._tail: Position | None = None
        self._has_tail = False

    @property
    def is_drained(self) -> bool:
        """Whether nothing follows what was taken."""
        return self.is_end and not self.lines

    @property
    def position(self) -> Position:
        """Place behind what was taken."""
        return Position.from_text(self.lines[0].id) if self.lines else self._begin

    @property
    def _log(self) -> TrialLog:
        return TrialLog(self._allocations, self.row.task_id, self.row.run_id)

    def open(self, query: LogQuery) -> None:
        """Find where the lines of a query begin and end, if that is not done."""
        if self._is_open:
            return
        self._is_open = True
        if query.after:
            self._begin = self._log.after(query.after)
        elif query.cursor is not None:
            self._begin = self._place_of(query.cursor)
        if query.before:
            self._end = Position.from_text(query.before)

    def _place_of(self, cursor: LogCursor) -> Position:
        if self.row.id in cursor.places:
            return cursor.places[self.row.id]
        if self.row.end_time is not None and self.row.end_time < cursor.time - LATE_LINES_TIMEOUT:
            return Position(self.row.run_id + 1)  # nothing was written since, so its files need no look
        return self._log.at(cursor.time)

    def fill(self, choice: LineFilter, max_lines: int) -> None:
        """Read the next lines."""
        page = self._log.read(self._begin, choice, end=self._end, max_lines=max_lines)
        self._begin = page.next
        self.is_end = page.is_end
        self.lines.extend(page.lines)
        self._set_time()

    def take(self) -> PlacedLine:
        """Remove and return the next line."""
        line = self.lines.popleft()
        self._set_time()
        return line

    def find_tail(self, count: int, choice: LineFilter) -> bool:
        """Go back one step towards the line with which the last ones begin; return whether it is found."""
        if self._has_tail:
            return True
        log = self._log
        found = log.tail(self._tail or self._end or log.end, count - self.tail_lines, choice)
        self.tail_lines += found.count
        self._tail = found.begin
        begin = self._begin.latest(found.begin)
        if self.tail_lines >= count or found.is_begin or begin != found.begin:
            self._has_tail = True
            self._begin = begin
        return self._has_tail

    def _set_time(self) -> None:
        if self.lines:
            self.time = self.lines[0].time


async def open_log(
    service: ServiceState,
    query: LogQuery,
    *,
    trial_id: int | None = None,
    task_id: str = "",
    experiment_id: int | None = None,
) -> LogReader:
    """Return a reader of the log of a trial, by its ID or that of its task, or of all trials of an experiment.

    Raises:
        NotFound: If it does not exist.
    """
    if experiment_id is not None:
        reader = LogReader(service, query, models.Trial.experiment_id == experiment_id, experiment_id)
    elif trial_id is not None:
        reader = LogReader(service, query, models.Trial.id == trial_id)
    else:
        reader = LogReader(service, query, models.Trial.task_id == task_id)
    if not await reader.update() and experiment_id is None:
        raise no_task(task_id) if trial_id is None else no_trial(trial_id)
    return reader


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
        # A line for a deleted experiment would make its folder again.
        rows = [trials.by_task_id(session, task_id) for task_id in lines]
        return [row for row in rows if row is not None and not _is_deleted(session, row)]

    def write(rows: Sequence[models.Trial]) -> None:
        for row in rows:
            append_lines(service.settings.allocations, f"{row.task_id}.{row.run_id}", writer, lines[row.task_id])

    rows = await service.store.read(find)
    # One thread, as two writers of a file would tear each other's segments.
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


def _view(row: _Trial, line_id: str, line: LogLine) -> LogView:
    return LogView(
        id=line_id,
        trial_id=row.id,
        task_id=row.task_id,
        allocation_id=line.allocation_id,
        rank=line.rank,
        timestamp=line.time,
        level=line.level or "INFO",
        stdtype=line.stream,
        source=line.source,
        log=line.text + line.end,
    )

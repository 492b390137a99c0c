"""Routes of logs: lines in, and lines out, which may be followed (rows 27 and 28 of §4; §7)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, Field

from det_core import _clock
from det_core.master._errors import NotFound, Stopping
from det_core.master.api import _shapes as shapes
from det_core.master.api._auth import Caller
from det_core.master.api._routing import Routes, TheCaller, ThePendingRequests, TheService
from det_core.master.api._types import INT32, INT64, LINES, NDJSON, Body, Int64, Timestamp, TrialId, done, encode_line
from det_core.master.engines import ID_PATTERN, LineFilter, LogLine
from det_core.master.service._logs import LogQuery, append_sent, open_log

if TYPE_CHECKING:
    from det_core.master.api._routing import PendingRequests
    from det_core.master.service._logs import LogReader
    from det_core.protocol.records import LogView

routes = Routes("logs")
plain_routes = Routes("logs", prefix="")
MAX_LOG_LINES = 1000
"""Log lines read at a time."""
BLANK_LINE_INTERVAL = 15.0
"""Seconds without a line after which a log that is followed sends a blank one, so that nobody takes it for dead."""


class LogParameters(BaseModel):
    """Which lines of a log to send."""

    follow: bool = Field(False, description="Whether to go on until the trial has ended.")
    after: str = Field("", pattern=ID_PATTERN + "|^$", description="ID of a line: only newer ones.")
    before: str = Field("", pattern=ID_PATTERN + "|^$", description="ID of a line: only older ones.")
    since: Timestamp | None = Field(None, description="Only lines that came at this time or later.")
    until: Timestamp | None = Field(None, description="Only lines that came before this time.")
    tail: int | None = Field(None, ge=1, le=INT32, description="Only the last of all these.")
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] | None = Field(None, description="Lowest level.")
    rank: int | None = Field(None, ge=0, le=999_999_999, description="Only lines that begin with this rank.")
    limit: int = Field(0, ge=0, le=INT32, description="At most so many; 0: all.")

    def to_query(self) -> LogQuery:
        """Return the query of the service."""
        return LogQuery(
            after=self.after,
            before=self.before,
            since=self.since,
            until=self.until,
            tail=self.tail,
            choice=LineFilter(self.level, self.rank),
            follow=self.follow,
        )


@routes.trial.get("/trials/{trial_id}/logs", response_class=StreamingResponse, responses=LINES)
async def trial_logs(
    request: Request,
    trial_id: TrialId,
    service: TheService,
    pending: ThePendingRequests,
    parameters: Annotated[LogParameters, Query()],
) -> Response:
    """The log of a trial, a JSON object a line; with ``follow`` it goes on until the trial has ended."""
    reader = await open_log(service, parameters.to_query(), trial_id=trial_id)
    return await _send_log(request, pending, reader, parameters)


@routes.trial.get("/tasks/{task_id}/logs", response_class=StreamingResponse, responses=LINES)
async def task_logs(
    request: Request,
    task_id: str,
    service: TheService,
    pending: ThePendingRequests,
    parameters: Annotated[LogParameters, Query()],
) -> Response:
    """The log of a task, as that of a trial."""
    reader = await open_log(service, parameters.to_query(), task_id=task_id)
    return await _send_log(request, pending, reader, parameters)


async def _send_log(
    request: Request, pending: PendingRequests, reader: LogReader, parameters: LogParameters
) -> Response:
    request.state.is_followed = parameters.follow
    limit = parameters.limit or INT64

    async def read(most: int, timeout: float) -> list[LogView]:
        return await pending.wait(reader.read(min(most, MAX_LOG_LINES), timeout))

    first = await read(limit, 0.0)

    async def send() -> AsyncIterator[bytes]:
        """Yield the lines; end early, without an error, when the server stops, or they are deleted meanwhile."""
        nonlocal first
        left = limit
        lines = first
        first = []
        try:
            while True:
                left -= len(lines)
                text = b"".join(encode_line(shapes.log_line(line)) for line in lines)
                lines = []  # not kept while a slow reader takes them
                yield text
                if reader.is_over or left <= 0:
                    return
                lines = await read(left, BLANK_LINE_INTERVAL)
                if not lines and not reader.is_over:
                    yield b"\n"
        except (Stopping, NotFound):
            return

    return StreamingResponse(send(), media_type=NDJSON)


class TaskLog(Body):
    """One line of a log; without a time it is that of its arrival. ``rank`` is what some clients call ``rank_id``."""

    task_id: str
    allocation_id: str | None = None
    rank_id: Int64 | None = None
    rank: Int64 | None = None
    timestamp: Timestamp | None = None
    level: str = "LOG_LEVEL_INFO"
    stdtype: str = "stdout"
    source: str = "task"
    log: str = ""


class TaskLogsRequest(Body):
    """Lines of a log, in order."""

    logs: list[TaskLog] = Field(default_factory=list)


@routes.trial.post("/task/logs")
async def take_logs(body: TaskLogsRequest, service: TheService, caller: TheCaller) -> Response:
    """Take log lines."""
    await _take(body.logs, service, caller)
    return done()


@plain_routes.trial.post("/task-logs")
async def take_plain_logs(body: list[TaskLog], service: TheService, caller: TheCaller) -> Response:
    """Take log lines, in the form of clients that no master started."""
    await _take(body, service, caller)
    return done()


async def _take(lines: Sequence[TaskLog], service: TheService, caller: Caller) -> None:
    for task_id in {line.task_id for line in lines}:
        caller.check(task_id=task_id)
    for allocation_id in {line.allocation_id for line in lines if line.allocation_id is not None}:
        caller.check(allocation_id=allocation_id)
    arrived = _clock.now()
    await append_sent(service, [(line.task_id, _to_line(line, arrived)) for line in lines])


def _to_line(line: TaskLog, arrived: float) -> LogLine:
    return LogLine(
        time=line.timestamp if line.timestamp is not None else arrived,
        stream=line.stdtype or "stdout",
        rank=line.rank_id if line.rank_id is not None else line.rank,
        level=line.level.removeprefix("LOG_LEVEL_") or None,
        text=line.log,
        source=line.source or "task",
        allocation_id=line.allocation_id,
    )

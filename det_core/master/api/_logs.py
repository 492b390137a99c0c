"""Routes of logs: lines in, and lines out, which may be followed (rows 27 and 28 of §4; §7)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, Field

from det_core import _clock
from det_core.master._errors import Invalid, NotFound, Stopping
from det_core.master.api._auth import Caller
from det_core.master.api._routing import Routes, TheCaller, TheService
from det_core.master.api._types import (
    IN_BODY,
    INT32,
    INT64,
    LINES,
    NDJSON,
    Body,
    ExperimentId,
    Int64,
    Timestamp,
    TrialId,
    done,
    encode_line,
)
from det_core.master.engines import ID_PATTERN, LineFilter, LogLine
from det_core.master.service._logs import CURSOR_PATTERN, LogCursor, LogQuery, append_sent, open_log
from det_core.protocol.wire import encode

if TYPE_CHECKING:
    from det_core.master.service import ServiceState
    from det_core.master.service._logs import LogReader

routes = Routes("logs")
plain_routes = Routes("logs", prefix="")
MAX_LOG_LINES = 1000
"""Log lines read at a time."""
BLANK_LINE_INTERVAL = 15.0
"""Seconds without a line after which a log that is followed sends a blank one, so that nobody takes it for dead."""


class LineParameters(BaseModel):
    """Which lines to send, and whether to go on with new ones."""

    follow: bool = Field(False, description="Whether to go on until the trial, or the experiment, has ended.")
    tail: int | None = Field(None, ge=1, le=INT32, description="Only the last of all these.")
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] | None = Field(None, description="Lowest level.")
    rank: int | None = Field(None, ge=0, le=999_999_999, description="Only lines that begin with this rank.")

    def to_query(self) -> LogQuery:
        """Return the query of the service."""
        return LogQuery(tail=self.tail, choice=LineFilter(self.level, self.rank), follow=self.follow)


class TrialLogParameters(LineParameters):
    """Which lines of a trial's log to send."""

    after: str = Field("", pattern=ID_PATTERN + "|^$", description="ID of a line: only newer ones.")
    before: str = Field("", pattern=ID_PATTERN + "|^$", description="ID of a line: only older ones.")
    limit: int = Field(0, ge=0, le=INT32, description="At most so many; 0: all.")

    def to_query(self) -> LogQuery:
        """Return the query of the service."""
        return replace(super().to_query(), after=self.after, before=self.before)


class ExperimentLogParameters(LineParameters):
    """Which lines of the logs of an experiment's trials to send."""

    after: str = Field("", pattern=CURSOR_PATTERN + "|^$", description="A cursor: only what comes behind it.")

    def to_query(self) -> LogQuery:
        """Return the query of the service."""
        if self.after and self.tail is not None:
            raise Invalid("after and tail exclude each other for the trials of an experiment")
        return replace(super().to_query(), cursor=LogCursor.from_text(self.after) if self.after else None)


@routes.trial.get("/trials/{trial_id}/logs", response_class=StreamingResponse, responses=LINES)
async def trial_logs(
    request: Request,
    trial_id: TrialId,
    service: TheService,
    parameters: Annotated[TrialLogParameters, Query()],
) -> Response:
    """Send the log of a trial, a JSON object a line; with ``follow`` it goes on until the trial has ended."""
    reader = await open_log(service, parameters.to_query(), trial_id=trial_id)
    return await _send_log(request, reader, parameters.limit)


@routes.trial.get("/tasks/{task_id}/logs", response_class=StreamingResponse, responses=LINES)
async def task_logs(
    request: Request,
    task_id: str,
    service: TheService,
    parameters: Annotated[TrialLogParameters, Query()],
) -> Response:
    """Send the log of a task, as that of a trial."""
    reader = await open_log(service, parameters.to_query(), task_id=task_id)
    return await _send_log(request, reader, parameters.limit)


@routes.trial.get("/experiments/{experiment_id}/logs", response_class=StreamingResponse, responses=LINES)
async def experiment_logs(
    request: Request,
    experiment_id: ExperimentId,
    service: TheService,
    parameters: Annotated[ExperimentLogParameters, Query()],
) -> Response:
    """Send the logs of all trials of an experiment, merged by time; the last line of each part has a ``cursor``."""
    reader = await open_log(service, parameters.to_query(), experiment_id=experiment_id)
    return await _send_log(request, reader, has_cursor=True)


async def _send_log(request: Request, reader: LogReader, limit: int = 0, *, has_cursor: bool = False) -> Response:
    # So that the limits let a reader of it take nothing for long.
    request.state.is_followed = reader.is_followed
    left = limit or INT64

    async def read(timeout: float) -> bytes:
        """Return the next lines; blank if there are none yet."""
        nonlocal left
        lines = await reader.read(min(left, MAX_LOG_LINES), timeout)
        left -= len(lines)
        shapes = [{**encode(line), "message": line.log} for line in lines]
        if shapes and has_cursor:
            shapes[-1]["cursor"] = str(reader.cursor)
        return b"".join(map(encode_line, shapes))

    # Before the answer begins, as an error then has a status of its own.
    first = await read(0.0)
    if left <= 0 or reader.is_over:
        return Response(first, media_type=NDJSON)  # without the task that a stream starts

    async def send() -> AsyncIterator[bytes]:
        """Yield the lines; end early, without an error, when the server stops, or they are deleted meanwhile."""
        nonlocal first
        text = first
        first = b""
        with suppress(Stopping, NotFound):
            yield text
            while left > 0 and not reader.is_over:
                text = b""  # not kept while the next lines are read
                text = await read(BLANK_LINE_INTERVAL)
                if text or not reader.is_over:
                    yield text or b"\n"

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


@routes.trial.post("/task/logs")
async def take_logs(logs: Annotated[list[TaskLog], IN_BODY], service: TheService, caller: TheCaller) -> Response:
    """Take log lines."""
    return await _take(logs, service, caller)


@plain_routes.trial.post("/task-logs")
async def take_plain_logs(logs: list[TaskLog], service: TheService, caller: TheCaller) -> Response:
    """Take log lines, in the form of clients that no master started."""
    return await _take(logs, service, caller)


async def _take(lines: Sequence[TaskLog], service: ServiceState, caller: Caller) -> Response:
    # The path names no object: a trial may write to its own log alone.
    for task_id in {line.task_id for line in lines}:
        caller.check(task_id=task_id)
    for allocation_id in {line.allocation_id for line in lines if line.allocation_id is not None}:
        caller.check(allocation_id=allocation_id)
    arrived = _clock.now()
    await append_sent(service, [(line.task_id, _to_line(line, arrived)) for line in lines])
    return done()


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

"""Routes that answer line by line: logs, which may be followed, and metrics (§7.1, §10)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, Field

from det_core._json import dump
from det_core.master._errors import NotFound, Stopping
from det_core.master.api import _shapes as shapes
from det_core.master.api._routing import Routes, TheCaller, ThePendingRequests, TheService, end_of_route
from det_core.master.api._types import INT32, INT64, Id, Timestamp, TrialId
from det_core.master.engines import ID_PATTERN, LineFilter
from det_core.master.service import _queries
from det_core.master.service._logs import LogQuery, open_log
from det_core.protocol.wire import encode

if TYPE_CHECKING:
    from det_core.master.api._routing import PendingRequests
    from det_core.master.service._logs import LogReader
    from det_core.master.service._queries import MetricsReader
    from det_core.protocol.records import LogView, MetricView

routes = Routes("streams")
MAX_ROWS = 1000
"""Metrics rows read from the store at a time."""
MAX_LOG_LINES = 1000
"""Log lines read at a time."""
BLANK_LINE_INTERVAL = 15.0
"""Seconds without a line after which a log that is followed sends a blank one, so that nobody takes it for dead."""
NDJSON = "application/x-ndjson"
_LINES: dict[int | str, dict[str, Any]] = {200: {"content": {NDJSON: {"schema": {"type": "string"}}}}}
After = Annotated[int, Query(ge=0, le=INT64, description="Only what has a greater id.")]
Limit = Annotated[int, Query(ge=0, le=INT32, description="At most so many; 0: all.")]
Groups = Annotated[list[Id], Query(min_length=1, max_length=1000)]


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


@routes.trial.get("/trials/{trial_id}/logs", response_class=StreamingResponse, responses=_LINES)
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


@routes.trial.get("/tasks/{task_id}/logs", response_class=StreamingResponse, responses=_LINES)
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
                text = b"".join(_line(shapes.log_line(line)) for line in lines)
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


@routes.trial.get("/trials/metrics/trial_metrics", response_class=StreamingResponse, responses=_LINES)
@routes.trial.get("/trials/metrics/training_metrics", response_class=StreamingResponse, responses=_LINES)
@routes.trial.get("/trials/metrics/validation_metrics", response_class=StreamingResponse, responses=_LINES)
async def read_metrics(
    request: Request,
    service: TheService,
    caller: TheCaller,
    trial_ids: Groups,
    group: str = "",
    after: After = 0,
    limit: Limit = 0,
    archived: bool = False,
) -> Response:
    """Send metrics of trials, a JSON object with some rows a line: of the group that the path names, or of ``group``.

    Without either, those of all groups.
    """
    for trial_id in trial_ids:
        caller.check(trial_id=trial_id)
    named = end_of_route(request).removesuffix("_metrics")
    group = group if named == "trial" else named
    reader = _queries.MetricsReader(service.store, trial_ids, group or None, after=after, archived=archived)
    left = limit or INT64
    return StreamingResponse(_rows(reader, await _read_rows(reader, left), left), media_type=NDJSON)


async def _read_rows(reader: MetricsReader, left: int) -> tuple[int, bytes]:
    """Return the number of rows read, and the line with those that are asked for."""

    def encode_rows(rows: list[MetricView]) -> tuple[int, bytes]:
        return len(rows), _line({"metrics": [encode(row) for row in rows[:left]]})

    # Encoded in the thread that reads: on the loop, six readers kept each other request waiting for seconds.
    return await reader.read_as(min(left, MAX_ROWS), encode_rows)


async def _rows(reader: MetricsReader, first: tuple[int, bytes], left: int) -> AsyncIterator[bytes]:
    count, text = first
    while count:
        is_over = count < min(left, MAX_ROWS)
        left -= count
        yield text
        if is_over or left <= 0:
            return
        text = b""  # not kept while the next rows are read
        count, text = await _read_rows(reader, left)


def _line(result: dict[str, Any]) -> bytes:
    return dump({"result": result}) + b"\n"

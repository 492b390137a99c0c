"""Routes that answer line by line: logs, which may be followed, and metrics (§7.1, §10)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Query, Request
from fastapi.responses import Response, StreamingResponse

from det_core._json import dump
from det_core.master._errors import NotFound, Stopping
from det_core.master.api import _shapes as shapes
from det_core.master.api._routing import Routes, TheCaller, ThePendingRequests, TheService, end_of_route
from det_core.master.api._types import INT32, INT64, Id, TrialId
from det_core.master.service import _logs, _queries
from det_core.protocol.wire import encode

if TYPE_CHECKING:
    from det_core.master.service._queries import MetricsReader
    from det_core.master.service._views import LogPage, LogView
    from det_core.protocol.records import MetricView

routes = Routes("streams")
MAX_ROWS = 1000
"""Metrics rows read from the store at a time."""
MAX_LOG_LINES = 500
"""Log lines read from the store at a time."""
MAX_CHUNK_BYTES = 256 << 10
"""Bytes of a log after which no further line is encoded before these are sent."""
BLANK_LINE_INTERVAL = 15.0
"""Seconds without a line after which a log that is followed sends a blank one, so that nobody takes it for dead."""
NDJSON = "application/x-ndjson"
_LINES: dict[int | str, dict[str, Any]] = {200: {"content": {NDJSON: {"schema": {"type": "string"}}}}}
After = Annotated[int, Query(ge=0, le=INT64, description="Only what has a greater id.")]
Limit = Annotated[int, Query(ge=0, le=INT32, description="At most so many; 0: all.")]
Groups = Annotated[list[Id], Query(min_length=1, max_length=1000)]


ReadPage = Callable[[int, int, float], Awaitable["LogPage"]]
"""Reads the lines after an id: at most so many, waiting so many seconds for the first."""


@routes.trial.get("/trials/{trial_id}/logs", response_class=StreamingResponse, responses=_LINES)
async def trial_logs(
    request: Request,
    trial_id: TrialId,
    service: TheService,
    pending: ThePendingRequests,
    follow: bool = False,
    after: After = 0,
    limit: Limit = 0,
) -> Response:
    """The log of a trial, a JSON object a line; with ``follow`` it goes on until the trial has ended."""

    async def read(beyond: int, most: int, wait: float) -> LogPage:
        return await pending.wait(_logs.page_of_trial(service, trial_id, after=beyond, limit=most, wait=wait))

    request.state.is_followed = follow
    first = await read(after, min(limit or MAX_LOG_LINES, MAX_LOG_LINES), 0.0)
    return StreamingResponse(_log(read, first, after, follow, limit), media_type=NDJSON)


@routes.trial.get("/tasks/{task_id}/logs", response_class=StreamingResponse, responses=_LINES)
async def task_logs(
    request: Request,
    task_id: str,
    service: TheService,
    pending: ThePendingRequests,
    follow: bool = False,
    after: After = 0,
    limit: Limit = 0,
) -> Response:
    """The log of a task, as that of a trial."""

    async def read(beyond: int, most: int, wait: float) -> LogPage:
        return await pending.wait(_logs.page(service, task_id, after=beyond, limit=most, wait=wait))

    request.state.is_followed = follow
    first = await read(after, min(limit or MAX_LOG_LINES, MAX_LOG_LINES), 0.0)
    return StreamingResponse(_log(read, first, after, follow, limit), media_type=NDJSON)


def _encode(lines: list[LogView]) -> list[bytes]:
    """Encode the first lines, up to MAX_CHUNK_BYTES; the others are read again when these are sent."""
    texts = []
    size = 0
    for line in lines:
        texts.append(_line(shapes.log_line(line)))
        size += len(texts[-1])
        if size >= MAX_CHUNK_BYTES:
            break
    return texts


async def _log(read: ReadPage, page: LogPage | None, after: int, follow: bool, limit: int) -> AsyncIterator[bytes]:
    """Yield the lines of a log from ``page`` on; end early, without an error, when the server stops."""
    left = limit or INT64
    try:
        while page is not None:
            lines = page["lines"][:left]
            texts = _encode(lines)
            left -= len(texts)
            after = lines[len(texts) - 1]["id"] if texts else after
            is_last = page["ended"] if follow else len(lines) < MAX_LOG_LINES
            is_over = is_last and len(texts) == len(lines)
            # A slow reader keeps this generator for as long as it likes: nothing but the encoded lines.
            page = None
            lines = []
            yield b"".join(texts)
            if not is_over and left:
                page = await read(after, min(left, MAX_LOG_LINES), BLANK_LINE_INTERVAL if follow else 0.0)
                if not page["lines"] and not page["ended"]:
                    yield b"\n"
    except (Stopping, NotFound):  # stopping, or deleted while it was read
        return


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

"""Routes that carry a task's files and log lines (rows 19, 27 and 28 of §4; §7)."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi.responses import Response
from pydantic import Field

from det_core import _clock
from det_core.master.api._auth import Caller
from det_core.master.api._routing import Routes, TheCaller, TheService
from det_core.master.api._types import Body, Int64, Timestamp, answer_archive, done
from det_core.master.engines import LogLine
from det_core.master.service import _searches
from det_core.master.service._logs import append_sent

routes = Routes("tasks")
plain_routes = Routes("tasks", prefix="")


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


@routes.trial.get("/tasks/{task_id}/context_directory")
async def context_directory(task_id: str, service: TheService) -> Response:
    """The context directory of a task."""
    return answer_archive(await _searches.task_context(service, task_id))


@routes.trial.post("/task/logs")
async def task_logs(body: TaskLogsRequest, service: TheService, caller: TheCaller) -> Response:
    """Take log lines."""
    await _take(body.logs, service, caller)
    return done()


@plain_routes.trial.post("/task-logs")
async def plain_task_logs(body: list[TaskLog], service: TheService, caller: TheCaller) -> Response:
    """Take log lines, in the form of clients that no master started."""
    await _take(body, service, caller)
    return done()


async def _take(lines: Sequence[TaskLog], service: TheService, caller: Caller) -> None:
    for task_id in {line.task_id for line in lines}:
        caller.check(task_id=task_id)
    for allocation_id in {line.allocation_id for line in lines if line.allocation_id is not None}:
        caller.check(allocation_id=allocation_id)
    arrived = _clock.now()
    await append_sent(service, [(line.task_id, _line(line, arrived)) for line in lines])


def _line(line: TaskLog, arrived: float) -> LogLine:
    return LogLine(
        time=line.timestamp if line.timestamp is not None else arrived,
        stream=line.stdtype or "stdout",
        rank=line.rank_id if line.rank_id is not None else line.rank,
        level=line.level.removeprefix("LOG_LEVEL_") or None,
        text=line.log,
        source=line.source or "task",
        allocation_id=line.allocation_id,
    )

"""Routes of metrics: journals and reports in, rows out (row 2 of section 4; sections 5.2 and 10)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Query, Request
from fastapi.responses import Response, StreamingResponse

from det_core.master._errors import Invalid
from det_core.master.api._routing import Routes, TheCaller, TheService, end_of_route
from det_core.master.api._types import (
    IN_BODY,
    LINES,
    NDJSON,
    Body,
    Id,
    Size,
    Timestamp,
    TrialId,
    answer,
    done,
    encode_line,
)
from det_core.master.service import _queries, _reports
from det_core.protocol.wire import encode

if TYPE_CHECKING:
    from det_core.master.service import ServiceState
    from det_core.protocol.records import MetricView

routes = Routes("metrics")
MAX_ROWS = 1000
"""Rows read from the store at a time."""


class JournalRequest(Body):
    """Records of one process's journal, as they stand in its file, in order."""

    trial_id: Id
    trial_run_id: Id
    rank: Id
    restart: Id = 0
    storage_id: Id | None = None
    records: list[dict[str, Any]]


class MetricsValues(Body):
    """Metrics of one step, and of the batches since the step before."""

    avg_metrics: dict[str, Any]
    batch_metrics: list[dict[str, Any]] | None = None


class TrialMetrics(Body):
    """One report of one attempt. Without ``report_time`` it is that of its arrival."""

    trial_id: Id | None = None
    trial_run_id: Id
    steps_completed: Size | None = None
    report_time: Timestamp | None = None
    metrics: MetricsValues


@routes.trial.post("/journal")
async def journal(body: JournalRequest, service: TheService, caller: TheCaller) -> Response:
    """Take records of a process's journal, each counted once however often it comes."""
    caller.check(trial_id=body.trial_id)
    following = await _reports.journal(
        service,
        body.trial_id,
        body.trial_run_id,
        body.rank,
        body.records,
        body.restart,
        storage_id=body.storage_id,
    )
    return answer({"nextSeq": following})


@routes.trial.post("/trials/{trial_id}/metrics")
async def report_metrics(
    trial_id: TrialId,
    group: Annotated[str, IN_BODY],
    metrics: Annotated[TrialMetrics, IN_BODY],
    service: TheService,
) -> Response:
    """Take one report. The same again changes nothing."""
    return await _report(service, trial_id, group, metrics)


@routes.trial.post("/trials/{trial_id}/training_metrics")
@routes.trial.post("/trials/{trial_id}/validation_metrics")
async def report_metrics_of_group(
    trial_id: TrialId, body: TrialMetrics, request: Request, service: TheService
) -> Response:
    """Take one report of the group that the path names: the form of older clients."""
    return await _report(service, trial_id, end_of_route(request).removesuffix("_metrics"), body)


async def _report(service: ServiceState, trial_id: int, group: str, report: TrialMetrics) -> Response:
    if report.trial_id not in (None, trial_id):
        raise Invalid(f"body metrics.trialId: it is {report.trial_id}, but the address says trial {trial_id}")
    await _reports.report_metrics(
        service,
        trial_id,
        report.trial_run_id,
        group,
        report.steps_completed,
        report.metrics.avg_metrics,
        report.metrics.batch_metrics,
        report.report_time,
    )
    return done()


@routes.trial.get("/trials/metrics/trial_metrics", response_class=StreamingResponse, responses=LINES)
@routes.trial.get("/trials/metrics/training_metrics", response_class=StreamingResponse, responses=LINES)
@routes.trial.get("/trials/metrics/validation_metrics", response_class=StreamingResponse, responses=LINES)
async def read_metrics(
    request: Request,
    service: TheService,
    caller: TheCaller,
    trial_ids: Annotated[list[Id], Query(min_length=1, max_length=1000)],
    group: str = "",
    archived: bool = False,
) -> Response:
    """Send metrics of trials, a JSON object with some rows a line: of the group that the path names, or of ``group``.

    Without either, those of all groups.
    """
    for trial_id in trial_ids:
        caller.check(trial_id=trial_id)
    named = end_of_route(request).removesuffix("_metrics")
    group = group if named == "trial" else named
    reader = _queries.MetricsReader(service.store, trial_ids, group or None, archived=archived)
    # Before the answer begins, as an error then has a status of its own.
    first = await reader.read_as(MAX_ROWS, _encode_rows)

    async def send() -> AsyncIterator[bytes]:
        nonlocal first
        count, text = first
        first = (0, b"")  # not kept while the next rows are read
        while count:
            yield text
            text = b""
            # The last part is a short one, and needs no further look.
            if count < MAX_ROWS:
                return
            count, text = await reader.read_as(MAX_ROWS, _encode_rows)

    return StreamingResponse(send(), media_type=NDJSON)


def _encode_rows(rows: list[MetricView]) -> tuple[int, bytes]:
    """Return the number of rows, and the line with them.

    In the thread that reads: on the loop, six readers kept each other request waiting for seconds.
    """
    return len(rows), encode_line({"metrics": [encode(row) for row in rows]})

"""Routes that take metrics and journals (row 2 of section 4; section 5.2)."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import Response

from det_core.master._errors import Invalid
from det_core.master.api._auth import Caller
from det_core.master.api._routing import Routes, TheCaller, TheService, end_of_route
from det_core.master.api._types import Body, Id, Size, Timestamp, TrialId, answer, done
from det_core.master.service import _reports

routes = Routes("reports")


class JournalRequest(Body):
    """Records of one process's journal, as they stand in its file, in order."""

    trial_id: Id
    trial_run_id: Id
    rank: Id
    restart: Id = 0
    storage_id: Id | None = None
    records: list[dict[str, Any]]


class MetricsValues(Body):
    """The metrics of one step, and of the batches since the step before."""

    avg_metrics: dict[str, Any]
    batch_metrics: list[dict[str, Any]] | None = None


class TrialMetrics(Body):
    """One report of one attempt. Without ``report_time`` it is that of its arrival."""

    trial_id: Id | None = None
    trial_run_id: Id
    steps_completed: Size | None = None
    report_time: Timestamp | None = None
    metrics: MetricsValues


class MetricsRequest(Body):
    """One report, and its group."""

    group: str
    metrics: TrialMetrics


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
async def metrics(body: MetricsRequest, trial_id: TrialId, service: TheService, caller: TheCaller) -> Response:
    """Take one report. The same again changes nothing."""
    return await _report(service, caller, trial_id, body.group, body.metrics)


@routes.trial.post("/trials/{trial_id}/training_metrics")
@routes.trial.post("/trials/{trial_id}/validation_metrics")
async def metrics_of_group(
    body: TrialMetrics, trial_id: TrialId, request: Request, service: TheService, caller: TheCaller
) -> Response:
    """Take one report of the group that the path names: the form of older clients."""
    return await _report(service, caller, trial_id, end_of_route(request).removesuffix("_metrics"), body)


async def _report(service: TheService, caller: Caller, trial_id: int, group: str, report: TrialMetrics) -> Response:
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

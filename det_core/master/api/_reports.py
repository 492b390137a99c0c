"""Routes that take metrics and journals: what comes often, read by hand (row 2 of §4; §5.2).

The bodies are described to people by models, but not read by them: most of what a master does all day passes here.
"""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import Response
from pydantic import TypeAdapter, ValidationError

from det_core.master._errors import Invalid
from det_core.master.api._auth import Caller
from det_core.master.api._routing import Routes, TheCaller, TheService
from det_core.master.api._types import INT32, INT64, Body, Id, Int64, Timestamp, TrialId, answer, done

routes = Routes("reports")
_ABSENT = object()


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

    trial_id: Id
    trial_run_id: Id
    steps_completed: Int64 | None = None
    report_time: Timestamp | None = None
    metrics: MetricsValues


class MetricsRequest(Body):
    """One report, and its group."""

    group: str
    metrics: TrialMetrics


def _described(model: type[Body]) -> dict[str, Any]:
    """What the OpenAPI says of a body that is read by hand."""
    schema = model.model_json_schema(mode="validation")
    parts = schema.pop("$defs", {})
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _inlined(schema, parts)}}}}


def _inlined(schema: Any, parts: dict[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inlined(item, parts) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(parts[schema["$ref"].rsplit("/", 1)[1]], parts)
    return {key: _inlined(value, parts) for key, value in schema.items()}


@routes.trial.post("/journal", openapi_extra=_described(JournalRequest))
async def journal(request: Request, service: TheService, caller: TheCaller) -> Response:
    """Take records of a process's journal, each counted once however often it comes."""
    body = await _object(request)
    trial_id = _int(body, "trialId", "trial_id")
    caller.check(trial_id=trial_id)
    records = _get(body, "records")
    if type(records) is not list or not all(type(record) is dict for record in records):
        raise Invalid("body records: expected a list of objects")
    storage_id = _get(body, "storageId", "storage_id")
    following = await service.journal(
        trial_id,
        _int(body, "trialRunId", "trial_run_id"),
        _int(body, "rank"),
        records,
        _int(body, "restart", default=0),
        None if storage_id is None else _int(body, "storageId", "storage_id"),
    )
    return answer({"nextSeq": following})


@routes.trial.post("/trials/{trial_id}/metrics", openapi_extra=_described(MetricsRequest))
async def metrics(request: Request, trial_id: TrialId, service: TheService, caller: TheCaller) -> Response:
    """Take one report. The same again changes nothing."""
    body = await _object(request)
    group = _get(body, "group")
    if type(group) is not str:
        raise Invalid("body group: expected the name of a group of metrics")
    return await _report(service, caller, trial_id, group, _get(body, "metrics"))


@routes.trial.post("/trials/{trial_id}/training_metrics", openapi_extra=_described(TrialMetrics))
async def training_metrics(request: Request, trial_id: TrialId, service: TheService, caller: TheCaller) -> Response:
    """Take one report of the group ``training``: the form of older clients."""
    return await _report(service, caller, trial_id, "training", await _object(request))


@routes.trial.post("/trials/{trial_id}/validation_metrics", openapi_extra=_described(TrialMetrics))
async def validation_metrics(request: Request, trial_id: TrialId, service: TheService, caller: TheCaller) -> Response:
    """Take one report of the group ``validation``: the form of older clients."""
    return await _report(service, caller, trial_id, "validation", await _object(request))


async def _report(service: TheService, caller: Caller, trial_id: int, group: str, report: Any) -> Response:
    if type(report) is not dict:
        raise Invalid("body metrics: expected an object")
    named = _int(report, "trialId", "trial_id", default=trial_id)
    if named != trial_id:
        raise Invalid(f"body metrics.trialId: it is {named}, but the address says trial {trial_id}")
    values = _get(report, "metrics")
    average = _get(values, "avgMetrics", "avg_metrics") if type(values) is dict else None
    if type(average) is not dict:
        raise Invalid("body metrics.metrics.avgMetrics: expected an object")
    batches = _get(values, "batchMetrics", "batch_metrics")
    if batches is not None and (type(batches) is not list or not all(type(batch) is dict for batch in batches)):
        raise Invalid("body metrics.metrics.batchMetrics: expected a list of objects")
    steps = _get(report, "stepsCompleted", "steps_completed")
    await service.report_metrics(
        trial_id,
        _int(report, "trialRunId", "trial_run_id"),
        group,
        None if steps is None else _int(report, "stepsCompleted", "steps_completed", most=INT64),
        average,
        batches,
        _time(_get(report, "reportTime", "report_time")),
    )
    return done()


async def _object(request: Request) -> dict[str, Any]:
    try:
        body = orjson.loads(await request.body())
    except orjson.JSONDecodeError as e:
        raise Invalid(f"body: no JSON: {e}") from None
    if type(body) is not dict:
        raise Invalid("body: expected an object")
    return body


def _get(body: dict[str, Any], *names: str) -> Any:
    for name in names:
        if (value := body.get(name)) is not None:
            return value
    return None


def _int(body: dict[str, Any], *names: str, default: Any = _ABSENT, most: int = INT32) -> int:
    value = _get(body, *names)
    if value is None and default is not _ABSENT:
        return int(default)
    if type(value) is str and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    if type(value) is not int or not 0 <= value <= most:
        raise Invalid(f"body {names[0]}: expected an integer from 0 to {most}")
    return value


_TIME: TypeAdapter[float] = TypeAdapter(Timestamp)


def _time(value: Any) -> float | None:
    if value is None:
        return None
    try:
        return _TIME.validate_python(value)
    except ValidationError as e:
        raise Invalid(f"body metrics.reportTime: {e.errors()[0]['msg']}") from None

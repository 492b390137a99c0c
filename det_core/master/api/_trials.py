"""Routes of trials: what they report of themselves, and ask (rows 1, 3 to 7, 9, 10, 17 and 18 of §4; §5).

Those that somebody else runs are created and ended here, too (rows 33 to 35 of §4; §9).
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi.responses import Response
from pydantic import Discriminator, Field, Tag

from det_core.master._errors import Invalid
from det_core.master.api import _shapes as shapes
from det_core.master.api._routing import Routes, TheCaller, ThePendingRequests, TheService
from det_core.master.api._types import Body, Id, Number, Size, Timestamp, TrialId, answer, done, state_in
from det_core.master.service import _checkpoints, _operations, _queries, _reports, _steering, _unmanaged
from det_core.protocol.wire import encode

routes = Routes("trials")


class PrepareRunRequest(Body):
    """A run, and where it keeps checkpoints: as ``checkpoint_storage`` in a configuration."""

    run_id: Id
    checkpoint_storage: dict[str, Any] | None = None


class Progress(Body):
    """Progress of a trial: units trained, or a fraction of the whole if ``is_raw``."""

    progress: Number
    is_raw: bool = False


def _form(value: Any) -> str:
    return "object" if isinstance(value, (dict, Progress)) else "number"


AnyProgress = Annotated[Annotated[Progress, Tag("object")] | Annotated[Number, Tag("number")], Discriminator(_form)]
"""All the forms that clients know (§1.2): a bare number, or an object with or without ``is_raw``."""


class StatusRequest(Body):
    """Activity of a trial, in its own words."""

    state: str = ""


class MetadataRequest(Body):
    """All of a run's metadata."""

    metadata: dict[str, Any] = Field(default_factory=dict)


class EarlyExitRequest(Body):
    """Why the trial gives up: EXITED_REASON_INVALID_HP, ..._INIT_INVALID_HP or ..._USER_REQUESTED_STOP."""

    reason: str


@routes.trial.post("/runs/start")
async def prepare_run(body: PrepareRunRequest, service: TheService, caller: TheCaller) -> Response:
    """Say where a run keeps its checkpoints. Equal storages have the same number."""
    caller.check(trial_id=body.run_id)
    storage_id = await _checkpoints.prepare_run(service, body.run_id, body.checkpoint_storage)
    return answer({} if storage_id is None else {"storageId": storage_id})


@routes.trial.get("/trials/{trial_id}")
async def get_trial(trial_id: TrialId, service: TheService, summary: bool = True) -> Response:
    """One trial. ``summary`` false: without that of its metrics, for which all its rows are read."""
    return answer({"trial": shapes.trial(await _queries.trial(service, trial_id, summarize=summary))})


@routes.trial.post("/trials/{trial_id}/progress")
async def progress(trial_id: TrialId, body: AnyProgress, service: TheService, caller: TheCaller) -> Response:
    """Note how far the trial is."""
    told = body if isinstance(body, Progress) else Progress(progress=body)
    await _operations.progress(service, trial_id, told.progress, is_raw=told.is_raw, allocation_id=caller.allocation_id)
    return done()


@routes.trial.post("/trials/{trial_id}/runner/metadata")
async def set_status(trial_id: TrialId, body: StatusRequest, service: TheService, caller: TheCaller) -> Response:
    """Note what the trial does."""
    await _reports.set_status(service, trial_id, body.state, allocation_id=caller.allocation_id)
    return done()


@routes.trial.post("/runs/{trial_id}/metadata")
async def set_metadata(trial_id: TrialId, body: MetadataRequest, service: TheService, caller: TheCaller) -> Response:
    """Replace a run's metadata."""
    now = await _reports.set_metadata(service, trial_id, body.metadata, allocation_id=caller.allocation_id)
    return answer({"metadata": now})


@routes.trial.get("/runs/{trial_id}/metadata")
async def get_metadata(trial_id: TrialId, service: TheService) -> Response:
    """Answer the metadata of a run; empty if nothing was set."""
    return answer({"metadata": await _reports.get_metadata(service, trial_id)})


@routes.trial.post("/trials/{trial_id}/early_exit")
async def early_exit(trial_id: TrialId, body: EarlyExitRequest, service: TheService, caller: TheCaller) -> Response:
    """Note that the trial gives up, and why."""
    await _operations.give_up(service, trial_id, body.reason, allocation_id=caller.allocation_id)
    return done()


class Length(Body):
    """The operation, by its length."""

    length: Size


class CompleteOperationRequest(Body):
    """An operation that is done, and its metric (for the searches that are built in, a number)."""

    op: Length
    searcher_metric: Any = None


@routes.trial.get("/trials/{trial_id}/searcher/operation")
async def operation(trial_id: TrialId, service: TheService, caller: TheCaller, pending: ThePendingRequests) -> Response:
    """Answer how far the trial is to train, once its search has decided on the operation that it has completed."""
    view = await pending.wait(_operations.current(service, trial_id, allocation_id=caller.allocation_id))
    operation = {"requestId": view["request_id"], "length": str(view["length"])}
    return answer({"op": {"validateAfter": operation}, "completed": view["completed"]})


@routes.trial.post("/trials/{trial_id}/searcher/completed_operation")
async def complete_operation(
    trial_id: TrialId, body: CompleteOperationRequest, service: TheService, caller: TheCaller
) -> Response:
    """Complete an operation; a repeat changes nothing."""
    metric, length = body.searcher_metric, body.op.length
    await _operations.complete(service, trial_id, length, metric, allocation_id=caller.allocation_id)
    return done()


class AlertData(Body):
    """Content of an alert."""

    title: str = ""
    description: str = ""
    level: str = "LOG_LEVEL_INFO"


class AlertRequest(Body):
    """Something for people's attention."""

    data: AlertData = AlertData()
    experiment_id: Id
    trial_id: Id | None = None


class TrialSource(Body):
    """That a trial uses a checkpoint, and for what."""

    checkpoint_uuid: str
    trial_id: Id
    trial_source_info_type: str = "TRIAL_SOURCE_INFO_TYPE_UNSPECIFIED"


class TrialSourceRequest(Body):
    """That a trial uses a checkpoint."""

    trial_source_info: TrialSource


@routes.trial.post("/webhooks/custom")
async def alert(body: AlertRequest, service: TheService, caller: TheCaller) -> Response:
    """Bring something to people's attention."""
    caller.check(experiment_id=body.experiment_id)
    if body.trial_id is not None:
        caller.check(trial_id=body.trial_id)
    level = body.data.level.removeprefix("LOG_LEVEL_")
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise Invalid(f"body data.level: {body.data.level!r} is none of LOG_LEVEL_DEBUG, _INFO, _WARNING, _ERROR")
    await _reports.alert(service, body.experiment_id, body.trial_id, body.data.title, body.data.description, level)
    return done()


@routes.trial.post("/trial-source-info")
async def trial_source_info(body: TrialSourceRequest, service: TheService, caller: TheCaller) -> Response:
    """Note that a trial uses a checkpoint."""
    info = body.trial_source_info
    caller.check(trial_id=info.trial_id)
    await _checkpoints.use(service, info.trial_id, info.checkpoint_uuid)
    return answer({"trialId": info.trial_id, "checkpointUuid": info.checkpoint_uuid})


@routes.user.post("/trials/{trial_id}/kill")
async def kill_trial(trial_id: TrialId, service: TheService) -> Response:
    """Kill one trial, for good."""
    await _steering.kill_trial(service, trial_id)
    return done()


class CreateTrialRequest(Body):
    """A trial of an unmanaged experiment."""

    experiment_id: Id
    hparams: dict[str, Any] = Field(default_factory=dict)
    unmanaged: bool = True


class PutTrialRequest(Body):
    """A trial, and the caller's own name for it. ``start_time``: when it began, if that was before."""

    create_trial_request: CreateTrialRequest
    external_trial_id: str
    start_time: Timestamp | None = None


class StartTrialRequest(Body):
    """Permission to resume a trial that was started before."""

    resume: bool = False


class PatchTrialRequest(Body):
    """A sign of life, and perhaps a new state. ``end_time``: when it ended, if that was before."""

    state: str | None = None
    end_time: Timestamp | None = None


@routes.user.post("/trials")
async def create_trial(body: CreateTrialRequest, service: TheService) -> Response:
    """Create a trial of an unmanaged experiment."""
    _check(body)
    view = await _unmanaged.create_trial(service, body.experiment_id, body.hparams)
    return answer({"trial": shapes.trial(view)})


@routes.user.put("/trials")
async def put_trial(body: PutTrialRequest, service: TheService) -> Response:
    """Answer the trial with this external ID, created if there is none."""
    wanted = body.create_trial_request
    _check(wanted)
    view = await _unmanaged.put_trial(
        service, wanted.experiment_id, body.external_trial_id, wanted.hparams, start_time=body.start_time
    )
    return answer({"trial": shapes.trial(view)})


def _check(body: CreateTrialRequest) -> None:
    if not body.unmanaged:
        raise Invalid("unmanaged: only trials that the master does not run can be created; a search creates its own")


@routes.user.post("/trials/{trial_id}/start")
async def start_trial(trial_id: TrialId, body: StartTrialRequest, service: TheService) -> Response:
    """Begin another attempt of an unmanaged trial."""
    view = await _unmanaged.start_trial(service, trial_id, resume=body.resume)
    return answer(encode(view))


@routes.user.patch("/trials/{trial_id}")
async def patch_trial(trial_id: TrialId, body: PatchTrialRequest, service: TheService) -> Response:
    """Take a sign of life of an unmanaged trial, and perhaps its new state."""
    state = None if body.state is None else state_in(body.state)
    view = await _unmanaged.patch_trial(service, trial_id, state=state, end_time=body.end_time)
    return answer({"trial": shapes.trial(view)})

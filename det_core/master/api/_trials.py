"""Routes by which a trial tells of itself and asks (rows 1, 3 to 7, 9, 10, 17 and 18 of §4; §5)."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi.responses import Response
from pydantic import Discriminator, Field, Tag

from det_core.master._errors import Invalid
from det_core.master.api._auth import ByAll, ByTrial
from det_core.master.api._context import TheService, new_router
from det_core.master.api._show_checkpoint import Checkpoint, CheckpointsReply
from det_core.master.api._show_trial import Trial, TrialReply
from det_core.master.api._types import Body, Empty, Id, Int64Out, Number, Reply, Size, TrialId, answer, done

router = new_router("trials")


class PrepareRunRequest(Body):
    """A run, and where it keeps checkpoints: as ``checkpoint_storage`` in a configuration."""

    run_id: Id
    checkpoint_storage: dict[str, Any] | None = None


class PrepareRunReply(Reply):
    """The number of that storage, absent without one."""

    storage_id: int | None = None


class Progress(Body):
    """How far the trial is: units trained, or a fraction of the whole if ``is_raw``."""

    progress: Number
    is_raw: bool = False


def _form(value: Any) -> str:
    return "object" if isinstance(value, (dict, Progress)) else "number"


AnyProgress = Annotated[Annotated[Progress, Tag("object")] | Annotated[Number, Tag("number")], Discriminator(_form)]
"""All the forms that clients know (§1.2): a bare number, or an object with or without ``is_raw``."""


class StatusRequest(Body):
    """What the trial does, in its own words."""

    state: str = ""


class MetadataRequest(Body):
    """All of a run's metadata."""

    metadata: dict[str, Any] = Field(default_factory=dict)


class MetadataReply(Reply):
    """All of a run's metadata."""

    metadata: dict[str, Any]


class EarlyExitRequest(Body):
    """Why the trial gives up: EXITED_REASON_INVALID_HP, ..._INIT_INVALID_HP or ..._USER_REQUESTED_STOP."""

    reason: str


class ValidateAfter(Reply):
    """How far to train, in all."""

    request_id: str
    length: Int64Out


class Operation(Reply):
    """What a trial is to do."""

    validate_after: ValidateAfter


class OperationReply(Reply):
    """The current operation. ``completed``: it is done, and there is none after it at the moment."""

    op: Operation
    completed: bool


class Length(Body):
    """The operation, by its length."""

    length: Size


class CompleteOperationRequest(Body):
    """An operation that is done, and its metric (for the searches that are built in, a number)."""

    op: Length
    searcher_metric: Any = None


class AlertData(Body):
    """What is to be said."""

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


class TrialSourceReply(Reply):
    """The same back."""

    trial_id: int
    checkpoint_uuid: str


@router.post("/api/v1/runs/start", response_model=PrepareRunReply)
async def prepare_run(body: PrepareRunRequest, service: TheService, caller: ByAll) -> Response:
    """Say where a run keeps its checkpoints. Equal storages have the same number."""
    caller.check_trial(body.run_id)
    return answer(PrepareRunReply(storage_id=await service.run_prepare(body.run_id, body.checkpoint_storage)))


@router.get("/api/v1/trials/{trial_id}", response_model=TrialReply)
async def get_trial(trial_id: TrialId, service: TheService, _: ByTrial) -> Response:
    """One trial."""
    return answer(TrialReply(trial=Trial.of(await service.trial(trial_id))))


@router.get("/api/v1/trials/{trial_id}/checkpoints", response_model=CheckpointsReply)
async def trial_checkpoints(trial_id: TrialId, service: TheService, _: ByTrial) -> Response:
    """All checkpoints of a trial, newest first."""
    return answer(CheckpointsReply(checkpoints=[Checkpoint.of(v) for v in await service.trial_checkpoints(trial_id)]))


@router.post("/api/v1/trials/{trial_id}/progress", response_model=Empty)
async def progress(trial_id: TrialId, body: AnyProgress, service: TheService, caller: ByTrial) -> Response:
    """Note how far the trial is."""
    told = body if isinstance(body, Progress) else Progress(progress=body)
    await service.progress(trial_id, told.progress, is_raw=told.is_raw, allocation_id=caller.allocation_id)
    return done()


@router.post("/api/v1/trials/{trial_id}/runner/metadata", response_model=Empty)
async def set_status(trial_id: TrialId, body: StatusRequest, service: TheService, caller: ByTrial) -> Response:
    """Note what the trial does."""
    await service.set_status(trial_id, body.state, allocation_id=caller.allocation_id)
    return done()


@router.post("/api/v1/runs/{trial_id}/metadata", response_model=MetadataReply)
async def set_metadata(trial_id: TrialId, body: MetadataRequest, service: TheService, caller: ByTrial) -> Response:
    """Replace a run's metadata."""
    now = await service.set_metadata(trial_id, body.metadata, allocation_id=caller.allocation_id)
    return answer(MetadataReply(metadata=now))


@router.get("/api/v1/runs/{trial_id}/metadata", response_model=MetadataReply)
async def get_metadata(trial_id: TrialId, service: TheService, _: ByTrial) -> Response:
    """A run's metadata; empty if nothing was set."""
    return answer(MetadataReply(metadata=await service.get_metadata(trial_id)))


@router.post("/api/v1/trials/{trial_id}/early_exit", response_model=Empty)
async def early_exit(trial_id: TrialId, body: EarlyExitRequest, service: TheService, caller: ByTrial) -> Response:
    """Note that the trial gives up, and why."""
    await service.early_exit(trial_id, body.reason, allocation_id=caller.allocation_id)
    return done()


@router.get("/api/v1/trials/{trial_id}/searcher/operation", response_model=OperationReply)
async def operation(trial_id: TrialId, service: TheService, caller: ByTrial) -> Response:
    """How far the trial is to train; answered at once."""
    view = await service.operation(trial_id, allocation_id=caller.allocation_id)
    op = Operation(validate_after=ValidateAfter(request_id=view["request_id"], length=view["length"]))
    return answer(OperationReply(op=op, completed=view["completed"]))


@router.post("/api/v1/trials/{trial_id}/searcher/completed_operation", response_model=Empty)
async def complete_operation(
    trial_id: TrialId, body: CompleteOperationRequest, service: TheService, caller: ByTrial
) -> Response:
    """The operation is done. Saying it again changes nothing."""
    metric, length = body.searcher_metric, body.op.length
    await service.complete_operation(trial_id, length, metric, allocation_id=caller.allocation_id)
    return done()


@router.post("/api/v1/webhooks/custom", response_model=Empty)
async def alert(body: AlertRequest, service: TheService, caller: ByAll) -> Response:
    """Bring something to people's attention."""
    caller.check_experiment(body.experiment_id)
    if body.trial_id is not None:
        caller.check_trial(body.trial_id)
    level = body.data.level.removeprefix("LOG_LEVEL_")
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise Invalid(f"body data.level: {body.data.level!r} is none of LOG_LEVEL_DEBUG, _INFO, _WARNING, _ERROR")
    await service.alert(body.experiment_id, body.trial_id, body.data.title, body.data.description, level)
    return done()


@router.post("/api/v1/trial-source-info", response_model=TrialSourceReply)
async def trial_source_info(body: TrialSourceRequest, service: TheService, caller: ByAll) -> Response:
    """Note that a trial uses a checkpoint."""
    info = body.trial_source_info
    caller.check_trial(info.trial_id)
    await service.trial_source_info(info.trial_id, info.checkpoint_uuid, info.trial_source_info_type)
    return answer(TrialSourceReply(trial_id=info.trial_id, checkpoint_uuid=info.checkpoint_uuid))

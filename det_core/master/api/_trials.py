"""Routes of trials and their allocations: what they report of themselves, and ask (§4; §5; §6).

Those that somebody else runs are created and ended here, too (rows 33 to 35 of §4; §9).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import Query
from fastapi.responses import Response
from pydantic import Field, model_validator

from det_core._clock import monotonic
from det_core.master.api._routing import LONGEST_WAIT, Routes, TheCaller, TheService
from det_core.master.api._types import IN_BODY, Body, Id, Number, Size, Timestamp, TrialId, answer, done, state_in
from det_core.master.service import _allocations, _checkpoints, _operations, _queries, _reports, _steering, _unmanaged
from det_core.protocol.wire import encode

if TYPE_CHECKING:
    from det_core.protocol.records import TrialView

routes = Routes("trials")
PAUSE = 2.0
"""Seconds after which a poll of an allocation that has ended is answered, so that a client that loops does not spin."""


def trial_shape(view: TrialView) -> dict[str, Any]:
    """Return a trial as the wire contract's clients expect it."""
    shape = encode(view)
    for validation in ("latestValidation", "bestValidation"):
        if validation in shape:
            shape[validation]["numInputs"] = 0
    return shape


class Progress(Body):
    """Progress of a trial: units trained, or a fraction of the whole if ``is_raw``. A number alone is units (§1.2)."""

    progress: Number
    is_raw: bool = False

    @model_validator(mode="before")
    @classmethod
    def _from_number(cls, data: Any) -> Any:
        return data if isinstance(data, dict) else {"progress": data}


@routes.trial.post("/runs/start")
async def prepare_run(
    run_id: Annotated[Id, IN_BODY],
    service: TheService,
    caller: TheCaller,
    checkpoint_storage: Annotated[dict[str, Any] | None, IN_BODY] = None,
) -> Response:
    """Return the number of the storage of a run's checkpoints. Equal storages have the same number."""
    caller.check(trial_id=run_id)
    storage_id = await _checkpoints.prepare_run(service, run_id, checkpoint_storage)
    return answer({} if storage_id is None else {"storageId": storage_id})


@routes.trial.get("/trials/{trial_id}")
async def get_trial(trial_id: TrialId, service: TheService, summary: bool = True) -> Response:
    """Return one trial. ``summary`` false: without that of its metrics, for which all its rows are read."""
    return answer({"trial": trial_shape(await _queries.trial(service, trial_id, summarize=summary))})


@routes.trial.post("/trials/{trial_id}/progress")
async def progress(trial_id: TrialId, body: Progress, service: TheService, caller: TheCaller) -> Response:
    """Record the progress of a trial."""
    await _operations.progress(service, trial_id, body.progress, is_raw=body.is_raw, allocation_id=caller.allocation_id)
    return done()


@routes.trial.post("/trials/{trial_id}/runner/metadata")
async def set_status(
    trial_id: TrialId, service: TheService, caller: TheCaller, state: Annotated[str, IN_BODY] = ""
) -> Response:
    """Record what the trial does, in its own words."""
    await _reports.set_status(service, trial_id, state, allocation_id=caller.allocation_id)
    return done()


@routes.trial.post("/runs/{trial_id}/metadata")
async def set_metadata(
    trial_id: TrialId,
    service: TheService,
    caller: TheCaller,
    metadata: Annotated[dict[str, Any] | None, IN_BODY] = None,
) -> Response:
    """Replace a run's metadata."""
    now = await _reports.set_metadata(service, trial_id, metadata or {}, allocation_id=caller.allocation_id)
    return answer({"metadata": now})


@routes.trial.get("/runs/{trial_id}/metadata")
async def get_metadata(trial_id: TrialId, service: TheService) -> Response:
    """Return a run's metadata; empty if nothing was set."""
    return answer({"metadata": await _reports.get_metadata(service, trial_id)})


@routes.trial.post("/trials/{trial_id}/early_exit")
async def early_exit(
    trial_id: TrialId, reason: Annotated[str, IN_BODY], service: TheService, caller: TheCaller
) -> Response:
    """Record that the trial gives up: EXITED_REASON_INVALID_HP, ..._INIT_INVALID_HP or ..._USER_REQUESTED_STOP."""
    await _operations.give_up(service, trial_id, reason, allocation_id=caller.allocation_id)
    return done()


class Length(Body):
    """An operation, by its length."""

    length: Size


@routes.trial.get("/trials/{trial_id}/searcher/operation")
async def operation(trial_id: TrialId, service: TheService, caller: TheCaller) -> Response:
    """Return how far the trial is to train, once its search has decided on the operation that it has completed."""
    view = await _operations.current(service, trial_id, allocation_id=caller.allocation_id)
    operation = {"requestId": view["request_id"], "length": str(view["length"])}
    return answer({"op": {"validateAfter": operation}, "completed": view["completed"]})


@routes.trial.post("/trials/{trial_id}/searcher/completed_operation")
async def complete_operation(
    trial_id: TrialId,
    op: Annotated[Length, IN_BODY],
    service: TheService,
    caller: TheCaller,
    searcher_metric: Annotated[Any, IN_BODY] = None,
) -> Response:
    """Complete an operation with its metric, for built-in searches a number. The same again changes nothing."""
    await _operations.complete(service, trial_id, op.length, searcher_metric, allocation_id=caller.allocation_id)
    return done()


class AlertData(Body):
    """Text of an alert."""

    title: str = ""
    description: str = ""
    level: Annotated[str, Field(pattern="^(LOG_LEVEL_)?(DEBUG|INFO|WARNING|ERROR)$")] = "LOG_LEVEL_INFO"


class TrialSource(Body):
    """A checkpoint, and the trial that uses it."""

    checkpoint_uuid: str
    trial_id: Id


@routes.trial.post("/webhooks/custom")
async def alert(
    experiment_id: Annotated[Id, IN_BODY],
    service: TheService,
    caller: TheCaller,
    data: Annotated[AlertData | None, IN_BODY] = None,
    trial_id: Annotated[Id | None, IN_BODY] = None,
) -> Response:
    """Bring something to people's attention."""
    caller.check(experiment_id=experiment_id)
    if trial_id is not None:
        caller.check(trial_id=trial_id)
    data = data or AlertData()
    level = data.level.removeprefix("LOG_LEVEL_")
    await _reports.alert(service, experiment_id, trial_id, data.title, data.description, level)
    return done()


@routes.trial.post("/trial-source-info")
async def trial_source_info(
    trial_source_info: Annotated[TrialSource, IN_BODY], service: TheService, caller: TheCaller
) -> Response:
    """Note that a trial uses a checkpoint."""
    info = trial_source_info
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
    unmanaged: Literal[True] = True  # a search creates its own


@routes.user.post("/trials")
async def create_trial(body: CreateTrialRequest, service: TheService) -> Response:
    """Create a trial of an unmanaged experiment."""
    return answer({"trial": trial_shape(await _unmanaged.create_trial(service, body.experiment_id, body.hparams))})


@routes.user.put("/trials")
async def put_trial(
    create_trial_request: Annotated[CreateTrialRequest, IN_BODY],
    external_trial_id: Annotated[str, IN_BODY],
    service: TheService,
    start_time: Annotated[Timestamp | None, IN_BODY] = None,
) -> Response:
    """Return the trial of an external ID, created if there is none; it may have begun before."""
    wanted = create_trial_request
    view = await _unmanaged.create_trial(
        service,
        wanted.experiment_id,
        wanted.hparams,
        external_id=external_trial_id,
        start_time=start_time,
    )
    return answer({"trial": trial_shape(view)})


@routes.user.post("/trials/{trial_id}/start")
async def start_trial(trial_id: TrialId, service: TheService, resume: Annotated[bool, IN_BODY] = False) -> Response:
    """Begin another run of an unmanaged trial; ``resume`` says that one which was started before may go on."""
    return answer(encode(await _unmanaged.start_trial(service, trial_id, resume=resume)))


@routes.user.patch("/trials/{trial_id}")
async def patch_trial(
    trial_id: TrialId,
    service: TheService,
    state: Annotated[str | None, IN_BODY] = None,
    end_time: Annotated[Timestamp | None, IN_BODY] = None,
) -> Response:
    """Take a sign of life of an unmanaged trial, and perhaps its new state and when it ended."""
    view = await _unmanaged.patch_trial(service, trial_id, state=state and state_in(state), end_time=end_time)
    return answer({"trial": trial_shape(view)})


@routes.trial.get("/allocations/{allocation_id}/signals/preemption")
async def preemption(
    allocation_id: str, service: TheService, timeout_seconds: Annotated[float, Query(ge=0)] = LONGEST_WAIT
) -> Response:
    """Return whether the allocation is to save and stop: as soon as it is, or after that time (at most a minute)."""
    timeout = min(timeout_seconds, LONGEST_WAIT)
    began = monotonic()
    preempt = await _allocations.poll(service, allocation_id, timeout)
    if not preempt and monotonic() - began < timeout / 2:  # it has ended, or the master stops
        changes = service.subscriptions
        await changes.wait(("allocation", allocation_id), changes.cursor, min(timeout, PAUSE))
    return answer({"preempt": preempt})


@routes.trial.post("/allocations/{allocation_id}/signals/ack_preemption")
async def ack_preemption(allocation_id: str, service: TheService) -> Response:
    """Record that the process has noticed, is saving, and will exit."""
    await _allocations.acknowledge(service, allocation_id)
    return done()


@routes.trial.post("/allocations/{allocation_id}/signals/pending_preemption")
async def pending_preemption(allocation_id: str, service: TheService) -> Response:
    """Preempt an allocation whose machine is wanted back by whoever lent it."""
    await _allocations.pending(service, allocation_id)
    return done()


@routes.trial.get("/allocations/{allocation_id}/resources/{resources_id}/rendezvous")
async def rendezvous(allocation_id: str, resources_id: str, service: TheService) -> Response:
    """Return where the allocation's containers are."""
    return answer({"rendezvousInfo": await _allocations.rendezvous(service, allocation_id)})


@routes.trial.post("/allocations/{allocation_id}/all_gather")
@routes.trial.post("/allocations/{allocation_id}/notify_container_running")
@routes.trial.post("/allocations/{allocation_id}/acceleratorData")
@routes.trial.post("/allocations/{allocation_id}/proxy_address")
@routes.trial.post("/allocations/{allocation_id}/resources/{resources_id}/daemon")
@routes.trial.post("/allocations/{allocation_id}/ready")
@routes.trial.post("/allocations/{allocation_id}/waiting")
async def accept(allocation_id: str) -> Response:
    """Accept what containers on other schedulers agree on, and keep nothing: this engine runs one container."""
    return done()

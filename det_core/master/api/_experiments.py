"""Routes of experiments: create, read, wait for, steer, change, continue and delete (rows 6, 8 and 32 of §4; §10).

A context directory travels file by file, or packed.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import fastapi
from fastapi import Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import Field
from starlette.convertors import PathConvertor, register_url_convertor

from det_core.master._errors import Invalid
from det_core.master.api._routing import LONGEST_WAIT, Routes, TheService, end_of_route
from det_core.master.api._trials import trial_shape
from det_core.master.api._types import (
    IN_BODY,
    USER,
    Body,
    ExperimentId,
    Id,
    Int64,
    Limit,
    Offset,
    States,
    Timestamp,
    answer,
    answer_page,
    done,
    rows_of_page,
    state_in,
)
from det_core.master.engines import check_archive, pack_files
from det_core.master.service import _checkpoints, _continue, _create, _queries, _retention, _steering
from det_core.protocol.wire import encode

if TYPE_CHECKING:
    from det_core.protocol.records import ExperimentView

routes = Routes("experiments")
BASE64_PART = 4 << 18
"""Characters of base64 that are decoded at a time; a multiple of 4."""
_ARCHIVE_HEAD = b'{"b64Tgz":"'
_ARCHIVE_TAIL = b'"}'
_ARCHIVE_PART = 3 << 18  # a multiple of 3, so that only the last part has padding
_SAME_FOR_ALL = {
    "archived": False,
    "username": USER,
    "displayName": USER,
    "userId": 1,
    "projectId": 1,
    "projectOwnerId": 1,
    "workspaceId": 1,
}


class _Anything(PathConvertor):
    regex = "(?s:.*)"  # that of ``path`` ends at a line feed


register_url_convertor("anything", _Anything())


class FileEntry(Body):
    """One file (``type`` 48), folder (53) or link (50); ``content`` in base64, ``mode`` as of chmod."""

    path: str
    type: Int64 = 48
    content: str = ""
    mtime: Int64 = 0
    mode: Int64 = 0o644


class CreateExperimentRequest(Body):
    """A new experiment.

    ``config`` is YAML or JSON text, or an object. The context directory comes as ``model_definition``, file by file, or
    packed (tar, gzip, base64) as ``b64_tgz``.
    """

    config: str | dict[str, Any]
    overrides: list[str] = Field(default_factory=list)
    model_definition: list[FileEntry] = Field(default_factory=list)
    b64_tgz: str | None = None
    activate: bool = True
    validate_only: bool = False
    unmanaged: bool = False
    parent_id: Id | None = None
    template: str | None = None


class Resources(Body):
    """Part of ``resources`` that can be changed later."""

    priority: Annotated[int, Field(ge=1, le=99)] | None = None


class KeptCheckpoints(Body):
    """Numbers of checkpoints that stay when the experiment has ended."""

    save_experiment_best: Annotated[int, Field(ge=0)] | None = None
    save_trial_best: Annotated[int, Field(ge=0)] | None = None
    save_trial_latest: Annotated[int, Field(ge=0)] | None = None


@routes.user.post("/experiments")
async def create_experiment(body: CreateExperimentRequest, service: TheService) -> Response:
    """Create an experiment, and start it unless ``activate`` is false."""
    if body.template:
        raise Invalid(
            f"template: {body.template!r} cannot be used, this master has no templates; put it into the config"
        )
    context = await asyncio.to_thread(_packed, body.model_definition, body.b64_tgz)
    created = await _create.create_experiment(
        service,
        body.config,
        context,
        activate=body.activate,
        validate_only=body.validate_only,
        unmanaged=body.unmanaged,
        parent_id=body.parent_id,
        overrides=body.overrides,
    )
    return _answer_created(created)


@routes.user.put("/experiments/by-external-id/{external_id:anything}")
async def put_experiment(
    external_id: str,
    service: TheService,
    config: Annotated[str | dict[str, Any], IN_BODY],
    unmanaged: Annotated[bool, IN_BODY] = True,
    start_time: Annotated[Timestamp | None, IN_BODY] = None,
) -> Response:
    """Return the unmanaged experiment of an external ID, created if there is none; it may have begun before."""
    return _answer_created(
        await _create.put_experiment(service, external_id, config, unmanaged=unmanaged, start_time=start_time)
    )


@routes.user.get("/experiments")
async def list_experiments(
    service: TheService,
    states: States,
    name: str | None = None,
    order_by: Annotated[str, Query(pattern="^(ORDER_BY_)?(ASC|DESC)$")] = "ORDER_BY_ASC",
    sort_by: Annotated[str, Query(description="SORT_BY_START_TIME, or else by number")] = "SORT_BY_ID",
    offset: Offset = 0,
    limit: Limit = 0,
) -> Response:
    """Answer experiments by number, or by when they started, in pages; each filter that is given must match."""
    views, total = await _queries.find_experiments(
        service,
        states=[state_in(s) for s in states],
        name=name,
        newest_first=order_by.endswith("DESC"),
        by_start=sort_by.removeprefix("SORT_BY_") == "START_TIME",
        limit=rows_of_page(limit),
        offset=offset,
    )
    return await answer_page("experiments", _shape, views, total, offset=offset, limit=limit)


@routes.trial.get("/experiments/{experiment_id}")
async def get_experiment(experiment_id: ExperimentId, service: TheService) -> Response:
    """Return one experiment."""
    return answer(_reply(await _queries.experiment(service, experiment_id)))


@routes.trial.get("/experiments/{experiment_id}/trials")
async def list_trials(
    experiment_id: ExperimentId,
    service: TheService,
    states: States,
    sort_by: Annotated[str, Query(description="SORT_BY_BEST_VALIDATION_METRIC, or else by number")] = "SORT_BY_ID",
    offset: Offset = 0,
    limit: Limit = 0,
) -> Response:
    """Answer the trials of an experiment that are in one of ``states``, by number or the best first, in pages."""
    views, total = await _queries.find_trials(
        service,
        experiment_id,
        states=[state_in(s) for s in states],
        best_first=sort_by.removeprefix("SORT_BY_") == "BEST_VALIDATION_METRIC",
        limit=rows_of_page(limit),
        offset=offset,
    )
    return await answer_page("trials", trial_shape, views, total, offset=offset, limit=limit)


@routes.trial.get("/experiments/{experiment_id}/searcher/best_searcher_validation_metric")
async def best_metric(experiment_id: ExperimentId, service: TheService) -> Response:
    """Return the best value of the searched metric; 404 as long as there is none."""
    return answer({"metric": await _queries.best_validation(service, experiment_id)})


@routes.trial.get("/experiments/{experiment_id}/model_def")
async def model_def(experiment_id: ExperimentId, service: TheService) -> Response:
    """Return the context directory of an experiment."""
    return _answer_archive(await _queries.context(service, experiment_id))


@routes.trial.get("/tasks/{task_id}/context_directory")
async def context_directory(task_id: str, service: TheService) -> Response:
    """Return the context directory of a task."""
    return _answer_archive(await _queries.task_context(service, task_id))


@routes.user.post("/experiments/continue")
async def continue_experiment(
    experiment_id: Annotated[Id, fastapi.Body(embed=True, alias="id")],
    service: TheService,
    override_config: Annotated[str, IN_BODY] = "",
) -> Response:
    """Continue an experiment that has ended: incomplete trials resume from their latest checkpoints."""
    return answer(_reply(await _continue.continue_experiment(service, experiment_id, override_config or None)))


@routes.user.patch("/experiments/{experiment_id}")
async def patch_experiment(
    experiment_id: ExperimentId,
    service: TheService,
    name: Annotated[str | None, IN_BODY] = None,
    description: Annotated[str | None, IN_BODY] = None,
    resources: Annotated[Resources | None, IN_BODY] = None,
    checkpoint_storage: Annotated[KeptCheckpoints | None, IN_BODY] = None,
) -> Response:
    """Change name, description, priority, or how many checkpoints are kept."""
    view = await _steering.patch_experiment(
        service,
        experiment_id,
        name=name,
        description=description,
        priority=None if resources is None else resources.priority,
        checkpoint_storage=None if checkpoint_storage is None else checkpoint_storage.model_dump(exclude_none=True),
    )
    return answer(_reply(view))


@routes.user.post("/experiments/{experiment_id}/activate")
@routes.user.post("/experiments/{experiment_id}/pause")
@routes.user.post("/experiments/{experiment_id}/cancel")
@routes.user.post("/experiments/{experiment_id}/kill")
async def steer(experiment_id: ExperimentId, request: Request, service: TheService) -> Response:
    """Carry out the action that ends the path."""
    await getattr(_steering, end_of_route(request))(service, experiment_id)
    return done()


@routes.user.delete("/experiments/{experiment_id}")
async def delete_experiment(experiment_id: ExperimentId, service: TheService) -> Response:
    """Delete an experiment that has ended, with its checkpoints. They go in the background."""
    await _retention.delete_experiment(service, experiment_id)
    return done()


@routes.trial.get("/experiments/{experiment_id}/wait")
async def wait_experiment(
    experiment_id: ExperimentId,
    service: TheService,
    timeout_seconds: Annotated[float, Query(ge=0)] = LONGEST_WAIT,
) -> Response:
    """Return the experiment once it has ended, or as it is after that time (at most a minute)."""
    return answer(_reply(await _queries.wait(service, experiment_id, min(timeout_seconds, LONGEST_WAIT))))


@routes.trial.get("/experiments/{experiment_id}/search")
async def search(experiment_id: ExperimentId, service: TheService) -> Response:
    """Return the state of the search: rungs, and how much has been decided."""
    return answer({"search": encode(await _queries.search(service, experiment_id))})


@routes.trial.get("/experiments/{experiment_id}/best_trial")
async def best_trial(experiment_id: ExperimentId, service: TheService) -> Response:
    """Return the trial with the best searched metric."""
    view = await _queries.best_trial(service, experiment_id)
    return answer({} if view is None else {"trial": trial_shape(view)})


@routes.trial.get("/experiments/{experiment_id}/best_checkpoint")
async def best_checkpoint(experiment_id: ExperimentId, service: TheService) -> Response:
    """Return, of the checkpoints that still exist, that with the best searched metric at its step."""
    view = await _checkpoints.best(service, experiment_id)
    return answer({} if view is None else {"checkpoint": encode(view)})


def _packed(files: Sequence[FileEntry], b64_tgz: str | None) -> bytes | None:
    """Return the context directory as an archive that can be unpacked, or None. Takes long if it is large.

    Raises:
        Invalid: If it came in both forms, or something in it is not allowed, which the message names.
        TooMuch: If it is too large, packed or unpacked.
    """
    if b64_tgz and files:
        raise Invalid("the context directory comes either as modelDefinition or as b64Tgz, not as both")
    if not b64_tgz:
        return pack_files([file.model_dump() for file in files]) if files else None
    archive = _decode(b64_tgz)
    check_archive(io.BytesIO(archive))
    return archive


def _decode(text: str) -> bytes:
    """Return the bytes of a text in base64; in parts, as decoding holds the lock of the interpreter."""
    archive = bytearray()
    try:
        if "=" in text[:-2]:
            raise ValueError("padding before its end")
        for start in range(0, len(text), BASE64_PART):
            archive += base64.b64decode(text[start : start + BASE64_PART], validate=True)
    except ValueError as e:
        raise Invalid(f"body b64Tgz: no base64: {e}") from None
    return bytes(archive)


def _answer_archive(archive: bytes) -> Response:
    """Return the HTTP answer with a context directory in base64, which is encoded while it is sent."""
    length = len(_ARCHIVE_HEAD) + 4 * ((len(archive) + 2) // 3) + len(_ARCHIVE_TAIL)

    async def parts() -> AsyncIterator[bytes]:
        yield _ARCHIVE_HEAD
        for start in range(0, len(archive), _ARCHIVE_PART):
            yield base64.b64encode(archive[start : start + _ARCHIVE_PART])
        yield _ARCHIVE_TAIL

    return StreamingResponse(parts(), media_type="application/json", headers={"Content-Length": str(length)})


def _shape(view: ExperimentView) -> dict[str, Any]:
    return {**encode(view), **_SAME_FOR_ALL, "jobId": f"experiment-{view.id}"}


def _reply(view: ExperimentView) -> dict[str, Any]:
    return {"experiment": _shape(view), "config": view.config}


def _answer_created(created: ExperimentView) -> Response:
    # ``warnings`` are the contract's codes, of which there are none; ``configWarnings`` are lines for people.
    return answer({**_reply(created), "warnings": [], "configWarnings": created.warnings})

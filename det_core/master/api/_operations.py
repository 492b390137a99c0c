"""Routes by which a trial learns how far to train, and says that it did (rows 9 and 10 of §4; §5.5)."""

from __future__ import annotations

from typing import Any

from fastapi.responses import Response

from det_core.master.api._routing import Routes, TheCaller, TheService
from det_core.master.api._types import Body, Size, TrialId, answer, done

routes = Routes("trials")


class Length(Body):
    """The operation, by its length."""

    length: Size


class CompleteOperationRequest(Body):
    """An operation that is done, and its metric (for the searches that are built in, a number)."""

    op: Length
    searcher_metric: Any = None


@routes.trial.get("/trials/{trial_id}/searcher/operation")
async def operation(trial_id: TrialId, service: TheService, caller: TheCaller) -> Response:
    """How far the trial is to train; answered at once."""
    view = await service.operation(trial_id, allocation_id=caller.allocation_id)
    operation = {"requestId": view["request_id"], "length": str(view["length"])}
    return answer({"op": {"validateAfter": operation}, "completed": view["completed"]})


@routes.trial.post("/trials/{trial_id}/searcher/completed_operation")
async def complete_operation(
    trial_id: TrialId, body: CompleteOperationRequest, service: TheService, caller: TheCaller
) -> Response:
    """The operation is done. Saying it again changes nothing."""
    metric, length = body.searcher_metric, body.op.length
    await service.complete_operation(trial_id, length, metric, allocation_id=caller.allocation_id)
    return done()

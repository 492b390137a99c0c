"""The questions that a run once asked its own folder, put to a master after the fact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from det_core.backend import _rest_bodies as bodies
from det_core.backend._rest import Task
from det_core.backend._ship_routes import Arrived, Carrier, Refusal
from det_core.errors import MasterDenied, MasterError, MasterUnreachable, UnknownToMaster
from det_core.journal import Line
from det_core.protocol import MasterSession


class WithQuestions:
    """Carries as another carrier does, and puts checkpoints and metadata to the master by their own routes, in order.

    Args:
        inner: brings the records.
        session: talks to the master.
        task: what the run is there.
        storage_id: the master's number of the checkpoint storage.
    """

    def __init__(self, inner: Carrier, session: MasterSession, task: Task, storage_id: int | None) -> None:
        self._inner, self._session, self._task, self._storage_id = inner, session, task, storage_id
        self._ways = {
            "checkpoint": self._checkpoint,
            "checkpoint_deleted": self._deleted,
            "metadata": self._metadata,
        }

    def carry(self, restart: int, rank: int, lines: Sequence[Line], arrived: Arrived) -> list[Refusal]:
        """Bring records and questions, in their order."""
        refused: list[Refusal] = []
        first = 0
        for at, line in enumerate(lines):
            ask = self._ways.get(line.record["kind"])
            if ask is None:
                continue
            refused += self._inner.carry(restart, rank, lines[first:at], arrived) if at > first else []
            first = at
            try:
                ask(line.record["body"])
            except (MasterUnreachable, MasterDenied):
                raise
            except MasterError as e:
                refused.append(Refusal(line, e))
        rest = lines[first:]
        return refused + (self._inner.carry(restart, rank, rest, arrived) if rest else [])

    def _checkpoint(self, body: Mapping[str, Any]) -> None:
        task = self._task
        said = bodies.checkpoint(
            body, task_id=task.task_id, allocation_id=task.allocation_id, storage_id=self._storage_id
        )
        if self._is_known(body["storage_id"]):
            return
        try:
            self._session.call("POST", "/api/v1/checkpoints", said)
        except MasterError as e:
            # A repeat is refused: what counts is whether the first attempt, whose answer was lost, has registered it.
            if not (e.status and e.maybe_applied) or not self._is_known(body["storage_id"]):
                raise

    def _is_known(self, storage_id: str) -> bool:
        try:
            self._session.call("GET", f"/api/v1/checkpoints/{quote(storage_id, safe='')}")
        except UnknownToMaster:
            return False
        return True

    def _deleted(self, body: Mapping[str, Any]) -> None:
        try:
            self._session.call("PATCH", "/api/v1/checkpoints", bodies.remains(body["storage_id"], body["resources"]))
        except UnknownToMaster:
            return

    def _metadata(self, body: Mapping[str, Any]) -> None:
        said = {"metadata": body["metadata"], "runId": self._task.trial_id}
        self._session.call("POST", f"/api/v1/runs/{self._task.trial_id}/metadata", said)

"""The backend of a run under a master: each question is a request, by the wire contract, §5."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from det_core import _clock
from det_core.backend import _rest_bodies as bodies
from det_core.backend._rest_master import Master
from det_core.backend._rest_operations import Operations
from det_core.backend._ship import Shipper
from det_core.errors import MasterError, MasterUnreachable, ReportsNotShipped, UnknownToMaster
from det_core.protocol import MasterSession

logger = logging.getLogger("det_core.master")
ACK_PATIENCE = 30.0
"""Maximum wait of a script that is asked to stop until the master has its acknowledgement, in seconds."""


@dataclass(frozen=True)
class Task:
    """What this process does for the master.

    Attributes:
        trial_id: the trial.
        experiment_id: its experiment.
        trial_run_id: which run of the trial this is.
        task_id: the trial, as tasks are called.
        allocation_id: this run, as allocations are called; None for an unmanaged one.
        searcher: the section ``searcher`` of the experiment's configuration.
        latest_checkpoint: the storage_id that the master handed over.
        max_length: what the script says of how long to train; the configuration's comes first.
    """

    trial_id: int
    experiment_id: int
    trial_run_id: int
    task_id: str
    allocation_id: str | None
    searcher: Mapping[str, Any]
    latest_checkpoint: str | None = None
    max_length: int | Mapping[str, int] | None = None


class RestBackend:
    """Asks a master. A question goes out after every report that was made before it.

    Args:
        session: talks to the master; closed with this.
        master: which master it is.
        task: what this process does for it.
        shipper: carries the reports.
        storage_id: the master's number of the checkpoint storage.
        ship_timeout: seconds that :meth:`close` may take to carry the last reports.
        heir: somebody carries what is left then, so that it is no error.
    """

    def __init__(
        self,
        session: MasterSession,
        master: Master,
        task: Task,
        shipper: Shipper,
        *,
        storage_id: int | None = None,
        ship_timeout: float = 120.0,
        heir: bool = False,
    ) -> None:
        self._session, self._master, self._task, self._shipper = session, master, task, shipper
        self._waiting = session.clone()
        self._storage_id = storage_id
        self._ship_timeout, self._heir = ship_timeout, heir
        self._operations = Operations(self._call, master, task.trial_id, task.searcher, task.max_length)
        self._reason: str | None = None
        self._unheard = self._closed = False

    def next_operation(self) -> int | None:
        """The searcher's, or the one of the configured length."""
        return self._operations.next()

    def complete_operation(self, length: int, searcher_metric: Any) -> None:
        """Tell the searcher."""
        self._operations.complete(length, searcher_metric)

    def acknowledge_out_of_operations(self) -> None:
        """Say that this exit is on purpose, where the searcher may have more work later."""
        if self._operations.given_by_searcher:
            self.acknowledge_preemption()

    def acknowledge_preemption(self) -> None:
        """Acknowledge the request to stop; if the master does not answer, once more at the end.

        The script may save its state all the same.
        """
        try:
            self._shipper.drain(ACK_PATIENCE)
            self._acknowledge(ACK_PATIENCE)
        except MasterUnreachable as e:
            self._unheard = True
            logger.warning("preemption acknowledgement failed, retrying at exit: %s", e)

    def preempted(self, timeout: float) -> bool:
        """Whether the master wants this allocation to stop. Asks once, on connections of its own."""
        began = _clock.monotonic()
        answer = self._waiting.call(
            "GET", f"{self._allocation}/signals/preemption", params={"timeout_seconds": int(timeout)}, timeout=0.0,
            idle_timeout=timeout + 10.0,
        )  # fmt: skip
        if answer.get("preempt"):
            return True
        if _clock.monotonic() - began < timeout / 2:
            time.sleep(min(1.0, timeout / 60))  # an allocation that has ended is answered at once
        return False

    def stop_waiting(self) -> None:
        """End the request that is under way."""
        self._waiting.interrupt()

    def best_validation(self) -> float | None:
        """What the master knows of the experiment's best validation."""
        route = f"/api/v1/experiments/{self._task.experiment_id}/searcher/best_searcher_validation_metric"
        try:
            metric = self._call("GET", route).get("metric")
        except UnknownToMaster:
            return None
        return None if metric is None else float(metric)

    def last_validation(self) -> int | None:
        """What the master knows of the trial."""
        steps = self._latest_validation().get("totalBatches")
        return None if steps is None else int(steps)

    def last_validation_metrics(self) -> Mapping[str, Any]:
        """Return what the master knows of the trial."""
        metrics = self._latest_validation().get("metrics") or {}
        return dict(metrics.get("avgMetrics") or {})

    def set_metadata(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Replace what the master has."""
        body = {"metadata": dict(metadata), "runId": self._task.trial_id}
        return dict(self._call("POST", self._metadata_route, body).get("metadata") or {})

    def get_metadata(self) -> dict[str, Any]:
        """What the master has."""
        return dict(self._call("GET", self._metadata_route).get("metadata") or {})

    def register_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Tell the master, with the files and what they need."""
        task = self._task
        body = bodies.checkpoint(
            checkpoint, task_id=task.task_id, allocation_id=task.allocation_id, storage_id=self._storage_id
        )
        uuid = checkpoint["storage_id"]
        try:
            self._call("POST", "/api/v1/checkpoints", body)
        except MasterError as e:
            # A repeat is refused: what counts is whether the first attempt, whose answer was lost, has registered it.
            if not (e.status and e.maybe_applied) or self._checkpoint(uuid) is None:
                raise

    def checkpoint_deleted(self, storage_id: str, remaining: Mapping[str, int]) -> None:
        """Tell the master what is left. A checkpoint that it does not know is none of its business."""
        try:
            self._call("PATCH", "/api/v1/checkpoints", bodies.remains(storage_id, remaining))
        except UnknownToMaster:
            logger.info("the master does not know checkpoint %s, which was deleted", storage_id)

    def checkpoint_metadata(self, storage_id: str) -> dict[str, Any] | None:
        """What the master has as its metadata, which may have been edited. None: ask the store."""
        try:
            found = self._checkpoint(storage_id)
        except MasterError as e:
            logger.warning("the metadata of checkpoint %s is read from its store: %s", storage_id, e)
            return None
        return None if found is None else dict(found.get("metadata") or {})

    def early_exit(self, reason: str) -> None:
        """Told at the end, as a foreign master ends a trial some seconds later; ours reads it in the journal."""
        self._reason = reason

    def alert(self, title: str, description: str, level: str) -> None:
        """Hand it to the master, which tells people."""
        data = {"title": title, "description": description, "level": f"LOG_LEVEL_{level.upper()}"}
        ids = {"experimentId": self._task.experiment_id, "trialId": self._task.trial_id}
        self._call("POST", "/api/v1/webhooks/custom", {"data": data, **ids})

    def close(self) -> None:
        """Carry the last reports, and let go of the master. Twice is fine."""
        if self._closed:
            return
        self._closed = True
        self.stop_waiting()
        self._waiting.close()
        try:
            self._shipper.close(self._ship_timeout)
            if self._unheard:
                self._acknowledge(self._ship_timeout)
            self._say_early_exit()
        except ReportsNotShipped as e:
            if not self._heir or e.status:
                raise
            logger.warning("%s. Whoever started this process brings them there", e)
        finally:
            self._session.close()

    def _latest_validation(self) -> dict[str, Any]:
        trial = self._call("GET", f"/api/v1/trials/{self._task.trial_id}").get("trial") or {}
        return dict(trial.get("latestValidation") or {})

    def _acknowledge(self, patience: float) -> None:
        self._session.call("POST", f"{self._allocation}/signals/ack_preemption", timeout=patience)

    def _say_early_exit(self) -> None:
        if self._reason == "INVALID_HP" and not self._master.ours:
            body = {"reason": f"EXITED_REASON_{self._reason}"}
            route = f"/api/v1/trials/{self._task.trial_id}/early_exit"
            self._session.call("POST", route, body, timeout=self._ship_timeout)

    def _checkpoint(self, storage_id: str) -> dict[str, Any] | None:
        from urllib.parse import quote

        try:
            found = self._session.call("GET", f"/api/v1/checkpoints/{quote(storage_id, safe='')}").get("checkpoint")
        except UnknownToMaster:
            return None
        return dict(found) if isinstance(found, dict) else None

    def _call(self, method: str, route: str, body: Any = None, **how: Any) -> dict[str, Any]:
        """Ask, once the earlier reports have arrived."""
        self._shipper.drain(self._session.timeout)
        found = self._session.call(method, route, body, **how)
        return found if isinstance(found, dict) else {}

    @property
    def _allocation(self) -> str:
        return f"/api/v1/allocations/{self._task.allocation_id}"

    @property
    def _metadata_route(self) -> str:
        return f"/api/v1/runs/{self._task.trial_id}/metadata"

"""The backend of a run under a master: each request of the script is one to the master (wire contract, §5)."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from det_core import _clock
from det_core._length import split_length
from det_core.backend._backend import Backend
from det_core.backend._master import MasterInfo, resource_sizes
from det_core.backend._shipper import Shipper
from det_core.errors import MasterError, MasterUnreachable, ReportsNotShipped, UnknownToMaster
from det_core.protocol import MasterSession

logger = logging.getLogger("det_core.master")
ACK_TIMEOUT = 30.0
"""Maximum wait of a script that is asked to stop until the master has its acknowledgement, in seconds."""
POLL_MARGIN = 10.0
"""Time that an answer may take beyond that of the poll, in seconds."""
MAX_POLL_DELAY = 1.0


@dataclass(frozen=True)
class Task:
    """Work of this process for the master.

    Attributes:
        trial_id: ID of the trial.
        experiment_id: ID of its experiment.
        trial_run_id: Number of this run of the trial.
        task_id: ID of the trial as a task.
        allocation_id: ID of this run as an allocation; None for an unmanaged one.
        searcher: Section ``searcher`` of the experiment's configuration.
        max_length: Length that the script has set; that of the configuration comes first.
    """

    trial_id: int
    experiment_id: int
    trial_run_id: int
    task_id: str
    allocation_id: str | None
    searcher: Mapping[str, Any]
    max_length: int | Mapping[str, int] | None = None


class RestBackend(Backend):
    """Sends requests to a master, each after every report that was made before it.

    Args:
        session: Session with the master; closed with this.
        master: Identity of the master; without a known release, a first request shows whether it gives operations.
        task: Work of this process for it.
        shipper: Sends the reports.
        storage_id: The master's number of the checkpoint storage.
        ship_timeout: Time that :meth:`close` may take to send the last reports, in seconds.
        has_successor: Whether another process sends what is left then, so that it is not an error.
    """

    def __init__(
        self,
        session: MasterSession,
        master: MasterInfo,
        task: Task,
        shipper: Shipper,
        *,
        storage_id: int | None = None,
        ship_timeout: float = 120.0,
        has_successor: bool = False,
    ) -> None:
        self._session = session
        # Its long poll must not hold up requests, and is interrupted alone.
        self._poll_session = session.clone()
        self._master = master
        self._task = task
        self._shipper = shipper
        self._storage_id = storage_id
        self._ship_timeout = ship_timeout
        self._has_successor = has_successor
        self._has_operations = master.has_operations
        self._reached = 0
        self._exit_reason: str | None = None
        self._ack_failed = False
        self._is_closed = False
        self._trial = f"/api/v1/trials/{task.trial_id}"
        self._signals = f"/api/v1/allocations/{task.allocation_id}/signals"
        self._metadata = f"/api/v1/runs/{task.trial_id}/metadata"

    def next_operation(self) -> int | None:
        """Return the length of the searcher's operation; from a master that gives none, that of the configuration.

        Raises:
            ValueError: If the configuration must have a length, and has none.
        """
        if self._has_operations is not False:
            route = f"{self._trial}/searcher/operation"
            try:
                answer = self._call("GET", route)
            except MasterError as e:
                # Without operations: an old search without max_length, or a master that has none at all.
                is_known = self._has_operations and self._task.searcher.get("max_length") is not None
                if e.status not in (404, 501) or is_known:
                    raise
                self._has_operations = False
            else:
                self._has_operations = True
                length = ((answer.get("op") or {}).get("validateAfter") or {}).get("length")
                if length is None:
                    raise MasterError(f"the master's answer to GET {route} holds no operation: {answer}")
                if answer.get("completed"):
                    return None
                return int(length)
        configured = self._configured_length()
        if self._reached >= configured:
            return None
        return configured

    def complete_operation(self, length: int, searcher_metric: Any) -> None:
        self._reached = max(length, self._reached)
        if self._has_operations is not False:
            body = {"op": {"length": length}, "searcherMetric": searcher_metric}
            self._post_once(f"{self._trial}/searcher/completed_operation", body)

    def acknowledge_out_of_operations(self) -> None:
        """Acknowledge that this exit is on purpose, where the searcher may have more work later."""
        if self._has_operations:
            self.acknowledge_preemption()

    def acknowledge_preemption(self) -> None:
        """Acknowledge the request to stop; if the master does not answer, once more at the end.

        The script may save its state in any case.
        """
        try:
            self._shipper.drain(ACK_TIMEOUT)
            self._acknowledge(ACK_TIMEOUT)
        except MasterUnreachable as e:
            self._ack_failed = True
            logger.warning("preemption acknowledgement failed, retrying at exit: %s", e)

    def preempted(self, timeout: float) -> bool:
        """Return whether the master wants this allocation to stop. Asks once, on connections of its own."""
        start = _clock.monotonic()
        answer = self._poll_session.call(
            "GET",
            f"{self._signals}/preemption",
            params={"timeout_seconds": int(timeout)},
            timeout=0.0,
            idle_timeout=timeout + POLL_MARGIN,
        )
        if answer.get("preempt"):
            return True
        # The poll of an allocation that has ended is answered at once: the caller would spin.
        if _clock.monotonic() - start < timeout / 2:
            time.sleep(min(MAX_POLL_DELAY, timeout / 60))
        return False

    def stop_waiting(self) -> None:
        self._poll_session.interrupt()

    def best_validation(self) -> float | None:
        route = f"/api/v1/experiments/{self._task.experiment_id}/searcher/best_searcher_validation_metric"
        try:
            metric = self._call("GET", route).get("metric")
        except UnknownToMaster:
            return None
        return None if metric is None else float(metric)

    def last_validation(self) -> int | None:
        steps = self._latest_validation().get("totalBatches")
        return None if steps is None else int(steps)

    def last_validation_metrics(self) -> Mapping[str, Any]:
        metrics = self._latest_validation().get("metrics") or {}
        return dict(metrics.get("avgMetrics") or {})

    def set_metadata(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        body = {"metadata": dict(metadata), "runId": self._task.trial_id}
        return dict(self._call("POST", self._metadata, body).get("metadata") or {})

    def get_metadata(self) -> dict[str, Any]:
        return dict(self._call("GET", self._metadata).get("metadata") or {})

    def register_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        body = {
            "uuid": checkpoint["storage_id"],
            "taskId": self._task.task_id,
            "allocationId": self._task.allocation_id,
            "storageId": self._storage_id,
            "metadata": dict(checkpoint["metadata"]),
            "resources": resource_sizes(checkpoint["resources"]),
            "state": "STATE_COMPLETED",
            "training": {},
            "reportTime": checkpoint["time"],
        }
        self._post_once("/api/v1/checkpoints", body)

    def checkpoint_deleted(self, storage_id: str, remaining: Mapping[str, int]) -> None:
        """Report the files that are left, unless the master does not know the checkpoint."""
        left = {"uuid": storage_id, "resources": {"resources": resource_sizes(remaining)}}
        try:
            self._call("PATCH", "/api/v1/checkpoints", {"checkpoints": [left]})
        except UnknownToMaster:
            logger.info("the master does not know checkpoint %s, which was deleted", storage_id)

    def checkpoint_metadata(self, storage_id: str) -> dict[str, Any] | None:
        """Return the checkpoint's metadata at the master, which may have been edited, or None if it has none."""
        try:
            answer = self._session.call("GET", f"/api/v1/checkpoints/{quote(storage_id, safe='')}")
        except UnknownToMaster:
            return None
        except MasterError as e:
            logger.warning("the metadata of checkpoint %s is read from its store: %s", storage_id, e)
            return None
        checkpoint = answer.get("checkpoint")
        if not checkpoint:
            return None
        return dict(checkpoint.get("metadata") or {})

    def early_exit(self, reason: str) -> None:
        """Keep the reason until :meth:`close`."""
        # A Determined master ends the trial some seconds after the request; ours reads it in the journal.
        self._exit_reason = reason

    def alert(self, title: str, description: str, level: str) -> None:
        data = {"title": title, "description": description, "level": f"LOG_LEVEL_{level.upper()}"}
        ids = {"experimentId": self._task.experiment_id, "trialId": self._task.trial_id}
        self._call("POST", "/api/v1/webhooks/custom", {"data": data, **ids})

    def close(self) -> None:
        """Send the last reports, and disconnect. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self.stop_waiting()
        self._poll_session.close()
        try:
            self._shipper.close(self._ship_timeout)
            if self._ack_failed:
                self._acknowledge(self._ship_timeout)
            if self._exit_reason == "INVALID_HP" and not self._master.is_det_core:
                body = {"reason": f"EXITED_REASON_{self._exit_reason}"}
                self._session.call("POST", f"{self._trial}/early_exit", body, timeout=self._ship_timeout)
        except ReportsNotShipped as e:
            # With a status the master has refused them, and refuses them from others, too.
            if not self._has_successor or e.status:
                raise
            logger.warning("%s. Whoever started this process brings them there", e)
        finally:
            self._session.close()

    def _configured_length(self) -> int:
        length = self._task.searcher.get("max_length")
        if length is None:
            length = self._task.max_length
        if length is None and self._master.is_det_core:
            return 1  # as in a bare run
        length, _ = split_length(length)
        if isinstance(length, bool) or not isinstance(length, int):  # True is an int
            raise ValueError(
                "searcher.max_length is not in the experiment's configuration, and this master gives no operations: "
                "pass core.init(max_length=…), or set searcher.max_length"
            )
        return length

    def _latest_validation(self) -> dict[str, Any]:
        trial = self._call("GET", self._trial).get("trial") or {}
        return dict(trial.get("latestValidation") or {})

    def _acknowledge(self, timeout: float) -> None:
        self._session.call("POST", f"{self._signals}/ack_preemption", timeout=timeout)

    def _post_once(self, route: str, body: Any) -> None:
        """Post what a Determined master refuses to take twice: its refusal of a repeat is the first one's answer."""
        try:
            self._call("POST", route, body)
        except MasterError as e:
            if not (e.maybe_applied and e.status in (409, 500)):
                raise

    def _call(self, method: str, route: str, body: Any = None) -> dict[str, Any]:
        """Send a request once the earlier reports are acknowledged."""
        # Else the answer could be older than what the script has reported.
        self._shipper.drain(self._session.timeout)
        answer = self._session.call(method, route, body)
        return answer if isinstance(answer, dict) else {}

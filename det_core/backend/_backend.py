"""The seam between a script and what answers its requests, and the backend of a bare run."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from det_core.journal import RunRecord, read_run

logger = logging.getLogger("det_core")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class Backend(ABC):
    """Answers the requests of a script.

    Reports (metrics, progress, status) go to the journal and need no answer. A request is journaled first, then sent
    to the backend, and answered before the call returns. Only the chief sends it, unless a method allows any rank.
    A subclass inherits the methods without a result, which do nothing: the journal has what they were called with.
    """

    @abstractmethod
    def next_operation(self) -> int | None:
        """Return the absolute length to train to next, in the searcher's units; None if there is nothing (more)."""

    def complete_operation(self, length: int, searcher_metric: Any) -> None:
        """Complete the operation of ``length``. A second call changes nothing."""

    def acknowledge_out_of_operations(self) -> None:
        """Acknowledge that this process exits because :meth:`next_operation` had no more."""

    def acknowledge_preemption(self) -> None:
        """Acknowledge that this process exits, unfinished, because of a request to stop. Any rank may call it."""

    @abstractmethod
    def preempted(self, timeout: float) -> bool:
        """Return whether this process is asked to stop; wait up to ``timeout`` seconds. Any rank may call it.

        Raises:
            MasterError: If the master does not answer, or :meth:`stop_waiting` was called.
        """

    def stop_waiting(self) -> None:
        """Cancel a call of :meth:`preempted` in progress."""

    @abstractmethod
    def best_validation(self) -> float | None:
        """Return the best searcher metric reported so far in the whole experiment. Any rank may call it."""

    @abstractmethod
    def last_validation(self) -> int | None:
        """Return the last step of which a validation was reported, or None. Any rank may call it."""

    @abstractmethod
    def last_validation_metrics(self) -> Mapping[str, Any]:
        """Return the metrics of the last validation that was reported; empty if none was."""

    @abstractmethod
    def set_metadata(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the run's metadata; return what is now set. Any rank may call it."""

    @abstractmethod
    def get_metadata(self) -> dict[str, Any]:
        """Return the run's metadata. Any rank may call it."""

    def register_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Register a complete checkpoint by its journaled record. A second call changes nothing."""

    def checkpoint_deleted(self, storage_id: str, remaining: Mapping[str, int]) -> None:
        """Record that files of a checkpoint were deleted. Any rank may call it.

        Args:
            storage_id: Storage ID of the checkpoint.
            remaining: Path to size of the files that are left.
        """

    @abstractmethod
    def checkpoint_metadata(self, storage_id: str) -> dict[str, Any] | None:
        """Return metadata that replaces that of the store, or None. Any rank may call it."""

    def early_exit(self, reason: str) -> None:
        """Announce an early end of this trial: ``INVALID_HP`` or ``USER_REQUESTED_STOP``. Any rank may call it."""

    def alert(self, title: str, description: str, level: str) -> None:
        """Alert a person. ``level``: debug, info, warning or error. Any rank may call it."""

    def close(self) -> None:
        """Deliver the rest of the journal, which is closed, and disconnect.

        Raises:
            ReportsNotShipped: If some of it was not delivered.
        """


class LocalBackend(Backend):
    """Answers requests from the journals of a bare run.

    Args:
        folder: Directory of the run.
        length: Length to train to; None means 1, with a warning to a script that asks.
        searcher_metric: Validation metric by which a validation is best. Defaults to the metrics that operations were
            completed with.
        smaller_is_better: Whether its smallest value is best.
    """

    def __init__(
        self,
        folder: Path,
        *,
        length: int | None,
        searcher_metric: str | None = None,
        smaller_is_better: bool = True,
    ) -> None:
        self._folder = folder
        self._length = length
        self._searcher_metric = searcher_metric
        self._smaller_is_better = smaller_is_better
        self._completed: int | None = None

    def next_operation(self) -> int | None:
        """Return the run's one operation until it was completed, in this restart or in an earlier one."""
        if self._completed is None:
            self._completed = max((int(r["length"]) for r in self._run().records("operation")), default=0)
            if self._length is None:
                logger.warning(
                    "operations() gives one operation of length 1: core.init(max_length=) says how long to train"
                )
        length = self._length or 1
        if self._completed >= length:
            return None
        return length

    def complete_operation(self, length: int, searcher_metric: Any) -> None:
        self._completed = max(length, self._completed or 0)

    def preempted(self, timeout: float) -> bool:
        return False  # signals preempt bare runs

    def best_validation(self) -> float | None:
        run = self._run()
        if self._searcher_metric is None:
            metrics = [r["searcher_metric"] for r in run.records("operation")]
        else:
            metrics = [row.metrics.get(self._searcher_metric) for row in run.rows("validation")]
        values = [float(v) for v in metrics if isinstance(v, (int, float)) and v == v]  # not NaN
        if not values:
            return None
        best_of = min if self._smaller_is_better else max
        return best_of(values)

    def last_validation(self) -> int | None:
        steps = (row.steps_completed for row in self._run().iter_rows("validation"))
        return max((step for step in steps if step is not None), default=None)

    def last_validation_metrics(self) -> Mapping[str, Any]:
        _, row = self._run().count_and_last("validation")
        if row is None:
            return {}
        return row.metrics

    def set_metadata(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        return dict(metadata)  # the journal has it already

    def get_metadata(self) -> dict[str, Any]:
        return dict(self._run().metadata)

    def checkpoint_metadata(self, storage_id: str) -> dict[str, Any] | None:
        return None  # the store has all metadata

    def alert(self, title: str, description: str, level: str) -> None:
        logger.log(_LEVELS[level], "%s", ": ".join(filter(None, [title, description])))

    def _run(self) -> RunRecord:
        # Read anew: other ranks, and those of earlier restarts, write into the same directory.
        return read_run(self._folder)

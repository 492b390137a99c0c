"""The backend of a bare run: answers from the run's own folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from det_core.journal import RunRecord, read_run

logger = logging.getLogger("det_core")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class LocalBackend:
    """Answers questions from the journals under ``folder``; the facts themselves are journaled by the contexts.

    Args:
        folder: the run's folder.
        length: how far the run is to be trained; None: nobody said, so 1, and a script that asks is told so.
        searcher_metric: the validation metric that is best validation's key; None: the metric that operations were
            completed with.
        smaller_is_better: which end of the metric is best.
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
        """The run's one operation, until it was completed, in this restart or in an earlier one."""
        if self._completed is None:
            self._completed = max((int(r["length"]) for r in self._run().records("operation")), default=0)
            if self._length is None:
                logger.warning(
                    "operations() gives one operation of length 1: core.init(max_length=) says how long to train"
                )
        length = self._length or 1
        return length if self._completed < length else None

    def complete_operation(self, length: int, searcher_metric: Any) -> None:
        """Remember that ``length`` was reached."""
        self._completed = max(length, self._completed or 0)

    def acknowledge_out_of_operations(self) -> None:
        """Nobody waits for it in a bare run; the journal has it."""

    def acknowledge_preemption(self) -> None:
        """Nobody waits for it in a bare run; the journal has it."""

    def preempted(self, timeout: float) -> bool:
        """Nobody asks it of a bare run: signals say when it is to stop."""
        return False

    def stop_waiting(self) -> None:
        """Nobody waits."""

    def best_validation(self) -> float | None:
        """The best value in the run's rows that no later restart has superseded."""
        run = self._run()
        if self._searcher_metric is None:
            found = [r["searcher_metric"] for r in run.records("operation")]
        else:
            found = [row.metrics.get(self._searcher_metric) for row in run.rows("validation")]
        values = [float(v) for v in found if isinstance(v, (int, float)) and v == v]
        if not values:
            return None
        return min(values) if self._smaller_is_better else max(values)

    def last_validation(self) -> int | None:
        """The last of the run's rows that no later restart has superseded."""
        steps = (row.steps_completed for row in self._run().iter_rows("validation"))
        return max((step for step in steps if step is not None), default=None)

    def last_validation_metrics(self) -> Mapping[str, Any]:
        """Return those of the last of the run's rows that no later restart has superseded."""
        _, row = self._run().count_and_last("validation")
        return {} if row is None else row.metrics

    def set_metadata(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """The journal has it already."""
        return dict(metadata)

    def get_metadata(self) -> dict[str, Any]:
        """What was set last, by any rank in any restart."""
        return dict(self._run().metadata)

    def register_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """The journal has it already."""

    def checkpoint_deleted(self, storage_id: str, remaining: Mapping[str, int]) -> None:
        """The journal has it already."""

    def checkpoint_metadata(self, storage_id: str) -> dict[str, Any] | None:
        """The store knows it all."""
        return None

    def early_exit(self, reason: str) -> None:
        """The journal has it already."""

    def close(self) -> None:
        """The run's folder is where it all belongs."""

    def alert(self, title: str, description: str, level: str) -> None:
        """Log it: a bare run has nobody else to tell."""
        logger.log(_LEVELS[level], "%s: %s" if description else "%s%s", title, description)

    def _run(self) -> RunRecord:
        return read_run(self._folder)

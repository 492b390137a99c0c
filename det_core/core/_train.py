"""Reports of a training script: metrics, status, progress, metadata."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from det_core._metadata import validate_metadata
from det_core.backend import Backend
from det_core.core._distributed import DistributedContext
from det_core.core._rank_group import exit_if_job_ended
from det_core.core._tensorboard import TensorboardFiles
from det_core.errors import ContextClosed
from det_core.journal import Journal


class EarlyExitReason(enum.Enum):
    """Reason why a trial exits early."""

    INVALID_HP = "EXITED_REASON_INVALID_HP"
    """The hyperparameters cannot be trained; reported for the script when it raises :class:`det_core.InvalidHP`."""
    USER_REQUESTED_STOP = "EXITED_REASON_USER_REQUESTED_STOP"
    """The script decided to stop."""


class TrainContext:
    """Reports of metrics, status, progress and metadata. Any rank may report; none waits for an fsync or a network.

    Args:
        distributed: the ranks that train together.
        journal: the journal of this rank.
        backend: answers requests.
        tensorboard: the event files of this rank.
    """

    def __init__(
        self, distributed: DistributedContext, journal: Journal, backend: Backend, tensorboard: TensorboardFiles
    ) -> None:
        self._distributed = distributed
        self._journal = journal
        self._backend = backend
        self._tensorboard = tensorboard
        self._closed = False
        self._check_after_report = tensorboard.enabled
        if distributed.communicator is not None:
            distributed.communicator.on_abort(self._on_abort)

    def report_training_metrics(
        self,
        steps_completed: int,
        metrics: Mapping[str, Any],
        batch_metrics: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Report training metrics.

        Args:
            steps_completed: global step, such as the batches trained in all; an integer of 0 or more.
            metrics: values that JSON can hold; also numpy and torch scalars, NaN and infinities, and tensors and
                arrays of up to 10,000 elements.
            batch_metrics: one dictionary for each batch since the last report, stored with the row.

        Raises:
            TypeError, ValueError: If an argument cannot be stored (the message has the path of the key), or this group
                and step already have another value for a key.
        """
        self._journal.metrics("training", steps_completed, metrics, batch_metrics)
        if self._check_after_report:
            self._after_report()

    def report_validation_metrics(self, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Report validation metrics; see :meth:`report_training_metrics`."""
        self._journal.metrics("validation", steps_completed, metrics)
        if self._check_after_report:
            self._after_report()

    def report_metrics(self, group: str, steps_completed: int, metrics: Mapping[str, Any]) -> None:
        """Report metrics of any group; ``training`` and ``validation`` are the built-in ones.

        Args:
            group: a name without ``.``.
            steps_completed: as in :meth:`report_training_metrics`.
            metrics: as in :meth:`report_training_metrics`.
        """
        self._journal.metrics(group, steps_completed, metrics)
        if self._check_after_report:
            self._after_report()

    def set_status(self, status: str) -> None:
        """Report a short text for people, such as the current phase of the training."""
        self._require_open("set_status")
        if not isinstance(status, str):
            raise TypeError(f"status must be a string, not {type(status).__name__}")
        self._journal.record("status", {"status": status})

    def report_progress(self, progress: float) -> None:
        """Report the fraction of the whole training that is done.

        Args:
            progress: a fraction from 0 to 1.
        """
        self._require_open("report_progress")
        if isinstance(progress, bool) or not isinstance(progress, (int, float)):
            raise TypeError(f"progress must be a number from 0 to 1, not {type(progress).__name__}")
        if math.isnan(progress) or not 0 <= progress <= 1:
            raise ValueError(f"progress is {progress}: expected a fraction from 0 to 1")
        self._journal.record("progress", {"fraction": float(progress)})

    def set_metadata(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the run's metadata, and return them.

        Raises:
            ValueError: If they exceed a limit: strings of 5,000 characters, keys of 50 without any of ``$.[]``, lists
                of 100, 10 levels, 1,000 values.
        """
        self._require_open("set_metadata")
        checked = validate_metadata(metadata)
        self._journal.record("metadata", {"metadata": checked})
        return self._backend.set_metadata(checked)

    def get_metadata(self) -> dict[str, Any]:
        """Return the run's metadata; empty if none were set."""
        self._require_open("get_metadata")
        return self._backend.get_metadata()

    def get_experiment_best_validation(self) -> float | None:
        """Return the best searcher metric reported so far, or None. Any rank may call it.

        In a bare run it is the metric that ``core.init(searcher_metric=, smaller_is_better=)`` names, else the one
        that operations were completed with.
        """
        self._require_open("get_experiment_best_validation")
        return self._backend.best_validation()

    def report_early_exit(self, reason: EarlyExitReason) -> None:
        """Report why the trial exits early. Automatic for :class:`det_core.InvalidHP`."""
        self._require_open("report_early_exit")
        if not isinstance(reason, EarlyExitReason):
            raise TypeError(f"reason must be an EarlyExitReason, not {reason!r}")
        self._journal.record("early_exit", {"reason": reason.name})
        self._backend.early_exit(reason.name)

    def get_tensorboard_path(self) -> Path:
        """Return the directory for this rank's event files, created if necessary."""
        return self._tensorboard.directory()

    def upload_tensorboard_files(
        self,
        selector: Callable[[Path], bool] = lambda _: True,
        mangler: Callable[[Path, int], Path] = lambda path, _: path,
    ) -> None:
        """Copy this rank's event files to the checkpoint storage, in the mode MANUAL.

        Args:
            selector: called with each path below :meth:`get_tensorboard_path`; returns whether to copy the file.
            mangler: called with that path and the rank; returns the path of the copy, so that ranks do not overwrite
                each other's files.

        Raises:
            RuntimeError: In the mode AUTO, which copies files itself.
        """
        self._require_open("upload_tensorboard_files")
        self._tensorboard.upload(selector, mangler)

    def write_scalars(self, steps_completed: int, values: Mapping[str, float]) -> None:
        """Write numbers to this rank's event file under their own tags, without reporting them.

        For what TensorBoard should show in addition to the metrics, in both modes. Takes about 2 µs: a thread writes
        the file once a second. At most 100,000 calls are queued for it; more are dropped, with a warning. Without the
        extra ``tensorboard`` nothing is written, with one warning.

        Args:
            steps_completed: step of the points.
            values: number by tag; other values are ignored.
        """
        self._tensorboard.add_scalars(steps_completed, values)

    def sync_tensorboard(self) -> None:
        """Copy this rank's changed event files to the checkpoint storage now, in both modes.

        In the mode AUTO the chief also copies them with every checkpoint and at the end. Files that a writer of yours
        puts into :meth:`get_tensorboard_path`, such as ``torch.utils.tensorboard.SummaryWriter``, are included once it
        has flushed them. The files of a worker are stored in the directory ``rank-N`` next to the chief's. Without a
        ``checkpoint_storage``, the files of a run stay where they are.

        Raises:
            TensorboardError: If a file cannot be read or copied; the message names it.
        """
        self._require_open("sync_tensorboard")
        self._tensorboard.upload_changed()

    def close(self) -> None:
        """Write and copy what is missing in the event files, and close them."""
        self._closed = True
        self._tensorboard.close()

    def _after_report(self) -> None:
        if self._tensorboard.enabled:
            self._tensorboard.start()
        exit_if_job_ended(self._distributed)

    def _on_abort(self) -> None:
        self._check_after_report = True

    def _require_open(self, method: str) -> None:
        if self._closed:
            raise ContextClosed(f"{method}() was called on a context that is closed")
        exit_if_job_ended(self._distributed)

"""Call and save user-defined trials: the interface for all classes, and PyTorchTrial."""

from __future__ import annotations

import abc
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from det_core._training.data_order import Position
from det_core._training.metric_buffer import MetricBuffer
from det_core._training.strategy import load_model
from det_core.pytorch._callback import Hooks
from det_core.pytorch._checkpoint import CheckpointContent, Checkpoints, apply
from det_core.pytorch._context import PyTorchTrialContext
from det_core.pytorch._loaders import Loaders
from det_core.pytorch._trial import PyTorchTrial, Trial, overrides, takes_batch_idx
from det_core.pytorch._trial_context import TrialContext

logger = logging.getLogger("det_core.pytorch")


class TrialSteps(abc.ABC):
    """Interface of trials for the runner. All ranks call all methods together, except ``train`` and ``evaluate``.

    Attributes:
        buffer: metrics of the batches that :meth:`train` trained.
        rows_per_batch: number of rows of metrics for one batch.
        saves_alone: whether the chief can save without the other ranks.
    """

    rows_per_batch = 1
    saves_alone = True

    def __init__(self, trial: Trial, context: TrialContext, loaders: Loaders) -> None:
        self.buffer = MetricBuffer()
        self._trial: Any = trial
        self._loaders = loaders
        self._distributed = context.distributed
        self._evaluates_full = overrides(trial, "evaluate_full_dataset")
        self._with_batch_idx = takes_batch_idx(trial)

    @property
    def loader_error(self) -> Exception | None:
        """Last error of a loader, or None."""
        return self._loaders.error

    @abc.abstractmethod
    def read(self, folder: Path, storage_id: str) -> CheckpointContent:
        """Read a checkpoint without applying it; ``folder`` exists until :meth:`apply` has returned."""

    @abc.abstractmethod
    def loaders(self, position: Position, state: Mapping[str, Any] | None) -> tuple[Iterator[Any] | None, int | None]:
        """Build the loaders; return the training batches from ``position`` on, and the length of an epoch.

        Args:
            position: return value of :meth:`position` at the checkpoint.
            state: saved position in a torch DataLoader of the user.
        """

    @abc.abstractmethod
    def apply(self, content: CheckpointContent) -> None:
        """Restore everything except the random states."""

    def load_models_only(self, content: CheckpointContent) -> bool:
        """Load the models from a checkpoint of a later fit; return False if they do not fit."""
        return False

    @abc.abstractmethod
    def train(self, batches: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> None:
        """Train on the next batch, and add its metrics to the buffer."""

    @abc.abstractmethod
    def validation(self) -> Iterator[Any]:
        """Return the arguments for :meth:`evaluate` in a new pass over this rank's share."""

    @abc.abstractmethod
    def evaluate(self, batch: Any, batch_idx: int) -> Mapping[str, Any] | None:
        """Return the metrics of a validation batch, or None if this rank does not report."""

    def evaluate_full(self) -> Mapping[str, Any] | None:
        """Return the metrics of the whole validation set on the chief, None on the others."""
        if self._distributed.rank != 0:
            return None
        metrics = self._trial.evaluate_full_dataset(data_loader=self._loaders.whole_validation())
        return as_dictionary(metrics, "evaluate_full_dataset")

    def position(self, start: Position, batches_trained: int) -> Position:
        """Return the position in the data after this number of batches of this rank, from ``start`` on."""
        return self._loaders.position(start, batches_trained)

    @abc.abstractmethod
    def save(self, content: CheckpointContent, *, alone: bool = False) -> str:
        """Save a checkpoint; return its storage_id on every rank.

        Args:
            content: counters and position.
            alone: call no collective, because the chief is about to leave with an error.
        """


class PyTorchTrialSteps(TrialSteps):
    """Steps of a :class:`PyTorchTrial`."""

    def __init__(self, trial: PyTorchTrial, context: PyTorchTrialContext, hooks: Hooks) -> None:
        super().__init__(trial, context, Loaders(trial, context))
        self._context = context
        self._hooks = hooks
        self._checkpoints = Checkpoints(trial, context, hooks)
        self._add = self.buffer.add
        self._train_batch = trial.train_batch
        self._move = context._mover()
        self._aggregation = context._aggregation

    def read(self, folder: Path, storage_id: str) -> CheckpointContent:
        """Read the shared files, and the random states of this rank."""
        return self._checkpoints.read(folder)

    def loaders(self, position: Position, state: Mapping[str, Any] | None) -> tuple[Iterator[Any], int | None]:
        """Build the training loader, then the validation loader, and compare the data among ranks."""
        batches, length = self._loaders.build(position, full_validation=self._evaluates_full, state=state)
        self._context._check_alike(self._loaders.lengths)
        return batches, length

    def apply(self, content: CheckpointContent) -> None:
        """Restore objects in the order of wrapping, then callbacks."""
        self._hooks.call("on_checkpoint_load_start", content.state)
        apply(content, self._context, self._hooks)

    def load_models_only(self, content: CheckpointContent) -> bool:
        """Load all models, if they are as many as the trial has wrapped."""
        models = self._context.models
        saved = content.state.get("models_state_dict", [])
        try:
            for model, state in zip(models, saved, strict=True):
                load_model(self._context._strategy.unwrap(model), state)
        except (RuntimeError, ValueError):
            return False
        return True

    def train(self, batches: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> None:
        """Move the batch, call ``train_batch``, and step the scaler and schedulers."""
        assert batches is not None
        context = self._context
        aggregation = self._aggregation
        context._batch = batch_idx
        context._epoch = epoch_idx
        context._updates = updates = aggregation == 1 or (batch_idx + 1) % aggregation == 0
        batch = self._move(next(batches))
        if updates:
            metrics = self._train_batch(batch=batch, epoch_idx=epoch_idx, batch_idx=batch_idx)
        else:
            # Around all of it: DDP decides in the forward pass whether to exchange gradients.
            with context._strategy.no_sync(context.models):
                metrics = self._train_batch(batch=batch, epoch_idx=epoch_idx, batch_idx=batch_idx)
        if type(metrics) is not dict:
            metrics = as_metrics(metrics, batch_idx)
        self._add(metrics)
        if updates:
            if context._auto_amp is not None:
                context._scaler.update()
            for scheduler in context.lr_schedulers:
                for _ in range(scheduler.steps_after(batch_idx, aggregation, context._epoch_len)):
                    scheduler.step()

    def validation(self) -> Iterator[Any]:
        """Return this rank's batches."""
        return self._loaders.validation()[0]

    def evaluate(self, batch: Any, batch_idx: int) -> Mapping[str, Any]:
        """Move the batch and call ``evaluate_batch``, with ``batch_idx`` if it has that parameter."""
        options = {}
        if self._with_batch_idx:
            options["batch_idx"] = batch_idx
        metrics = self._trial.evaluate_batch(batch=self._move(batch), **options)
        return as_dictionary(metrics, "evaluate_batch", batch_idx)

    def save(self, content: CheckpointContent, *, alone: bool = False) -> str:
        """Save on the chief, with random states and positions in user-defined loaders of every rank."""
        content.loader = self._loaders.state()
        return self._checkpoints.save(content, alone=alone)


def as_metrics(value: Any, batch_idx: int) -> dict[str, Any]:
    """Convert the return value of ``train_batch`` to a dictionary of metrics; a number becomes ``loss``."""
    if isinstance(value, Mapping):
        return dict(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, Tensor) or is_number or (hasattr(value, "dtype") and getattr(value, "shape", None) == ()):
        return {"loss": value}
    raise TypeError(
        f"train_batch() returned {_type(value)} for batch {batch_idx}: expected a dictionary of metrics, or the loss"
    )


def as_dictionary(metrics: Any, method: str, batch_idx: int | None = None) -> Mapping[str, Any]:
    """Return ``metrics`` if it is a dictionary; raise TypeError otherwise."""
    if isinstance(metrics, Mapping):
        return metrics
    if batch_idx is not None:
        method = f"{method}() for batch {batch_idx}"
    else:
        method = f"{method}()"
    raise TypeError(f"{method} returned {_type(metrics)}: expected a dictionary of metrics")


def _type(value: Any) -> str:
    if value is None:
        return "None"
    return f"a {type(value).__name__}"

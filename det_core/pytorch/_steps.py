"""How a user's class is called and saved: what all trials have in common, and a PyTorchTrial's way of it."""

from __future__ import annotations

import abc
import logging
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from det_core._training.data_order import Position
from det_core._training.metric_buffer import MetricBuffer
from det_core._training.strategy import load_model
from det_core.pytorch._callback import Hooks
from det_core.pytorch._checkpoint import Checkpoints, Content, apply
from det_core.pytorch._context import PyTorchTrialContext
from det_core.pytorch._loaders import Loaders
from det_core.pytorch._trial import PyTorchTrial, Trial, overrides, takes_batch_idx
from det_core.pytorch._trial_context import TrialContext

logger = logging.getLogger("det_core.pytorch")
_AS_EVER = nullcontext()


class TrialSteps(abc.ABC):
    """What the runner asks of a trial. Every rank calls every method, in step, but for ``train`` and ``evaluate``.

    Attributes:
        buffer: where :meth:`train` puts the metrics of its batches.
        rows_per_batch: how many rows of metrics that is for one batch.
        saves_alone: whether the chief can save what there is without the other ranks.
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
        """The last error that a loader has raised."""
        return self._loaders.error

    @abc.abstractmethod
    def read(self, folder: Path, storage_id: str) -> Content:
        """What a checkpoint holds; nothing is applied yet, and ``folder`` stays until it is."""

    @abc.abstractmethod
    def loaders(self, position: Position, state: Mapping[str, Any] | None) -> tuple[Iterator[Any] | None, int | None]:
        """Build the loaders; the training batches from ``position`` on, and how many of them are an epoch.

        Args:
            position: what :meth:`position` returned at the checkpoint.
            state: the checkpoint's position in a torch DataLoader of the user's.
        """

    @abc.abstractmethod
    def apply(self, content: Content) -> None:
        """Put models, optimizers and all else but the random states to where they were."""

    def take_models(self, content: Content) -> bool:
        """Put models alone to where they were in a later fit; False: they do not fit, or are nobody else's to load."""
        return False

    @abc.abstractmethod
    def train(self, batches: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> None:
        """Train on the next batch; its metrics go into the buffer."""

    @abc.abstractmethod
    def validation(self) -> Iterator[Any]:
        """What :meth:`evaluate` is called with, one after the other, in a new pass over this rank's share."""

    @abc.abstractmethod
    def evaluate(self, batch: Any, batch_idx: int) -> Mapping[str, Any] | None:
        """The metrics of a validation batch; None: this rank does not report."""

    def evaluate_full(self) -> Mapping[str, Any] | None:
        """The metrics of the whole validation set, on the chief; None on the others."""
        if self._distributed.rank != 0:
            return None
        metrics = self._trial.evaluate_full_dataset(data_loader=self._loaders.whole_validation())
        return as_dictionary(metrics, "evaluate_full_dataset")

    def position(self, start: Position, batches_trained: int) -> Position:
        """Where the data is after so many batches of this rank, if it began at ``start``."""
        return self._loaders.position(start, batches_trained)

    @abc.abstractmethod
    def save(self, content: Content, *, alone: bool = False) -> str:
        """Save a checkpoint; its storage_id, on every rank.

        Args:
            content: counters and position.
            alone: on the chief, without a word to the other ranks, because of an error that is under way there.
        """


class PyTorchTrialSteps(TrialSteps):
    """How a :class:`PyTorchTrial` is called and saved."""

    def __init__(self, trial: PyTorchTrial, context: PyTorchTrialContext, hooks: Hooks) -> None:
        super().__init__(trial, context, Loaders(trial, context))
        self._context, self._hooks = context, hooks
        self._checkpoints = Checkpoints(trial, context, hooks)
        self._add, self._train_batch = self.buffer.add, trial.train_batch
        self._move = context._mover()
        self._aggregation = context._aggregation

    def read(self, folder: Path, storage_id: str) -> Content:
        """Every rank reads the same files, and its own random states."""
        return self._checkpoints.read(folder)

    def loaders(self, position: Position, state: Mapping[str, Any] | None) -> tuple[Iterator[Any], int | None]:
        """Training first, then validation, as users' classes are used to. Ranks that have different data say so."""
        batches, length = self._loaders.build(position, full_validation=self._evaluates_full, state=state)
        self._context._check_alike(self._loaders.lengths)
        return batches, length

    def apply(self, content: Content) -> None:
        """In the order of wrapping; callbacks last."""
        self._hooks.call("on_checkpoint_load_start", content.state)
        apply(content, self._context, self._hooks)

    def take_models(self, content: Content) -> bool:
        """As many of them as this trial has wrapped."""
        models, saved = self._context.models, content.state.get("models_state_dict", [])
        try:
            for model, state in zip(models, saved, strict=True):
                load_model(self._context._strategy.unwrap(model), state)
        except (RuntimeError, ValueError):
            return False
        return True

    def train(self, batches: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> None:
        """Move the batch, call ``train_batch``, step scalers and schedulers."""
        assert batches is not None
        context, aggregation = self._context, self._aggregation
        context._batch, context._epoch = batch_idx, epoch_idx
        context._updates = updates = aggregation == 1 or (batch_idx + 1) % aggregation == 0
        batch = self._move(next(batches))
        # DDP decides in the forward pass already whether it exchanges gradients
        with _AS_EVER if updates else context._strategy.no_sync(context.models):
            metrics = self._train_batch(batch=batch, epoch_idx=epoch_idx, batch_idx=batch_idx)
        self._add(metrics if type(metrics) is dict else as_metrics(metrics, batch_idx))
        if updates:
            if context._auto_amp is not None:
                context._scaler.update()
            for scheduler in context.lr_schedulers:
                for _ in range(scheduler.steps_after(batch_idx, aggregation, context._epoch_len)):
                    scheduler.step()

    def validation(self) -> Iterator[Any]:
        """This rank's batches."""
        return self._loaders.validation()[0]

    def evaluate(self, batch: Any, batch_idx: int) -> Mapping[str, Any]:
        """Move the batch and call ``evaluate_batch``, with ``batch_idx`` if it takes that."""
        options = {"batch_idx": batch_idx} if self._with_batch_idx else {}
        metrics = self._trial.evaluate_batch(batch=self._move(batch), **options)
        return as_dictionary(metrics, "evaluate_batch", batch_idx)

    def save(self, content: Content, *, alone: bool = False) -> str:
        """The chief saves; every rank contributes its random states, and its position in a loader of the user's."""
        content.loader = self._loaders.state()
        return self._checkpoints.save(content, alone=alone)


def as_metrics(value: Any, batch_idx: int) -> dict[str, Any]:
    """What ``train_batch`` returned as a dictionary of metrics: a loss alone is called ``loss``."""
    if isinstance(value, Mapping):
        return dict(value)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, Tensor) or number or (hasattr(value, "dtype") and getattr(value, "shape", None) == ()):
        return {"loss": value}
    raise TypeError(
        f"train_batch() returned {_a(value)} for batch {batch_idx}: expected a dictionary of metrics, or the loss"
    )


def as_dictionary(metrics: Any, method: str, batch_idx: int | None = None) -> Mapping[str, Any]:
    """What an ``evaluate_…()`` returned, if that is a dictionary of metrics."""
    if isinstance(metrics, Mapping):
        return metrics
    where = "" if batch_idx is None else f" for batch {batch_idx}"
    raise TypeError(f"{method}() returned {_a(metrics)}{where}: expected a dictionary of metrics")


def _a(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"

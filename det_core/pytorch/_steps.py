"""How a user's class is called and saved: the protocol, and a PyTorchTrial's way of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from det_core._training.data_order import Position
from det_core._training.metric_buffer import MetricBuffer
from det_core.pytorch._callback import Hooks
from det_core.pytorch._checkpoint import Checkpoints, Content, apply, read
from det_core.pytorch._context import PyTorchTrialContext
from det_core.pytorch._data import Loaders
from det_core.pytorch._trial import PyTorchTrial, overrides, takes_batch_idx

logger = logging.getLogger("det_core.pytorch")
_AS_EVER = nullcontext()


class TrialSteps(Protocol):
    """What the runner asks of a trial. Every rank calls every method, in step, but for ``train`` and ``evaluate``."""

    buffer: MetricBuffer
    """Where :meth:`train` puts the metrics of its batches."""
    rows_per_batch: int
    """How many rows of metrics that is for one batch."""
    saves_alone: bool
    """Whether the chief can save what there is without the other ranks."""

    def read(self, folder: Path, storage_id: str) -> Content:
        """What a checkpoint holds; nothing is applied yet, and ``folder`` stays until it is."""

    def loaders(self, position: Position) -> tuple[Iterator[Any] | None, int | None]:
        """Build the loaders; the training batches from ``position`` on, and how many of them are an epoch."""

    def apply(self, content: Content) -> None:
        """Put models, optimizers and all else but the random states to where they were."""

    def train(self, batches: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> None:
        """Train on the next batch; its metrics go into the buffer."""

    def validation(self) -> tuple[Iterator[Any] | None, int | None]:
        """This rank's validation batches, and how many there are, if that is known."""

    def evaluate(self, batches: Iterator[Any] | None, batch_idx: int) -> Mapping[str, Any] | None:
        """The metrics of the next validation batch; None: this rank does not report.

        Raises:
            StopIteration: there is none left.
        """

    def evaluate_full(self) -> Mapping[str, Any] | None:
        """The metrics of the whole validation set, on the chief; None on the others."""

    def position(self, start: Position, batches_trained: int) -> Position:
        """Where the data is after so many batches of this rank, if it began at ``start``."""

    def save(self, content: Content, *, alone: bool = False) -> str:
        """Save a checkpoint; its storage_id, on every rank.

        Args:
            content: counters and position.
            alone: on the chief, without a word to the other ranks, because of an error that is under way there.
        """


class PyTorchTrialSteps:
    """How a :class:`PyTorchTrial` is called and saved.

    Args:
        trial: the user's.
        context: the one that it was built with.
        hooks: its callbacks.
    """

    rows_per_batch = 1
    saves_alone = True

    def __init__(self, trial: PyTorchTrial, context: PyTorchTrialContext, hooks: Hooks) -> None:
        self.buffer = MetricBuffer()
        self._trial, self._context, self._hooks = trial, context, hooks
        self._loaders = Loaders(trial, context)
        self._checkpoints = Checkpoints(trial, context, hooks)
        self._add = self.buffer.add
        self._move = context._mover()
        self._train_batch = trial.train_batch
        self._aggregation = context._aggregation
        self._evaluates_full = overrides(trial, "evaluate_full_dataset")
        self._with_batch_idx = takes_batch_idx(trial)

    def read(self, folder: Path, storage_id: str) -> Content:
        """Every rank reads the same files, and its own random states."""
        return read(folder, self._context.distributed)

    def loaders(self, position: Position) -> tuple[Iterator[Any], int | None]:
        """Training first, then validation, as users' classes are used to."""
        return self._loaders.build(position, full_validation=self._evaluates_full)

    def apply(self, content: Content) -> None:
        """In the order of wrapping; callbacks last."""
        self._hooks.call("on_checkpoint_load_start", content.state)
        apply(content, self._context, self._hooks)

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

    def validation(self) -> tuple[Iterator[Any], int | None]:
        """A new pass over this rank's share."""
        return self._loaders.validation()

    def evaluate(self, batches: Iterator[Any] | None, batch_idx: int) -> Mapping[str, Any]:
        """Move the batch and call ``evaluate_batch``, with ``batch_idx`` if it takes that."""
        assert batches is not None
        batch = self._move(next(batches))
        if self._with_batch_idx:
            metrics = self._trial.evaluate_batch(batch=batch, batch_idx=batch_idx)
        else:
            metrics = self._trial.evaluate_batch(batch=batch)  # type: ignore[call-arg]
        return as_dictionary(metrics, "evaluate_batch", batch_idx)

    def evaluate_full(self) -> Mapping[str, Any] | None:
        """On the chief alone, over the whole set."""
        if self._context.distributed.rank != 0:
            return None
        metrics = self._trial.evaluate_full_dataset(data_loader=self._loaders.whole_validation())
        return as_dictionary(metrics, "evaluate_full_dataset")

    def position(self, start: Position, batches_trained: int) -> Position:
        """As the loaders have dealt batches out."""
        return self._loaders.position(start, batches_trained)

    def save(self, content: Content, *, alone: bool = False) -> str:
        """The chief saves; every rank contributes its random states."""
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

"""Callbacks of the Trainer: actions beside the loop, at the events that it fires."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from det_core._env import Environment
from det_core._notices import write_quietly
from det_core._training.data_order import length_of
from det_core._training.progress_line import ProgressLine
from det_core.accelerated._base import after_update, session_of
from det_core.accelerated._events import (
    NAN_LOSS,
    CallbackHandler,
    CallbackMethodNotImplementedError,
    StopTrainingError,
    TrainerCallback,
)
from det_core.accelerated._saving import (
    EarlyStoppingCallback,
    ModelEmaCallback,
    SaveBestModelCallback,
    SaveTrainingStateCallback,
    WSDCheckpointCallback,
)
from det_core.accelerated.utils import DataLoaderSlice

__all__ = [
    "CallbackHandler", "CallbackMethodNotImplementedError", "ConvertSyncBatchNormCallback", "EarlyStoppingCallback",
    "LimitBatchesCallback", "LimitEvalStepsCallback", "LogMetricsCallback", "ModelEmaCallback",
    "MoveModulesToDeviceCallback", "PrintProgressCallback", "ProgressBarCallback", "SaveBestModelCallback",
    "SaveTrainingStateCallback", "StepBasedEvaluationCallback", "StopTrainingError", "TerminateOnNaNCallback",
    "TrainerCallback", "WSDCheckpointCallback", "get_default_callbacks",
]  # fmt: skip


class MoveModulesToDeviceCallback(TrainerCallback):
    """Mover of modules among the trainer's attributes, such as a loss function with weights, to its device."""

    def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
        for name, value in vars(trainer).items():
            if name != "model" and isinstance(value, nn.Module):
                value.to(trainer.device)

    on_evaluation_run_start = on_training_run_start


class TerminateOnNaNCallback(TrainerCallback):
    """End of the run at a loss that is NaN or infinite; ``Trainer(on_nan=)`` then decides about the process.

    On a GPU, losses are checked after their copies have arrived, one or more steps late, so that steps do not wait.
    """

    def __init__(self) -> None:
        self.triggered = False
        self._late = _LateValue()

    def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
        self.triggered = False
        self._late = _LateValue()

    def on_train_step_end(self, trainer: Any, batch: Any = None, batch_output: Any = None, **kwargs: Any) -> None:
        if type(self).check_for_nan_after_batch is not TerminateOnNaNCallback.check_for_nan_after_batch:
            self.check_for_nan_after_batch(batch_output, "training")
            return
        loss = None
        session = session_of(trainer)
        if session is not None:
            loss = session.batch_loss  # a float on a CPU: the loss tracker has read it already
        if loss is None:
            loss = batch_output["loss"]
        if type(loss) is not float:
            loss = self._late.next(loss)
        if not math.isfinite(loss):
            self._stop("training")

    def on_train_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        """Check the last loss, whose copy from a GPU may be pending."""
        if self._late.last is not None and not math.isfinite(float(self._late.last)):
            self._stop("training")

    def on_eval_step_end(self, trainer: Any, batch: Any = None, batch_output: Any = None, **kwargs: Any) -> None:
        self.check_for_nan_after_batch(batch_output, "validation")

    def check_for_nan_after_batch(self, batch_output: Any, step: str | None = None) -> None:
        """Stop if the loss of a batch is NaN or infinite; an override is also called after each training batch.

        Args:
            batch_output: output of the step, with ``loss``.
            step: ``training`` or ``validation``.
        """
        if not math.isfinite(float(torch.as_tensor(batch_output["loss"]).detach().mean())):
            self._stop(str(step))

    def _stop(self, kind: str) -> None:
        self.triggered = True
        raise StopTrainingError(f"{NAN_LOSS} {kind} step")


class _LateValue:
    """Latest number that a device has sent to the host, without waiting for it."""

    def __init__(self) -> None:
        self.last: Tensor | None = None
        self._host: Tensor | None = None
        self._arrived: Any = None

    def next(self, tensor: Any) -> float:
        """Copy a number to the host unless a copy is in flight; return the last that arrived, or 0 before the first."""
        self.last = tensor = torch.as_tensor(tensor).detach().mean()
        if tensor.device.type != "cuda":
            return float(tensor)
        if self._arrived is not None and not self._arrived.query():
            return 0.0
        value = 0.0
        if self._host is not None:
            value = self._host.item()
        else:
            self._host = torch.empty((), pin_memory=True)  # copies to other memory block the host
            self._arrived = torch.cuda.Event()
        self._host.copy_(tensor.float(), non_blocking=True)
        self._arrived.record()
        return value


class PrintProgressCallback(TrainerCallback):
    """Printer of the start and end of runs, epochs and evaluations."""

    def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
        trainer.print("\nStarting training run")

    def on_train_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
        trainer.print(f"\nStarting epoch {trainer.run_history.current_epoch}")

    def on_eval_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
        trainer.print("\nStarting eval epoch")

    def on_training_run_end(self, trainer: Any, **kwargs: Any) -> None:
        trainer.print("Finishing training run")

    def on_evaluation_run_start(self, trainer: Any, **kwargs: Any) -> None:
        trainer.print("\nStarting evaluation run")

    def on_evaluation_run_end(self, trainer: Any, **kwargs: Any) -> None:
        trainer.print("Finishing evaluation run")


class _Bar:
    """Interface of the original's tqdm bars, for scripts that call them; batches are counted without it.

    Attributes:
        more: numbers displayed after the speed.
    """

    def __init__(self, owner: ProgressBarCallback) -> None:
        self._owner = owner
        self.more = dict[str, Any]()

    def update(self, n: float = 1) -> None:
        """Ignore the call: the callback counts batches."""

    def set_postfix(self, *ordered: Any, **values: Any) -> None:
        """Display numbers after the speed."""
        self.more = {**dict(*ordered), **values}

    def set_description(self, desc: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Ignore the call: the line has no description."""

    def close(self) -> None:
        """Remove the line."""
        self._owner.on_run_closed(None)


class ProgressBarCallback(TrainerCallback):
    """One line on stderr with batches, speed and the loss: live on a terminal and in a notebook.

    Elsewhere, such as in a log file, it is written once at the end of each epoch, without the loss, which is printed;
    under a master to stdout.

    Attributes:
        pbar, eval_pbar: bar of the current epoch, with ``update()``, ``set_postfix()``, ``close()``; None outside.
    """

    pbar: _Bar | None = None
    eval_pbar: _Bar | None = None

    def __init__(self) -> None:
        self._line: ProgressLine | None = None
        self._total: int | None = None
        self._first = self._done = 0
        self._began = 0.0

    def on_train_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
        self._begin(trainer, trainer._train_dataloader, trainer._det_core.run.batch)
        self.pbar = _Bar(self)

    def on_train_step_end(self, trainer: Any, **kwargs: Any) -> None:
        """Count a batch; the line is redrawn at intervals."""
        self._advance(self.pbar, {"loss": trainer._det_core.batch_loss})

    def on_train_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        self._end(trainer, "training")

    def on_eval_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
        """Begin a line, except within a training epoch, whose line continues."""
        if not trainer._det_core.run.in_epoch:
            self._begin(trainer, trainer._eval_dataloader, 0)
        self.eval_pbar = _Bar(self)

    def on_eval_step_end(self, trainer: Any, **kwargs: Any) -> None:
        if not trainer._det_core.run.in_epoch:
            self._advance(self.eval_pbar, {})

    def on_eval_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        self.eval_pbar = None
        if not trainer._det_core.run.in_epoch:
            self._end(trainer, "evaluation")

    def on_run_closed(self, trainer: Any, **kwargs: Any) -> None:
        """Close a line left open by an error; fired after every run."""
        self.pbar = self.eval_pbar = None
        if self._line is not None:
            self._line.close()
            self._line = None

    def _begin(self, trainer: Any, loader: Any, done: int) -> None:
        self._total = length_of(loader)
        self._first = done
        self._done = done
        self._began = time.monotonic()
        self._line = None
        if trainer._det_core.strategy.is_local_main_process:
            self._line = ProgressLine()

    def _advance(self, bar: _Bar | None, values: dict[str, Any]) -> None:
        self._done += 1
        if self._line is not None and self._line.shown:
            if bar is not None:  # closed by the user, or by a subclass
                values |= bar.more
            self._line.update(self._done, self._total, values)

    def _end(self, trainer: Any, kind: str) -> None:
        if self._line is not None and not self._line.shown and self._done:
            rate = (self._done - self._first) / (time.monotonic() - self._began)
            text = f"{kind}: {self._done}/{self._total or self._done} batches  {rate:.3g} batches/s"
            if trainer._det_core.under_master:  # its logs interleave stdout and stderr of a rank at random
                trainer.print(text)
            else:
                write_quietly(f"{text}\n", sys.stderr)
        self.on_run_closed(trainer)


class LogMetricsCallback(TrainerCallback):
    """Printer of the latest metrics: with ``train`` in their names after training, the others after evaluation."""

    def on_train_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        self._log_latest_metrics(trainer, [name for name in trainer.run_history.get_metric_names() if "train" in name])

    def on_eval_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        names = trainer.run_history.get_metric_names()
        self._log_latest_metrics(trainer, [name for name in names if "train" not in name])

    def _log_latest_metrics(self, trainer: Any, metric_names: Iterable[str]) -> None:
        self.log_metrics(trainer, self._get_latest_metrics(trainer, metric_names))

    def _get_latest_metrics(self, trainer: Any, metric_names: Iterable[str]) -> dict[str, Any]:
        return {name: trainer.run_history.get_latest_metric(name) for name in metric_names}

    def log_metrics(self, trainer: Any, metrics: dict[str, Any]) -> None:
        """Print one line for each metric; loggers override this."""
        for name, value in metrics.items():
            trainer.print(f"\n{name}: {value}")


class LimitBatchesCallback(TrainerCallback):
    """Limit of the batches in each epoch of training and evaluation, to try out a script.

    Args:
        num_batches: number of batches on each rank.
    """

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches

    def on_loaders_prepared(self, trainer: Any, **kwargs: Any) -> None:
        """Limit the loaders; fired before the steps of an epoch are counted."""
        for name in ("_train_dataloader", "_eval_dataloader"):
            if (loader := getattr(trainer, name)) is not None:
                setattr(trainer, name, DataLoaderSlice(loader, self.num_batches))


class LimitEvalStepsCallback(TrainerCallback):
    """Limit of evaluations to their first batches.

    Args:
        num_eval_steps: number of batches of all ranks together.
        limit_intermediate_only: whether to limit only evaluations within an epoch.
    """

    def __init__(self, num_eval_steps: int, limit_intermediate_only: bool = True) -> None:
        self.num_eval_steps = num_eval_steps
        self.limit_intermediate_only = limit_intermediate_only
        self._whole: Any = None

    def on_eval_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
        if kwargs.get("is_intermediate") or not self.limit_intermediate_only:
            steps = self.num_eval_steps // trainer.run_config.num_processes
            trainer.print(f"Limiting evaluation to {steps} steps per process")
            self._whole = trainer._eval_dataloader
            trainer._eval_dataloader = DataLoaderSlice(self._whole, steps)

    def on_eval_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        if self._whole is not None:
            trainer._eval_dataloader = self._whole
            self._whole = None

    on_run_closed = on_eval_epoch_end  # which a stopped evaluation does not reach


class ConvertSyncBatchNormCallback(TrainerCallback):
    """Converter of batch norms to synchronized ones, if there are several ranks."""

    def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
        if trainer.run_config.is_distributed:
            trainer.model = nn.SyncBatchNorm.convert_sync_batchnorm(trainer.model)


class StepBasedEvaluationCallback(TrainerCallback):
    """Evaluation within epochs, for metrics between their ends.

    Args:
        eval_every_n_steps: evaluate after steps whose index in the epoch (from 0) is a multiple of this, except 0.
    """

    def __init__(self, eval_every_n_steps: int) -> None:
        self.eval_every_n_steps = eval_every_n_steps

    def on_train_step_end(self, trainer: Any, *, step: int, **kwargs: Any) -> None:
        """Request an evaluation after the update to which this step belongs."""
        if step and step % self.eval_every_n_steps == 0 and trainer.eval_dataset is not None:
            after_update(trainer, partial(self._evaluate, trainer, step))

    def _evaluate(self, trainer: Any, step: int) -> None:
        trainer.print(f"Running evaluation after {step} training steps")
        trainer._run_eval_epoch(trainer._eval_dataloader, is_intermediate=True)
        trainer.print("Resuming training...")


DEFAULT_CALLBACKS = (
    MoveModulesToDeviceCallback,
    TerminateOnNaNCallback,
    PrintProgressCallback,
    ProgressBarCallback,
    LogMetricsCallback,
)


def get_default_callbacks(progress_bar: bool = True) -> tuple[Any, ...]:
    """Return the default callbacks of a Trainer.

    Args:
        progress_bar: whether to include the progress bar.
    """
    return limited([c for c in DEFAULT_CALLBACKS if progress_bar or c is not ProgressBarCallback])


def limited(callbacks: Iterable[Any]) -> tuple[Any, ...]:
    """Return callbacks with a limit of batches from the environment in front, unless one of them is a limit."""
    limit = Environment.read().limit_batches
    chosen = tuple(callbacks)
    if limit is None or any(isinstance(callback, LimitBatchesCallback) for callback in chosen):
        return chosen
    return (LimitBatchesCallback(limit), *chosen)

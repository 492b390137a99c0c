"""The callbacks that come with the Trainer: what happens beside the loop, at the events that it fires."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from det_core._env import Environment
from det_core._training.progress_line import ProgressLine
from det_core.accelerated._data import length_of
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

if TYPE_CHECKING:
    from det_core.accelerated.trainer import Trainer

__all__ = [
    "CallbackHandler",
    "CallbackMethodNotImplementedError",
    "ConvertSyncBatchNormCallback",
    "EarlyStoppingCallback",
    "LimitBatchesCallback",
    "LimitEvalStepsCallback",
    "LogMetricsCallback",
    "ModelEmaCallback",
    "MoveModulesToDeviceCallback",
    "PrintProgressCallback",
    "ProgressBarCallback",
    "SaveBestModelCallback",
    "SaveTrainingStateCallback",
    "StepBasedEvaluationCallback",
    "StopTrainingError",
    "TerminateOnNaNCallback",
    "TrainerCallback",
    "WSDCheckpointCallback",
    "get_default_callbacks",
]


class MoveModulesToDeviceCallback(TrainerCallback):
    """Moves the modules among the trainer's attributes, such as a loss function with weights, to its device."""

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        for name, value in vars(trainer).items():
            if name != "model" and isinstance(value, nn.Module):
                value.to(trainer.device)

    on_evaluation_run_start = on_training_run_start


class TerminateOnNaNCallback(TrainerCallback):
    """Ends the run when a loss is NaN or infinite; what then becomes of the process, ``Trainer(on_nan=)`` says.

    On a GPU losses are looked at once their copies have arrived, a step or more late, so that no step waits.
    """

    def __init__(self) -> None:
        self.triggered = False
        self._late = _LateValue()

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self.triggered = False
        self._late = _LateValue()

    def on_train_step_end(self, trainer: Trainer, batch: Any, batch_output: Any, step: int, **kwargs: Any) -> None:
        value = trainer.batch_loss
        if type(value) is not float:
            value = self._late.next(batch_output["loss"] if value is None else value)
        if not math.isfinite(value):
            self._stop("training")

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        """Look at the last loss, of which a GPU may have sent nothing yet."""
        if self._late.last is not None and not math.isfinite(float(self._late.last)):
            self._stop("training")

    def on_eval_step_end(self, trainer: Trainer, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        if not math.isfinite(float(torch.as_tensor(batch_output["loss"]).detach().mean())):
            self._stop("validation")

    def _stop(self, kind: str) -> None:
        self.triggered = True
        raise StopTrainingError(f"{NAN_LOSS} {kind} step")


class _LateValue:
    """The newest of a device's numbers that has reached the host, without waiting for any."""

    def __init__(self) -> None:
        self.last: Tensor | None = None
        self._host: Tensor | None = None
        self._arrived: Any = None

    def next(self, tensor: Any) -> float:
        """Send a number after the others if none is under way; the last that arrived, 0 before the first."""
        self.last = tensor = torch.as_tensor(tensor).detach().mean()
        if tensor.device.type != "cuda":
            return float(tensor)
        if self._arrived is not None and not self._arrived.query():
            return 0.0
        value = 0.0 if self._host is None else self._host.item()
        if self._host is None:
            self._host, self._arrived = torch.empty((), pin_memory=True), torch.cuda.Event()
        self._host.copy_(tensor.float(), non_blocking=True)
        self._arrived.record()
        return value


class PrintProgressCallback(TrainerCallback):
    """Prints what begins and ends."""

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.print("\nStarting training run")

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.print(f"\nStarting epoch {trainer.run_history.current_epoch}")

    def on_eval_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.print("\nStarting eval epoch")

    def on_training_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.print("Finishing training run")

    def on_evaluation_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.print("\nStarting evaluation run")

    def on_evaluation_run_end(self, trainer: Trainer, **kwargs: Any) -> None:
        trainer.print("Finishing evaluation run")


class ProgressBarCallback(TrainerCallback):
    """One line on stderr with batches, speed and the loss: live on a terminal and in a notebook; elsewhere, in a log
    file say, written once at the end of each epoch."""

    def __init__(self) -> None:
        self._line: ProgressLine | None = None
        self._what = ""
        self._is_within = False
        self._total: int | None = None
        self._first = self._done = 0
        self._began = 0.0

    def on_train_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        self._begin(trainer, "training", trainer._train_dataloader, trainer._run.batch)

    def on_train_step_end(self, trainer: Trainer, batch: Any, batch_output: Any, step: int, **kwargs: Any) -> None:
        """Count; what is shown is drawn by time."""
        self._done += 1
        if self._line is not None:
            self._line.update(self._done, self._total, {"loss": trainer.batch_loss})

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self._end(trainer)

    def on_eval_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        """Begin a line, unless an evaluation in the middle of an epoch would cut that of the epoch."""
        self._is_within = bool(kwargs.get("is_intermediate"))
        if not self._is_within:
            self._begin(trainer, "evaluation", trainer._eval_dataloader, 0)

    def on_eval_step_end(self, trainer: Trainer, batch: Any, batch_output: Any, **kwargs: Any) -> None:
        if not self._is_within:
            self._done += 1
            if self._line is not None:
                self._line.update(self._done, self._total)

    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if not self._is_within:
            self._end(trainer)

    def on_run_closed(self, trainer: Trainer, **kwargs: Any) -> None:
        """End a line that an error has left; the Trainer fires this however a run ends."""
        if self._line is not None:
            self._line.close()
            self._line = None

    def _begin(self, trainer: Trainer, what: str, loader: Any, done: int) -> None:
        self.on_run_closed(trainer)
        if not trainer.is_local_main_process:
            return
        self._what, self._total, self._first, self._done = what, length_of(loader), done, done
        self._began = time.monotonic()
        self._line = line if (line := ProgressLine()).shown else None

    def _end(self, trainer: Trainer) -> None:
        if self._what and self._line is None and self._done:
            rate = (self._done - self._first) / (time.monotonic() - self._began)
            total, loss = self._total or self._done, float(trainer._loss_tracker.average)
            sys.stderr.write(f"{self._what}: {self._done}/{total} batches  {rate:.3g} batches/s  loss {loss:.4g}\n")
        self._what = ""
        self.on_run_closed(trainer)


class LogMetricsCallback(TrainerCallback):
    """Prints the latest metrics: those whose name contains ``train`` after training, the others after evaluation."""

    def on_train_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self._log(trainer, lambda name: "train" in name)

    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        self._log(trainer, lambda name: "train" not in name)

    def _log(self, trainer: Trainer, chosen: Callable[[str], bool]) -> None:
        history = trainer.run_history
        self.log_metrics(
            trainer, {name: history.get_latest_metric(name) for name in history.get_metric_names() if chosen(name)}
        )

    def log_metrics(self, trainer: Trainer, metrics: dict[str, Any]) -> None:
        """Print them, a line each. Loggers override this."""
        for name, value in metrics.items():
            trainer.print(f"\n{name}: {value}")


class LimitBatchesCallback(TrainerCallback):
    """Ends each epoch of training and evaluation after some batches, to try a script out.

    Args:
        num_batches: how many, on each rank.
    """

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches

    def on_loaders_prepared(self, trainer: Trainer, **kwargs: Any) -> None:
        """Cut them; the Trainer fires this before it counts an epoch's steps."""
        for name in ("_train_dataloader", "_eval_dataloader"):
            if (loader := getattr(trainer, name)) is not None:
                setattr(trainer, name, DataLoaderSlice(loader, self.num_batches))


class LimitEvalStepsCallback(TrainerCallback):
    """Evaluates on the first batches only.

    Args:
        num_eval_steps: how many, of all ranks together.
        limit_intermediate_only: whether only evaluations in the middle of an epoch are limited.
    """

    def __init__(self, num_eval_steps: int, limit_intermediate_only: bool = True) -> None:
        self.num_eval_steps, self.limit_intermediate_only = num_eval_steps, limit_intermediate_only
        self._whole: Any = None

    def on_eval_epoch_start(self, trainer: Trainer, **kwargs: Any) -> None:
        if kwargs.get("is_intermediate") or not self.limit_intermediate_only:
            steps = self.num_eval_steps // trainer.run_config.num_processes
            trainer.print(f"Limiting evaluation to {steps} steps per process")
            self._whole = trainer._eval_dataloader
            trainer._eval_dataloader = DataLoaderSlice(self._whole, steps)

    def on_eval_epoch_end(self, trainer: Trainer, **kwargs: Any) -> None:
        if self._whole is not None:
            trainer._eval_dataloader, self._whole = self._whole, None

    on_run_closed = on_eval_epoch_end  # an evaluation that was stopped has had none


class ConvertSyncBatchNormCallback(TrainerCallback):
    """Turns batch norms into ones that count over all ranks, where there are several."""

    def on_training_run_start(self, trainer: Trainer, **kwargs: Any) -> None:
        if trainer.run_config.is_distributed:
            trainer.model = nn.SyncBatchNorm.convert_sync_batchnorm(trainer.model)


class StepBasedEvaluationCallback(TrainerCallback):
    """Evaluates in the middle of epochs, for metrics between their ends.

    Args:
        eval_every_n_steps: after the steps of this index and its multiples, counted in each epoch from 0.
    """

    def __init__(self, eval_every_n_steps: int) -> None:
        self.eval_every_n_steps = eval_every_n_steps

    def on_train_step_end(self, trainer: Trainer, batch: Any, batch_output: Any, step: int, **kwargs: Any) -> None:
        """Ask for an evaluation, which comes after the update that this step belongs to."""
        if step and step % self.eval_every_n_steps == 0 and trainer.eval_dataset is not None:
            trainer.after_update(partial(self._evaluate, trainer, step))

    def _evaluate(self, trainer: Trainer, step: int) -> None:
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
    """The callbacks of a Trainer that is given none.

    Args:
        progress_bar: whether there is one among them.
    """
    return limited([c for c in DEFAULT_CALLBACKS if progress_bar or c is not ProgressBarCallback])


def limited(callbacks: Iterable[Any]) -> tuple[Any, ...]:
    """Callbacks, and before them one that ends epochs early, if the environment says so and none of them does."""
    limit, chosen = Environment.read().limit_batches, tuple(callbacks)
    if limit is None or any(isinstance(one, LimitBatchesCallback) for one in chosen):
        return chosen
    return (LimitBatchesCallback(limit), *chosen)

"""The callbacks that come with the Trainer: what happens beside the loop, at the events that it fires."""

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
    """Moves the modules among the trainer's attributes, such as a loss function with weights, to its device."""

    def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
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

    def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
        self.triggered = False
        self._late = _LateValue()

    def on_train_step_end(self, trainer: Any, batch: Any = None, batch_output: Any = None, **kwargs: Any) -> None:
        if type(self).check_for_nan_after_batch is not TerminateOnNaNCallback.check_for_nan_after_batch:
            self.check_for_nan_after_batch(batch_output, "training")
            return
        session = session_of(trainer)
        value = None if session is None else session.batch_loss
        if type(value) is not float:
            value = self._late.next(batch_output["loss"] if value is None else value)
        if not math.isfinite(value):
            self._stop("training")

    def on_train_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        """Look at the last loss, of which a GPU may have sent nothing yet."""
        if self._late.last is not None and not math.isfinite(float(self._late.last)):
            self._stop("training")

    def on_eval_step_end(self, trainer: Any, batch: Any = None, batch_output: Any = None, **kwargs: Any) -> None:
        self.check_for_nan_after_batch(batch_output, "validation")

    def check_for_nan_after_batch(self, batch_output: Any, step: str | None = None) -> None:
        """Stop if a batch's loss is NaN or infinite; an override is asked after each batch of training too.

        Args:
            batch_output: what the batch has given.
            step: ``training`` or ``validation``.
        """
        if not math.isfinite(float(torch.as_tensor(batch_output["loss"]).detach().mean())):
            self._stop(str(step))

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
            self._host = torch.empty((), pin_memory=True)
            self._arrived = torch.cuda.Event()
        self._host.copy_(tensor.float(), non_blocking=True)
        self._arrived.record()
        return value


class PrintProgressCallback(TrainerCallback):
    """Prints what begins and ends."""

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
    """What people do with the bars of the original, which are tqdm's. The batches are counted without it.

    Attributes:
        more: numbers that are shown behind the speed.
    """

    def __init__(self, owner: ProgressBarCallback) -> None:
        self._owner = owner
        self.more = dict[str, Any]()

    def update(self, n: float = 1) -> None:
        """Accepted."""

    def set_postfix(self, *told: Any, **values: Any) -> None:
        """Show numbers behind the speed."""
        self.more = {**dict(*told), **values}

    def set_description(self, desc: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Accepted."""

    def close(self) -> None:
        """Take the line away."""
        self._owner.on_run_closed(None)


class ProgressBarCallback(TrainerCallback):
    """One line on stderr with batches, speed and the loss: live on a terminal and in a notebook; elsewhere, in a log
    file say, written once at the end of each epoch, without the loss, which is printed; under a master to stdout.

    Attributes:
        pbar, eval_pbar: of the epoch under way, with ``update()``, ``set_postfix()``, ``close()``; None outside of one.
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
        """Count; what is shown is drawn by time."""
        self._done += 1
        if self._line is not None and self._line.shown:
            more = self.pbar.more if self.pbar is not None else {}
            self._line.update(self._done, self._total, {"loss": trainer._det_core.batch_loss, **more})

    def on_train_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        self._end(trainer, "training")

    def on_eval_epoch_start(self, trainer: Any, **kwargs: Any) -> None:
        """Begin a line, unless an evaluation in the middle of an epoch would cut that of the epoch."""
        if not trainer._det_core.run.in_epoch:
            self._begin(trainer, trainer._eval_dataloader, 0)
        self.eval_pbar = _Bar(self)

    def on_eval_step_end(self, trainer: Any, **kwargs: Any) -> None:
        if not trainer._det_core.run.in_epoch:
            self._done += 1
            if self._line is not None and self._line.shown:
                self._line.update(self._done, self._total, self.eval_pbar.more if self.eval_pbar is not None else None)

    def on_eval_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        self.eval_pbar = None
        if not trainer._det_core.run.in_epoch:
            self._end(trainer, "evaluation")

    def on_run_closed(self, trainer: Any, **kwargs: Any) -> None:
        """End a line that an error has left; the Trainer fires this however a run ends."""
        self.pbar = self.eval_pbar = None
        if self._line is not None:
            self._line.close()
            self._line = None

    def _begin(self, trainer: Any, loader: Any, done: int) -> None:
        self._total = length_of(loader)
        self._first = done
        self._done = done
        self._began = time.monotonic()
        self._line = ProgressLine() if trainer._det_core.strategy.is_local_main_process else None

    def _end(self, trainer: Any, what: str) -> None:
        if self._line is not None and not self._line.shown and self._done:
            rate = (self._done - self._first) / (time.monotonic() - self._began)
            text = f"{what}: {self._done}/{self._total or self._done} batches  {rate:.3g} batches/s"
            if trainer._det_core.under_master:  # its logs have stdout and stderr of a rank in no order
                trainer.print(text)
            else:
                write_quietly(f"{text}\n", sys.stderr)
        self.on_run_closed(trainer)


class LogMetricsCallback(TrainerCallback):
    """Prints the latest metrics: those whose name contains ``train`` after training, the others after evaluation."""

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

    def on_loaders_prepared(self, trainer: Any, **kwargs: Any) -> None:
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

    on_run_closed = on_eval_epoch_end  # an evaluation that was stopped has had none


class ConvertSyncBatchNormCallback(TrainerCallback):
    """Turns batch norms into ones that count over all ranks, where there are several."""

    def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
        if trainer.run_config.is_distributed:
            trainer.model = nn.SyncBatchNorm.convert_sync_batchnorm(trainer.model)


class StepBasedEvaluationCallback(TrainerCallback):
    """Evaluates in the middle of epochs, for metrics between their ends.

    Args:
        eval_every_n_steps: after the steps of this index and its multiples, counted in each epoch from 0.
    """

    def __init__(self, eval_every_n_steps: int) -> None:
        self.eval_every_n_steps = eval_every_n_steps

    def on_train_step_end(self, trainer: Any, *, step: int, **kwargs: Any) -> None:
        """Ask for an evaluation, which comes after the update that this step belongs to."""
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
    """The callbacks of a Trainer that is given none.

    Args:
        progress_bar: whether there is one among them.
    """
    return limited([c for c in DEFAULT_CALLBACKS if progress_bar or c is not ProgressBarCallback])


def limited(callbacks: Iterable[Any]) -> tuple[Any, ...]:
    """Callbacks, and before them one that ends epochs early, if the environment says so and none of them does."""
    limit = Environment.read().limit_batches
    chosen = tuple(callbacks)
    if limit is None or any(isinstance(one, LimitBatchesCallback) for one in chosen):
        return chosen
    return (LimitBatchesCallback(limit), *chosen)

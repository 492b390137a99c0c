"""Callbacks that follow a metric, and callbacks that save: the best model, its average, training states."""

from __future__ import annotations

import math
import operator
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from det_core.accelerated._base import after_update
from det_core.accelerated._events import CallbackHandler, StopTrainingError, TrainerCallback
from det_core.accelerated.utils import ModelEma


class _MetricCallback(TrainerCallback):
    """Callback that follows a metric of the history, in which NaN is the worst value."""

    def __init__(self, watch_metric: str, greater_is_better: bool, reset_on_train: bool) -> None:
        self.watch_metric = watch_metric
        self.greater_is_better = greater_is_better
        self.reset_on_train = reset_on_train
        self.best_metric: float | None = None
        self.best_metric_epoch: int | None = None

    @property
    def operator(self) -> Callable[[float, float], bool]:
        """Comparison of a value with the best one, an attribute of the original."""
        if self.greater_is_better:
            return operator.gt
        return operator.lt

    def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
        if self.reset_on_train:
            self._reset()

    def _reset(self) -> None:
        self.best_metric = self.best_metric_epoch = None

    def _value(self, trainer: Any) -> float:
        names = list(trainer.run_history.get_metric_names())
        if self.watch_metric not in names:
            raise ValueError(
                f"{type(self).__name__} watches {self.watch_metric!r}, which is not among the recorded metrics: "
                f"{', '.join(names) or 'none'}"
            )
        return float(trainer.run_history.get_latest_metric(self.watch_metric))

    def _is_better(self, value: float, by: float = 0.0) -> bool:
        """Return whether a value improves the best one by more than ``by``, or is the first."""
        best = self.best_metric
        if best is None or math.isnan(best):
            return best is None or not math.isnan(value)
        if self.greater_is_better:
            return value - best > by
        return best - value > by

    def state_dict(self) -> dict[str, Any]:
        return {"best_metric": self.best_metric, "best_metric_epoch": self.best_metric_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best_metric = state["best_metric"]
        self.best_metric_epoch = state["best_metric_epoch"]


class SaveBestModelCallback(_MetricCallback):
    """Checkpoint of the epoch with the best value of a metric, loaded at the end of the run.

    Args:
        save_path: path of the file.
        watch_metric: name of the metric in the run history.
        greater_is_better: whether larger values are better.
        reset_on_train: whether each training run starts without a best value.
        save_optimizer, save_scheduler: whether to save the state of the optimizer and the scheduler.
        load_saved_checkpoint: whether to load the best checkpoint at the end of the run.
        core_upload: whether to add the file to each checkpoint of the core, so that it survives the loss of the node.

    Raises:
        ValueError: If the metric was not recorded.
    """

    def __init__(
        self, save_path: str | os.PathLike[str] = "best_model.pt", watch_metric: str = "eval_loss_epoch",
        greater_is_better: bool = False, reset_on_train: bool = True, save_optimizer: bool = True,
        save_scheduler: bool = True, load_saved_checkpoint: bool = True, core_upload: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(watch_metric, greater_is_better, reset_on_train)
        self.save_path = save_path
        self.save_optimizer = save_optimizer
        self.save_scheduler = save_scheduler
        self.load_saved_checkpoint = load_saved_checkpoint
        self.core_upload = core_upload

    def on_training_run_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        value = self._value(trainer)
        if self._is_better(value):
            self.best_metric = value
            self.best_metric_epoch = trainer.run_history.current_epoch
            metadata = {self.watch_metric: value, "loss": value, "epoch": self.best_metric_epoch}
            trainer.save_checkpoint(
                self.save_path, metadata, save_optimizer=self.save_optimizer, save_scheduler=self.save_scheduler
            )

    def on_training_run_end(self, trainer: Any, **kwargs: Any) -> None:
        if not self.load_saved_checkpoint or self.best_metric_epoch is None:
            return
        best = f"{self.watch_metric}: {self.best_metric} from epoch {self.best_metric_epoch}"
        if not Path(self.save_path).exists():  # of a run that started on another node
            trainer.print(f"{self.save_path} with {best} is not here: the model stays as it is; see core_upload=")
            return
        trainer.print(f"Loading checkpoint with {best}")
        trainer.load_checkpoint(
            self.save_path, load_optimizer=self.save_optimizer and trainer.optimizer is not None,
            load_scheduler=self.save_scheduler and trainer.scheduler is not None,
        )  # fmt: skip

    def checkpoint_files(self) -> dict[str, Path]:
        """Return further files of the core's checkpoints, by their names there."""
        path = Path(self.save_path)
        if not self.core_upload or self.best_metric_epoch is None:
            return {}
        return {f"best/{path.name}": path}

    def restore_files(self, folder: Path) -> None:
        """Restore the best model from a checkpoint if this node does not have it."""
        path = Path(self.save_path)
        saved = folder / "best" / path.name
        if self.core_upload and saved.exists() and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(saved, path)


class EarlyStoppingCallback(_MetricCallback):
    """End of the run when a metric has not improved for a number of epochs.

    Args:
        early_stopping_patience: epochs without an improvement after which to stop.
        early_stopping_threshold: smallest change, in units of the metric, that an improvement must exceed.
        watch_metric, greater_is_better, reset_on_train: as in :class:`SaveBestModelCallback`.
    """

    def __init__(
        self, early_stopping_patience: int = 1, early_stopping_threshold: float = 0.01,
        watch_metric: str = "eval_loss_epoch", greater_is_better: bool = False, reset_on_train: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(watch_metric, greater_is_better, reset_on_train)
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self.early_stopping_patience_counter = 0

    def _reset(self) -> None:
        super()._reset()
        self.early_stopping_patience_counter = 0

    def on_training_run_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        value = self._value(trainer)
        best = self.best_metric
        if self._is_better(value, self.early_stopping_threshold):
            if best is not None:
                trainer.print(f"\nImprovement of {abs(value - best)} in {self.watch_metric}: the best is now {value}")
            self.best_metric = value
            self.best_metric_epoch = trainer.run_history.current_epoch
            self.early_stopping_patience_counter = 0
            return
        self.early_stopping_patience_counter += 1
        count = self.early_stopping_patience_counter
        patience = self.early_stopping_patience
        trainer.print(f"\nNo improvement above {self.early_stopping_threshold} in {self.watch_metric}: best {best}")
        trainer.print(f"Early stopping counter: {count}/{patience}")
        if count >= patience:
            raise StopTrainingError(f"Stopping training due to no improvement after {patience} epochs")

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "counter": self.early_stopping_patience_counter}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.early_stopping_patience_counter = state["counter"]


class ModelEmaCallback(SaveBestModelCallback):
    """Exponential moving average of the model, evaluated after each evaluation; the best one is saved.

    Place it after callbacks that change the trainer's state, and before those that read it.

    Args:
        decay: weight of the old average in an update.
        evaluate_during_training: whether to evaluate the average; otherwise it is saved after every epoch.
        save_path: path of the file.
        watch_metric: metric that decides which average is best; evaluations of the average record metrics with the
            prefix ``ema_model_``.
        greater_is_better: whether larger values are better.
        model_ema: function of a model and a decay that makes the average.
        callbacks: callbacks of the evaluations of the average.
        update_every: ``"epoch"``, ``"step"`` (each optimizer update), or a number of updates.
        warmup: whether to lower the decay at first, to ``min(decay, (1 + n) / (10 + n))`` at the n-th update, so that
            the average soon forgets the initial weights (as with TensorFlow's ``num_updates``).
    """

    def __init__(
        self, decay: float = 0.99, evaluate_during_training: bool = True,
        save_path: str | os.PathLike[str] = "ema_model.pt", watch_metric: str = "ema_model_eval_loss_epoch",
        greater_is_better: bool = False, model_ema: Callable[..., Any] = ModelEma, callbacks: Sequence[Any] = (),
        update_every: str | int = "epoch", warmup: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(save_path, watch_metric, greater_is_better, save_optimizer=False, load_saved_checkpoint=False)
        if update_every not in ("epoch", "step") and not (isinstance(update_every, int) and update_every > 0):
            raise ValueError(f"update_every={update_every!r}: expected 'epoch', 'step', or a number of updates")
        self.decay = decay
        self.evaluate_during_training = evaluate_during_training
        self.warmup = warmup
        self.ema_model: Any = None
        self.model_ema_cls = model_ema
        self.callback_handler = CallbackHandler(callbacks)
        self._updates = 0
        self._every = {"epoch": 0, "step": 1}.get(str(update_every), update_every)

    def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
        super().on_training_run_start(trainer)
        self.ema_model = self.model_ema_cls(trainer.get_model(keep_torch_compile=False), decay=self.decay)
        self._updates = 0

    def on_update(self, trainer: Any, **kwargs: Any) -> None:
        """Update the average after an optimizer update, if due."""
        if self._every and trainer._det_core.run.updates % int(self._every) == 0:
            self._update(trainer)

    def on_train_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        """Update the average after an epoch, unless after updates."""
        if not self._every:
            self._update(trainer)

    def _update(self, trainer: Any) -> None:
        self._updates += 1
        if self.warmup:
            self.ema_model.decay = min(self.decay, (1 + self._updates) / (10 + self._updates))
        self.ema_model.update(trainer.get_model(keep_torch_compile=False))

    def on_eval_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        if not self.evaluate_during_training or kwargs.get("is_intermediate"):
            return
        trainer.print("Running evaluation on EMA model")
        if trainer.run_config.is_distributed:  # batch norms differ between ranks, and those of rank 0 are saved
            for buffer in self.ema_model.buffers():
                torch.distributed.broadcast(buffer, 0)
        model = trainer.model
        handler = trainer.callback_handler
        prefix = trainer.run_history.metric_name_prefix
        trainer.model = self.ema_model.module
        trainer.callback_handler = self.callback_handler
        trainer.run_history.set_metric_name_prefix("ema_model_")
        try:
            trainer._run_eval_epoch(trainer._eval_dataloader, is_training=True)
        finally:
            trainer.model = model
            trainer.callback_handler = handler
            trainer.run_history.set_metric_name_prefix(prefix)

    def on_training_run_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        """Save the average if it is the best; without evaluation, always."""
        model = trainer.model
        trainer.model = self.ema_model.module
        try:
            if trainer.eval_dataset is not None and self.evaluate_during_training:
                super().on_training_run_epoch_end(trainer)
            else:
                trainer.save_checkpoint(
                    self.save_path, {"epoch": trainer.run_history.current_epoch}, save_optimizer=False,
                    save_scheduler=self.save_scheduler,
                )  # fmt: skip
        finally:
            trainer.model = model

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resume, including the average."""
        return {**super().state_dict(), "ema": self.ema_model.state_dict(), "updates": self._updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.ema_model.load_state_dict(state["ema"])
        self._updates = state["updates"]


class SaveTrainingStateCallback(TrainerCallback):
    """Saves of training states, from which ``train(resume_from=)`` continues.

    Args:
        save_dir: directory of the training states.
        save_every_n_epochs: epochs between saves, as ``epoch_<n>``.
        save_every_n_steps: steps (batches of a rank in this run) between saves, as ``step_<n>``.
        save_at_end: whether to save at the end of the run, as ``final``.
        max_checkpoints: number of the newest training states to keep; None keeps all.
    """

    def __init__(
        self, save_dir: str | os.PathLike[str] = "training_states", save_every_n_epochs: int | None = None,
        save_every_n_steps: int | None = None, save_at_end: bool = True, max_checkpoints: int | None = None,
    ) -> None:  # fmt: skip
        self.save_dir = Path(save_dir)
        self.save_at_end = save_at_end
        self.max_checkpoints = max_checkpoints
        self.save_every_n_epochs = save_every_n_epochs
        self.save_every_n_steps = save_every_n_steps
        self.global_step = 0
        self._saved_checkpoints: list[str] = []

    def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
        self.global_step = 0

    def on_train_step_end(self, trainer: Any, **kwargs: Any) -> None:
        """Count a step, and request a save after the update to which it belongs."""
        self.global_step += 1
        if self.save_every_n_steps and self.global_step % self.save_every_n_steps == 0:
            after_update(trainer, partial(self._save, trainer, f"step_{self.global_step}"))

    def on_train_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        epoch = trainer.run_history.current_epoch
        if self.save_every_n_epochs and epoch % self.save_every_n_epochs == 0:
            self._save(trainer, f"epoch_{epoch}")

    def on_training_run_end(self, trainer: Any, **kwargs: Any) -> None:
        if self.save_at_end:
            self._save(trainer, "final")

    def _save(self, trainer: Any, name: str) -> None:
        path = self.save_dir / name
        saved = [other for other in self._saved_checkpoints if other != str(path)] + [str(path)]
        expired = []
        if self.max_checkpoints:
            expired = saved[: -self.max_checkpoints]
        self._saved_checkpoints = saved[len(expired) :]
        trainer.save_training_state(path, {"global_step": self.global_step})
        trainer.print(f"Saved training state to {path}")
        if trainer.run_config.is_world_process_zero:
            for old in expired:
                shutil.rmtree(old, ignore_errors=True)

    def state_dict(self) -> dict[str, Any]:
        return {"global_step": self.global_step, "saved": list(self._saved_checkpoints)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.global_step = state["global_step"]
        self._saved_checkpoints = list(state["saved"])


class WSDCheckpointCallback(TrainerCallback):
    """Saves at the start and end of the decays of a warmup-stable-decay schedule.

    At the start of a decay it saves a training state, to continue from at the full rate; at the end, a checkpoint.

    Args:
        save_dir: directory of the saves, created at once.
        save_optimizer, save_scheduler: whether to save the state of the optimizer and the scheduler in checkpoints.
        initial_checkpoint: training state or checkpoint to start from; ignored if it does not exist.

    Raises:
        ValueError: If the scheduler has no ``get_checkpoint_steps()`` at the start of the run.
    """

    def __init__(
        self, save_dir: str | os.PathLike[str] = "checkpoints", save_optimizer: bool = True,
        save_scheduler: bool = True, initial_checkpoint: str | os.PathLike[str] | None = None,
    ) -> None:  # fmt: skip
        self.save_dir = Path(save_dir)
        self.save_optimizer = save_optimizer
        self.save_scheduler = save_scheduler
        self.initial_checkpoint: Path | None = None
        if initial_checkpoint is not None:
            self.initial_checkpoint = Path(initial_checkpoint)
        self.last_checkpoint_step: int | None = None
        self._kinds: dict[str, int] = {}
        self.save_dir.mkdir(parents=True, exist_ok=True)

    def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
        if not hasattr(trainer.scheduler, "get_checkpoint_steps"):
            raise ValueError(
                "WSDCheckpointCallback needs a scheduler with get_checkpoint_steps(), such as WSDLrScheduler, and the "
                f"run has {type(trainer.scheduler).__name__}"
            )
        self.last_checkpoint_step = None
        self._kinds = {}
        start = self.initial_checkpoint
        metadata = {}
        if start is not None and start.is_dir():
            metadata = trainer.load_training_state(start)
        elif start is not None and start.is_file():
            metadata = trainer.load_checkpoint(
                start, load_optimizer=self.save_optimizer, load_scheduler=self.save_scheduler
            )
        self.last_checkpoint_step = metadata.get("step")
        if start is not None and self.last_checkpoint_step == trainer.scheduler.get_current_step() + 1:
            self._kinds = {metadata["checkpoint_type"]: metadata["step"]}  # not to be saved once more

    def on_update(self, trainer: Any, **kwargs: Any) -> None:
        """Save at the start or end of a decay; fired after each optimizer update."""
        scheduler: Any = trainer.scheduler
        done = scheduler.get_current_step() + 1
        period = scheduler.get_phase_info(done)
        if done == period["period_end"]:
            self._save(trainer, "wsd_post_decay", done)
        elif done == period["pre_decay_step"]:
            self._save(trainer, "wsd_pre_decay", done)

    # For user-defined loops and stand-ins for the Trainer, which do not fire on_update; here it has saved already.
    on_train_step_end = on_update
    on_training_run_end = on_update

    def _save(self, trainer: Any, kind: str, step: int) -> None:
        if self._kinds.get(kind) == step:
            return
        self.last_checkpoint_step = self._kinds[kind] = step
        scheduler: Any = trainer.scheduler
        metadata = {
            "step": step, "checkpoint_type": kind, "timestamp": datetime.now().isoformat(),
            "total_steps": getattr(scheduler, "total_steps", None),
            "decay_fraction": getattr(scheduler, "decay_phase_ratio", None),
        }  # fmt: skip
        path = self.save_dir / f"checkpoint_{step}_{kind}"
        if kind == "wsd_pre_decay":
            trainer.save_training_state(path, metadata)
        else:
            trainer.save_checkpoint(
                path.with_suffix(".pt"), metadata, save_optimizer=self.save_optimizer,
                save_scheduler=self.save_scheduler,
            )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {"last_checkpoint_step": self.last_checkpoint_step, "kinds": dict(self._kinds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; those of earlier versions have a dictionary of steps by kind."""
        last = state["last_checkpoint_step"]
        if isinstance(last, dict):
            self._kinds = {f"wsd_{kind}": step for kind, step in last.items()}
            self.last_checkpoint_step = max(last.values(), default=None)
        else:
            self._kinds = dict(state["kinds"])
            self.last_checkpoint_step = last

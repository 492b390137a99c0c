"""Callbacks that follow a metric, and those that save: the best model, its average, training states.

What an event is, :class:`TrainerCallback` says.
"""

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


class _Watching(TrainerCallback):
    """Follows one metric of the history. NaN is the worst of values."""

    def __init__(self, watch_metric: str, greater_is_better: bool, reset_on_train: bool) -> None:
        self.watch_metric = watch_metric
        self.greater_is_better = greater_is_better
        self.reset_on_train = reset_on_train
        self.best_metric: float | None = None
        self.best_metric_epoch: int | None = None

    @property
    def operator(self) -> Callable[[float, float], bool]:
        """Whether a value is better than another, as the original's attribute of this name."""
        return operator.gt if self.greater_is_better else operator.lt

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
        """Whether a value is better than the best one by more than ``by``; the first always is."""
        best = self.best_metric
        if best is None or math.isnan(best):
            return best is None or not math.isnan(value)
        return value - best > by if self.greater_is_better else best - value > by

    def state_dict(self) -> dict[str, Any]:
        return {"best_metric": self.best_metric, "best_metric_epoch": self.best_metric_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best_metric, self.best_metric_epoch = state["best_metric"], state["best_metric_epoch"]


class SaveBestModelCallback(_Watching):
    """Keeps the checkpoint of the epoch with the best value of a metric, and loads it at the end.

    Args:
        save_path: the file.
        watch_metric: the metric's name in the run history.
        greater_is_better: which end of it is best.
        reset_on_train: whether each training run begins anew.
        save_optimizer, save_scheduler: what the file holds beside the model.
        load_saved_checkpoint: whether the best one is loaded at the end of the run.
        core_upload: whether the file also is in each checkpoint of the core, so that it outlives this machine.

    Raises:
        ValueError: the metric was not recorded.
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
            told = {self.watch_metric: value, "loss": value, "epoch": self.best_metric_epoch}
            trainer.save_checkpoint(
                self.save_path, told, save_optimizer=self.save_optimizer, save_scheduler=self.save_scheduler
            )

    def on_training_run_end(self, trainer: Any, **kwargs: Any) -> None:
        if not self.load_saved_checkpoint or self.best_metric_epoch is None:
            return
        best = f"{self.watch_metric}: {self.best_metric} from epoch {self.best_metric_epoch}"
        if not Path(self.save_path).exists():  # of a run that another machine began
            trainer.print(f"{self.save_path} with {best} is not here: the model stays as it is; see core_upload=")
            return
        trainer.print(f"Loading checkpoint with {best}")
        trainer.load_checkpoint(
            self.save_path, load_optimizer=self.save_optimizer and trainer.optimizer is not None,
            load_scheduler=self.save_scheduler and trainer.scheduler is not None,
        )  # fmt: skip

    def checkpoint_files(self) -> dict[str, Path]:
        """What goes into checkpoints of the core beside the training's state."""
        path = Path(self.save_path)
        return {f"best/{path.name}": path} if self.core_upload and self.best_metric_epoch is not None else {}

    def restore_files(self, folder: Path) -> None:
        """Bring the best model back from a checkpoint, where this machine lacks it."""
        kept = folder / "best" / Path(self.save_path).name
        path = Path(self.save_path)
        if self.core_upload and kept.exists() and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(kept, path)


class EarlyStoppingCallback(_Watching):
    """Ends the run when a metric has not become better for some epochs.

    Args:
        early_stopping_patience: after how many epochs without one that is better.
        early_stopping_threshold: by more than how much, in the metric's own units, a value must be better to count.
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
    """Keeps an exponential moving average of the model, evaluates it after each evaluation, and saves the best.

    Place it after callbacks that change the trainer's state, and before those that read it.

    Args:
        decay: the share of the average that an update leaves.
        evaluate_during_training: whether the average is evaluated too; else it is saved after every epoch.
        save_path: the file.
        watch_metric: the metric by which the best is known; an evaluation of the average records each metric under
            its name with ``ema_model_`` before it.
        greater_is_better: which end of it is best.
        model_ema: makes the average of a model and a decay.
        callbacks: the callbacks of those evaluations.
        update_every: ``"epoch"``, ``"step"`` (each optimizer update), or every so many updates.
        warmup: let the decay begin lower, as ``min(decay, (1 + n) / (10 + n))`` at the n-th update, so that the
            average soon forgets the weights that training began with (as TensorFlow's ``num_updates`` does).
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
        """Follow the model; the Trainer fires this after each optimizer update."""
        if self._every and trainer._det_core.run.updates % int(self._every) == 0:
            self._update(trainer)

    def on_train_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        """Follow the model, if not after updates."""
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
        if trainer.run_config.is_distributed:  # ranks have averaged their own batch norms; the first one's are saved
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
        """Save the average if it was the best; without evaluation, always."""
        model = trainer.model
        trainer.model = self.ema_model.module
        try:
            if trainer.eval_dataset is not None and self.evaluate_during_training:
                super().on_training_run_epoch_end(trainer)
            else:
                told = {"epoch": trainer.run_history.current_epoch}
                trainer.save_checkpoint(self.save_path, told, save_optimizer=False, save_scheduler=self.save_scheduler)
        finally:
            trainer.model = model

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs: the average itself too."""
        return {**super().state_dict(), "ema": self.ema_model.state_dict(), "updates": self._updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.ema_model.load_state_dict(state["ema"])
        self._updates = state["updates"]


class SaveTrainingStateCallback(TrainerCallback):
    """Saves training states in folders: what ``train(resume_from=)`` goes on from.

    Args:
        save_dir: where the folders go.
        save_every_n_epochs: save after epochs that are multiples of it, as ``epoch_<n>``.
        save_every_n_steps: save after steps (batches of a rank in this run) that are, as ``step_<n>``.
        save_at_end: save at the end of the run, as ``final``.
        max_checkpoints: how many of the newest are kept; None: all.
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
        """Count, and ask for a state, which is saved after the update that this step belongs to."""
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
        gone = saved[: -self.max_checkpoints] if self.max_checkpoints else []
        self._saved_checkpoints = saved[len(gone) :]
        trainer.save_training_state(path, {"global_step": self.global_step})
        trainer.print(f"Saved training state to {path}")
        if trainer.run_config.is_world_process_zero:
            for old in gone:
                shutil.rmtree(old, ignore_errors=True)

    def state_dict(self) -> dict[str, Any]:
        return {"global_step": self.global_step, "saved": list(self._saved_checkpoints)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.global_step, self._saved_checkpoints = state["global_step"], list(state["saved"])


class WSDCheckpointCallback(TrainerCallback):
    """Saves where a warmup-stable-decay schedule begins and ends its decays: states to go on from at the full rate, and
    the models that a decay gives.

    Args:
        save_dir: where they go; it is made at once.
        save_optimizer, save_scheduler: what the models' files hold beside them.
        initial_checkpoint: what to begin from: a folder with a training state, or a checkpoint's file; a path that is
            not there is ignored.

    Raises:
        ValueError: at the start of the run, the scheduler has no ``get_checkpoint_steps()``.
    """

    def __init__(
        self, save_dir: str | os.PathLike[str] = "checkpoints", save_optimizer: bool = True,
        save_scheduler: bool = True, initial_checkpoint: str | os.PathLike[str] | None = None,
    ) -> None:  # fmt: skip
        self.save_dir = Path(save_dir)
        self.save_optimizer = save_optimizer
        self.save_scheduler = save_scheduler
        self.initial_checkpoint = None if initial_checkpoint is None else Path(initial_checkpoint)
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
        told = {}
        if start is not None and start.is_dir():
            told = trainer.load_training_state(start)
        elif start is not None and start.is_file():
            told = trainer.load_checkpoint(
                start, load_optimizer=self.save_optimizer, load_scheduler=self.save_scheduler
            )
        self.last_checkpoint_step = told.get("step")
        if start is not None and self.last_checkpoint_step == trainer.scheduler.get_current_step() + 1:
            self._kinds = {told["checkpoint_type"]: told["step"]}  # where this run begins is saved already

    def on_update(self, trainer: Any, **kwargs: Any) -> None:
        """Save, if a decay begins or has ended; the Trainer fires this after each optimizer update."""
        scheduler: Any = trainer.scheduler
        done = scheduler.get_current_step() + 1
        period = scheduler.get_phase_info(done)
        if done == period["period_end"]:
            self._save(trainer, "wsd_post_decay", done)
        elif done == period["pre_decay_step"]:
            self._save(trainer, "wsd_pre_decay", done)

    # The Trainer has fired on_update by then; loops of the user's own and stand-ins for the Trainer fire only this one.
    on_train_step_end = on_update
    on_training_run_end = on_update

    def _save(self, trainer: Any, kind: str, step: int) -> None:
        if self._kinds.get(kind) == step:
            return
        self.last_checkpoint_step = self._kinds[kind] = step
        scheduler: Any = trainer.scheduler
        told = {
            "step": step, "checkpoint_type": kind, "timestamp": datetime.now().isoformat(),
            "total_steps": getattr(scheduler, "total_steps", None),
            "decay_fraction": getattr(scheduler, "decay_phase_ratio", None),
        }  # fmt: skip
        path = self.save_dir / f"checkpoint_{step}_{kind}"
        if kind == "wsd_pre_decay":
            trainer.save_training_state(path, told)
        else:
            trainer.save_checkpoint(
                path.with_suffix(".pt"), told, save_optimizer=self.save_optimizer, save_scheduler=self.save_scheduler
            )

    def state_dict(self) -> dict[str, Any]:
        return {"last_checkpoint_step": self.last_checkpoint_step, "kinds": dict(self._kinds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Of earlier versions, a dictionary by kind, too."""
        last = state["last_checkpoint_step"]
        self._kinds = {f"wsd_{k}": n for k, n in last.items()} if isinstance(last, dict) else dict(state["kinds"])
        self.last_checkpoint_step = max(last.values(), default=None) if isinstance(last, dict) else last

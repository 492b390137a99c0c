"""The Trainer: managed training of a model, with a method to override for each step."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from det_core._training.data_order import length_of
from det_core._training.strategy import parameters_of
from det_core.accelerated._base import Run, Session, as_list, by_name, in_container_of, with_param_groups
from det_core.accelerated._data import EpochLoader, batch_size_of, default_workers
from det_core.accelerated._events import CallbackHandler
from det_core.accelerated._lifecycle import begin_run, connect, open_run
from det_core.accelerated._loop import TrainingLoop
from det_core.accelerated._placeholders import TrainerPlaceholderValues, replace_trainer_placeholder_values
from det_core.accelerated._saves import Saves, go_to
from det_core.accelerated._strategy import Strategy, make_accelerator
from det_core.accelerated.callbacks import DEFAULT_CALLBACKS, limited
from det_core.accelerated.run_config import TrainerRunConfig
from det_core.accelerated.tracking import InMemoryRunHistory, LossTracker, RunHistory
from det_core.accelerated.utils import set_seed, worker_init_fn

__all__ = [
    "DEFAULT_CALLBACKS",
    "Trainer",
    "TrainerPlaceholderValues",
    "TrainerWithTimmScheduler",
    "replace_trainer_placeholder_values",
]

DEFAULT_SEED = 42
_UNSET: Any = object()
REAL: Any = Real  # includes numpy's numbers, unlike (int, float)


class Trainer(TrainingLoop, Saves):
    """Trainer of a model: override a method to change a step of the loop, or add callbacks.

    Args:
        model: the model.
        loss_func: ``loss_func(outputs, targets)``, a scalar.
        optimizer: the optimizer, or a list of several; None for evaluation only.
        callbacks: classes or instances. Defaults to :data:`DEFAULT_CALLBACKS`.
        run_history: store of metrics. Defaults to one in memory.
        core_context: context of ``core.init()`` that manages the training. Defaults to the open one; without one, a
            single process does not use the core.
        seed: seed of random numbers and of the order of shuffled data. Defaults to the trial's, or 42. None leaves the
            generators alone.
        metrics: metrics of each evaluation, recorded as ``eval_<name>``: a torchmetrics ``Metric`` or
            ``MetricCollection``, or a dictionary of objects with ``update(outputs, targets)``, ``compute()``,
            ``reset()``.
        train_metrics: metrics of each training epoch, recorded as ``train_<name>``.
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``. Defaults to accelerate's configuration.
        on_nan: action after a loss that is NaN or infinite: ``"exit"`` (SystemExit), ``"raise"``
            (:class:`StopTrainingError`), ``"stop"`` (``train()`` returns). Under a core context, ``"exit"`` reports
            the trial as not worth repeating instead.
        profile: whether to sample the machine during runs with the core's profiler.
    """

    create_scheduler_fn: Any = None
    collate_fn: Any = None
    _train_dl_kwargs: dict[str, Any] | None = None
    _eval_dl_kwargs: dict[str, Any] | None = None
    _pad_uneven_eval_batches = False

    def __init__(
        self, model: Any, loss_func: Any, optimizer: Any, callbacks: Iterable[Any] = DEFAULT_CALLBACKS,
        run_history: RunHistory | None = None, *, core_context: Any = None, seed: int | None = _UNSET,
        metrics: Any = None, train_metrics: Any = None, mixed_precision: str | None = None, on_nan: str = "exit",
        profile: bool = False,
    ) -> None:  # fmt: skip
        if on_nan not in ("exit", "raise", "stop"):
            raise ValueError(f"on_nan={on_nan!r}: expected 'exit', 'raise' or 'stop'")
        for name, metric in (*by_name(metrics).items(), *by_name(train_metrics).items()):
            if not all(hasattr(metric, method) for method in ("update", "compute", "reset")):
                raise TypeError(
                    f"the metric {name} is a {type(metric).__name__}: give one of torchmetrics (which the extra "
                    "'metrics' installs), or another object with update(outputs, targets), compute() and reset()"
                )
        self.model = model
        self.loss_func = loss_func
        self.optimizer = optimizer
        self.run_history = InMemoryRunHistory() if run_history is None else run_history
        self._callbacks = callbacks
        self._loss_tracker = LossTracker()
        self._det_core = Session(
            given_context=core_context, given_seed=seed, metrics=metrics, train_metrics=train_metrics,
            mixed_precision=mixed_precision, on_nan=on_nan, profile=profile,
        )  # fmt: skip
        self._accelerator = self._create_accelerator()
        self._det_core.strategy = Strategy(self._accelerator)
        self.callback_handler = self._create_callback_handler()
        self.callback_handler.call_event("on_init_end", self)

    # Parts of a run.

    @property
    def device(self) -> torch.device:
        """Device of the model and its batches."""
        return self._det_core.strategy.device

    def _create_accelerator(self) -> Any:
        """Return an ``accelerate.Accelerator``; override it for one with options."""
        return make_accelerator(self._det_core.mixed_precision)

    def _create_callback_handler(self) -> CallbackHandler:
        return CallbackHandler(limited(self._callbacks))

    # Loaders and scheduler.

    def get_default_train_dl_kwargs(self, batch_size: int) -> dict[str, Any]:
        """Return default arguments of the training loader, which ``train_dataloader_kwargs`` override."""
        return {"shuffle": True, **self._loader_kwargs(batch_size)}

    def get_default_eval_dl_kwargs(self, batch_size: int) -> dict[str, Any]:
        """Return default arguments of the evaluation loader, which ``eval_dataloader_kwargs`` override."""
        return {"shuffle": False, **self._loader_kwargs(batch_size)}

    def _loader_kwargs(self, batch_size: int) -> dict[str, Any]:
        return {
            "pin_memory": torch.cuda.is_available(),
            "batch_size": batch_size,
            "num_workers": default_workers(),
            "worker_init_fn": worker_init_fn,
        }

    def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Mapping[str, Any] | None = None) -> Any:
        """Return the loader of the training dataset; an override may return any iterable of batches.

        Args:
            batch_size: samples in a batch of a rank, unless ``train_dl_kwargs`` has it.
            train_dl_kwargs: arguments of a ``DataLoader``.
        """
        defaults = self.get_default_train_dl_kwargs(batch_size)
        self._train_dl_kwargs = _merge_loader_kwargs(defaults, train_dl_kwargs, self.train_dataset)
        return DataLoader(dataset=self.train_dataset, collate_fn=self.collate_fn, **self._train_dl_kwargs)

    def create_eval_dataloader(self, batch_size: int, eval_dl_kwargs: Mapping[str, Any] | None = None) -> Any:
        """Return the loader of the evaluation dataset; arguments as in :meth:`create_train_dataloader`."""
        defaults = self.get_default_eval_dl_kwargs(batch_size)
        self._eval_dl_kwargs = _merge_loader_kwargs(defaults, eval_dl_kwargs, self.eval_dataset)
        return DataLoader(dataset=self.eval_dataset, collate_fn=self.collate_fn, **self._eval_dl_kwargs)

    def create_scheduler(self) -> Any:
        """Return the scheduler that ``create_scheduler_fn`` makes of the optimizer, placeholders replaced.

        Raises:
            TypeError: If it is not a function of an optimizer that returns objects with a ``step()``.
        """
        make = replace_trainer_placeholder_values(self, self.create_scheduler_fn)
        if not callable(make) or (hasattr(make, "step") and not isinstance(make, type)):
            raise TypeError(
                f"create_scheduler_fn={make!r}: expected a function that takes the optimizer and returns a scheduler"
            )
        scheduler = make(self.optimizer)
        parts = [scheduler]
        if isinstance(scheduler, list | tuple):
            parts = list(scheduler)
        if not all(callable(getattr(part, "step", None)) for part in parts):
            raise TypeError(f"create_scheduler_fn returned {scheduler!r}, which has no step(): expected a scheduler")
        return scheduler

    # Training.

    def train(
        self, train_dataset: Any, num_epochs: int, eval_dataset: Any = None, per_device_batch_size: int = 8,
        max_num_train_steps: int | None = None, gradient_accumulation_steps: int = 1,
        gradient_clip_value: float | None = None, create_scheduler_fn: Callable[..., Any] | None = None,
        train_dataloader_kwargs: Mapping[str, Any] | None = None,
        eval_dataloader_kwargs: Mapping[str, Any] | None = None, reset_run_history: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None, resume_from: Any = None, *,
        gradient_clip_norm: float | None = None, track_gradient_norm: bool = False,
        report_every: int | None = None, checkpoint_every: int | str | None = "epoch",
        evaluate_every: int | None = None,
    ) -> None:  # fmt: skip
        """Train, and evaluate after each epoch if ``eval_dataset`` is given.

        Args:
            train_dataset: the samples, map-style or iterable.
            num_epochs: total number of epochs, including those before a resume; under a search, the maximum.
            eval_dataset: samples of the evaluation after each epoch.
            per_device_batch_size: samples in a batch of a rank.
            max_num_train_steps: updates, counted over all ranks, after which training ends, in place of ``num_epochs``.
            gradient_accumulation_steps: batches per update.
            gradient_clip_value: clip each gradient to ±this before an update.
            create_scheduler_fn: function that makes a scheduler of the optimizer; stepped after each update. Arguments
                of a ``functools.partial`` may be placeholders (:class:`TrainerPlaceholderValues`).
            train_dataloader_kwargs, eval_dataloader_kwargs: arguments of the loaders.
            reset_run_history: whether to delete the metrics of earlier runs.
            collate_fn: function that makes a batch of a list of samples.
            resume_from: directory of :meth:`save_training_state` to continue from.
            gradient_clip_norm: maximum norm of the gradients, which are scaled down to it.
            track_gradient_norm: whether to record the mean norm of the gradients as ``train_gradient_norm``; always
                recorded if they are clipped by norm.
            report_every: updates between reports of metrics to the core, in addition to those of epochs.
            checkpoint_every: ``"epoch"``, or updates between checkpoints of the core; None for one at the end and
                before a preemption only.
            evaluate_every: updates between evaluations within epochs, in addition to those at their ends.

        Raises:
            ValueError, TypeError: If an argument is invalid.
            StopTrainingError: If a loss was NaN and ``on_nan="raise"``.
            SystemExit: If a loss was NaN without a core context and ``on_nan="exit"``.
        """
        epochs = _whole("num_epochs", num_epochs, least=0, needed=True)
        accumulation = _whole("gradient_accumulation_steps", gradient_accumulation_steps, needed=True)
        limit = _whole("max_num_train_steps", max_num_train_steps)
        clip_norm = _above_0("gradient_clip_norm", gradient_clip_norm)
        if track_gradient_norm and clip_norm is None:
            clip_norm = math.inf
        if checkpoint_every != "epoch":
            checkpoint_every = _whole("checkpoint_every", checkpoint_every)
        run = Run(
            clip_norm=clip_norm,
            evaluate_every=_whole("evaluate_every", evaluate_every),
            report_every=_whole("report_every", report_every),
            checkpoint_every=checkpoint_every,
        )
        clip_value = _above_0("gradient_clip_value", gradient_clip_value)
        self.train_dataset = train_dataset
        self.eval_dataset = eval_dataset
        self.create_scheduler_fn = create_scheduler_fn
        self.collate_fn = collate_fn
        self.scheduler = self._eval_dataloader = self._train_dl_kwargs = self._eval_dl_kwargs = None
        if reset_run_history and resume_from is None:
            self.run_history.reset()
        self._train_dataloader = self.create_train_dataloader(
            batch_size=per_device_batch_size, train_dl_kwargs=train_dataloader_kwargs
        )
        if eval_dataset is not None:
            self._eval_dataloader = self.create_eval_dataloader(
                batch_size=per_device_batch_size, eval_dl_kwargs=eval_dataloader_kwargs
            )
        self._det_core.is_loaded = False
        with open_run(self):
            self._prepare_model_optimizer_and_dataloaders()
            self.run_config = self._create_run_config(per_device_batch_size, epochs, accumulation, limit, clip_value)
            self._check_eval_batch_size()
            if create_scheduler_fn is not None:
                self.scheduler = self.create_scheduler()
            if not begin_run(self, run, resume_from):
                return
            if resume_from is not None:
                metadata = self.load_training_state(resume_from) or {}
                if not self._det_core.is_loaded:  # an override loaded it without our position
                    go_to(self, metadata)
                self._det_core.is_loaded = False
                self.print(f"Resumed training state from {resume_from} (epoch {metadata.get('current_epoch', 0)})")
            for parameter in _parameters(self.optimizer):  # an earlier run may have ended within an accumulation group
                parameter.grad = None
            self._run_training()

    def _prepare_model_optimizer_and_dataloaders(self) -> None:
        """Move model and optimizers to their devices and ranks, and order the loaders by the seed."""
        session = self._det_core
        session.strategy.free()
        self._accelerator = self._create_accelerator()
        connect(self)
        strategy = session.strategy
        session.seed = self._chosen_seed()
        if session.given_seed is not None and self._train_dataloader is not None:
            set_seed(session.seed + strategy.process_index)
        session.move_metrics()
        if session.managed is not None or session.has_peers:
            self._warn_of_parameters_beside_the_model()
        self.model, prepared = strategy.prepare(self.model, as_list(self.optimizer))
        self.optimizer = in_container_of(self.optimizer, prepared)
        for name, even in (("_train_dataloader", True), ("_eval_dataloader", self._pad_uneven_eval_batches)):
            if (loader := getattr(self, name)) is not None:
                adapted = EpochLoader(
                    loader, seed=session.seed, rank=strategy.process_index, size=strategy.num_processes, even=even,
                    device=strategy.device, shared=getattr(self._accelerator, "gradient_state", None),
                )  # fmt: skip
                setattr(self, name, adapted)
        self.callback_handler.call_event("on_loaders_prepared", self)

    def _warn_of_parameters_beside_the_model(self) -> None:
        known = {id(parameter) for parameter in self.model.parameters()}
        beside = [tuple(p.shape) for p in _parameters(self.optimizer) if id(p) not in known]
        if beside:
            warnings.warn(
                f"the optimizer updates {len(beside)} parameter(s) that are not the model's, such as one of shape "
                f"{beside[0]}: they are not in the core's checkpoints and not averaged over ranks; make their module a "
                "part of the model",
                UserWarning, stacklevel=2,
            )  # fmt: skip

    def _chosen_seed(self) -> int:
        """Return the seed of this run, equal on every rank."""
        session = self._det_core
        if session.given_seed is None:
            seed = int(torch.initial_seed())
            if session.ranks is None:
                return seed
            return int(session.ranks.distributed.broadcast(seed))
        if session.given_seed is not _UNSET:
            return int(session.given_seed)
        if session.managed is None or session.managed.trial is None:
            return DEFAULT_SEED
        return int(session.managed.trial.trial_seed)

    def _create_run_config(
        self, per_device_batch_size: int, num_epochs: int, gradient_accumulation_steps: int,
        max_num_train_steps: int | None, gradient_clip_value: float | None,
    ) -> TrainerRunConfig:  # fmt: skip
        """Return sizes and lengths of the next run; batch sizes of the loaders take precedence."""
        strategy = self._det_core.strategy
        size = strategy.num_processes
        train_size = batch_size_of(self._train_dataloader) or per_device_batch_size
        eval_size = batch_size_of(self._eval_dataloader) or per_device_batch_size
        batches: int | None = 0
        if self._train_dataloader is not None:
            batches = length_of(self._train_dataloader)
        everywhere = None
        local = None
        if batches is not None:
            everywhere = -(-batches * size // gradient_accumulation_steps)
            local = -(-batches // gradient_accumulation_steps)
        limit = max_num_train_steps
        if limit is not None and everywhere:
            num_epochs = -(-limit // everywhere)
        elif limit is None and everywhere is not None:
            limit = num_epochs * everywhere + 1
        return TrainerRunConfig(
            num_epochs=num_epochs, train_per_device_batch_size=train_size, train_dl_kwargs=self._train_dl_kwargs,
            eval_per_device_batch_size=eval_size, eval_dl_kwargs=self._eval_dl_kwargs,
            gradient_accumulation_steps=gradient_accumulation_steps, gradient_clip_value=gradient_clip_value,
            train_total_batch_size=train_size * size * gradient_accumulation_steps,
            eval_total_batch_size=eval_size * size, num_update_steps_per_epoch=everywhere,
            num_local_update_steps_per_epoch=local,
            max_num_train_steps=limit, is_local_process_zero=strategy.is_local_main_process,
            is_world_process_zero=strategy.is_main_process, is_distributed=size > 1,
            mixed_precision=strategy.mixed_precision, num_processes=size,
        )  # fmt: skip

    def _check_eval_batch_size(self) -> None:
        """Warn before training if ranks would lack batches in the last evaluation step.

        Raises:
            ValueError: If a batch of all ranks is larger than the dataset.
        """
        config = self.run_config
        loader = self._eval_dataloader
        if not config.is_distributed or loader is None or self.eval_dataset is None:
            return
        samples = length_of(self.eval_dataset)
        if samples is None or batch_size_of(loader) is None:
            return
        if config.eval_total_batch_size > samples:
            raise ValueError(
                f"an evaluation batch of all ranks holds {config.eval_total_batch_size} samples, and the evaluation "
                f"dataset {samples}: use a smaller batch size"
            )
        rest = samples % config.eval_total_batch_size
        if not rest or self._pad_uneven_eval_batches:
            return
        if rest <= config.eval_per_device_batch_size * (config.num_processes - 1):
            problem = "some ranks have no batch: gather() in calculate_eval_batch_loss() would wait for them for ever"
        elif rest % config.num_processes:
            problem = "ranks have batches of different sizes: gather() then needs padding_value="
        else:
            return
        warnings.warn(f"in the last evaluation step {problem}", UserWarning, stacklevel=3)

    def evaluate(
        self, dataset: Any = None, per_device_batch_size: int = 8,
        dataloader_kwargs: Mapping[str, Any] | None = None, collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:  # fmt: skip
        """Evaluate the model; afterwards the run history has ``evaluation_loss`` and ``evaluation_<metric>`` only.

        Args:
            dataset: the samples. Defaults to those of the last ``train()``.
            per_device_batch_size: samples in a batch of a rank.
            dataloader_kwargs: arguments of the loader.
            collate_fn: function that makes a batch of a list of samples.
        """
        if dataset is not None:
            self.eval_dataset = dataset
        self.collate_fn = collate_fn
        self.run_history.reset()
        self._train_dataloader = self._eval_dl_kwargs = None
        self._eval_dataloader = self.create_eval_dataloader(
            batch_size=per_device_batch_size, eval_dl_kwargs=dataloader_kwargs
        )
        with open_run(self):
            self._prepare_model_optimizer_and_dataloaders()
            self.run_config = self._create_run_config(per_device_batch_size, 1, 1, 0, None)
            self._check_eval_batch_size()
            self._run_evaluation()


class TrainerWithTimmScheduler(Trainer):
    """Trainer for schedulers of timm.

    It calls ``step_update(num_updates=)`` after each update, from 1, and ``step(epoch, metric=)`` after each epoch,
    with the number of completed epochs.
    """

    num_updates: int | None = None

    def train_epoch_start(self) -> None:
        """Start an epoch at the current number of updates."""
        super().train_epoch_start()
        self.num_updates = self._det_core.run.updates

    def scheduler_step(self) -> None:
        """Count an update, and step the schedulers."""
        self.num_updates = (self.num_updates or 0) + 1
        for scheduler in as_list(self.scheduler):
            scheduler.step_update(num_updates=self.num_updates)

    def _det_core_epoch_done(self) -> None:
        losses = self.run_history.get_metric_values("eval_loss_epoch")
        epochs = self._det_core.run.epoch + 1
        for scheduler in as_list(self.scheduler):
            parameters = inspect.signature(scheduler.step).parameters.values()
            # timm's own schedulers take it; a user-defined one need not
            if any(p.name == "metric" or p.kind is p.VAR_KEYWORD for p in parameters):
                scheduler.step(epochs, metric=losses[-1] if losses else None)
            else:
                scheduler.step(epochs)


def _parameters(optimizer: Any) -> list[torch.nn.Parameter]:
    return parameters_of(with_param_groups(optimizer))


def _merge_loader_kwargs(defaults: dict[str, Any], overrides: Mapping[str, Any] | None, dataset: Any) -> dict[str, Any]:
    """Return a loader's arguments with overrides, without defaults that torch rejects in combination with them."""
    # the full name, as users replace the global DataLoader of this module by functions
    if isinstance(dataset, torch.utils.data.DataLoader):
        raise TypeError(
            "a DataLoader was given as the dataset: give its dataset, and its arguments in train_dataloader_kwargs= or "
            "eval_dataloader_kwargs=, or override create_train_dataloader() and create_eval_dataloader()"
        )
    merged = {**defaults, **(overrides or {})}
    own_batches = merged.get("batch_sampler") is not None
    if own_batches:
        merged.pop("batch_size", None)
    is_empty = length_of(dataset) == 0  # torch cannot shuffle it, and its error does not name the dataset
    if own_batches or merged.get("sampler") is not None or isinstance(dataset, IterableDataset) or is_empty:
        merged.pop("shuffle", None)
    return merged


def _whole(name: str, value: Any, *, least: int = 1, needed: bool = False) -> Any:
    """Return a whole number of any type, such as numpy's or 1e4, as an int; None stays unless a value is needed."""
    if value is None and not needed:
        return None
    if isinstance(value, bool) or not isinstance(value, REAL) or value % 1:
        raise TypeError(f"{name}={value!r}: expected a whole number of at least {least}")
    if not value >= least:
        raise ValueError(f"{name}={value!r}: expected a whole number of at least {least}")
    return int(value)


def _above_0(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, REAL) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected a number above 0")
    if not value > 0:  # rejects NaN too, unlike value <= 0
        raise ValueError(f"{name}={value!r}: expected a number above 0")
    return float(value)

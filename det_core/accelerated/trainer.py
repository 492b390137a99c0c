"""The Trainer: a model, a loss function and an optimizer in, a managed training out; each step of it a method."""

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
from det_core.accelerated._base import Run, Session, listed, named, shaped, with_groups
from det_core.accelerated._data import EpochLoader, batch_size_of, default_workers
from det_core.accelerated._events import CallbackHandler
from det_core.accelerated._loop import TrainingLoop, begin_run, connect, opened
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
REAL: Any = Real  # of which numpy's numbers are too


class Trainer(TrainingLoop, Saves):
    """Trains a model. Every step of the loop is a method to override; callbacks stand beside it.

    Args:
        model: the model.
        loss_func: ``loss_func(outputs, targets)``, a scalar.
        optimizer: the optimizer, or several in a list; None to only evaluate.
        callbacks: classes or instances; left out, the default ones.
        run_history: where metrics are kept; left out, in memory.
        core_context: the context of ``core.init()`` that the training is managed by. Left out: the one that is open;
            without any, nothing of the core is used in a single process.
        seed: what random numbers and the order of shuffled data come from. Left out: the trial's, else 42. None: the
            generators are left alone.
        metrics: what is computed over each evaluation: a torchmetrics ``Metric`` or ``MetricCollection``, or a
            dictionary of such; recorded as ``eval_<name>``. ``update(outputs, targets)``, ``compute()``, ``reset()``.
        train_metrics: the same over each training epoch, recorded as ``train_<name>``.
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``. Left out: as accelerate is configured.
        on_nan: what becomes of the process after a loss was NaN or infinite: ``"exit"`` (SystemExit), ``"raise"``
            (:class:`StopTrainingError`), ``"stop"`` (``train()`` returns). Under a core context the trial is reported
            as not worth repeating instead of the exit.
        profile: sample the machine during runs, by the core's profiler.
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
        for name, metric in (*named(metrics).items(), *named(train_metrics).items()):
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

    # what a run is made of

    @property
    def device(self) -> torch.device:
        """Where the model and its batches are."""
        return self._det_core.strategy.device

    def _create_accelerator(self) -> Any:
        """An ``accelerate.Accelerator``; to be overridden for one with options."""
        return make_accelerator(self._det_core.mixed_precision)

    def _create_callback_handler(self) -> CallbackHandler:
        return CallbackHandler(limited(self._callbacks))

    # loaders and scheduler

    def get_default_train_dl_kwargs(self, batch_size: int) -> dict[str, Any]:
        """The arguments of the training loader that ``train_dataloader_kwargs`` is laid over."""
        return {"shuffle": True, **self._loader_kwargs(batch_size)}

    def get_default_eval_dl_kwargs(self, batch_size: int) -> dict[str, Any]:
        """The arguments of the evaluation loader that ``eval_dataloader_kwargs`` is laid over."""
        return {"shuffle": False, **self._loader_kwargs(batch_size)}

    def _loader_kwargs(self, batch_size: int) -> dict[str, Any]:
        return {
            "pin_memory": torch.cuda.is_available(),
            "batch_size": batch_size,
            "num_workers": default_workers(),
            "worker_init_fn": worker_init_fn,
        }

    def create_train_dataloader(self, batch_size: int, train_dl_kwargs: Mapping[str, Any] | None = None) -> Any:
        """The loader of the training dataset; any iterable of batches will do.

        Args:
            batch_size: samples in a batch of a rank, unless ``train_dl_kwargs`` says.
            train_dl_kwargs: arguments of a ``DataLoader``.
        """
        given = self.get_default_train_dl_kwargs(batch_size)
        self._train_dl_kwargs = _merged(given, train_dl_kwargs, self.train_dataset)
        return DataLoader(dataset=self.train_dataset, collate_fn=self.collate_fn, **self._train_dl_kwargs)

    def create_eval_dataloader(self, batch_size: int, eval_dl_kwargs: Mapping[str, Any] | None = None) -> Any:
        """The loader of the evaluation dataset. Arguments as in :meth:`create_train_dataloader`."""
        given = self.get_default_eval_dl_kwargs(batch_size)
        self._eval_dl_kwargs = _merged(given, eval_dl_kwargs, self.eval_dataset)
        return DataLoader(dataset=self.eval_dataset, collate_fn=self.collate_fn, **self._eval_dl_kwargs)

    def create_scheduler(self) -> Any:
        """The scheduler that ``create_scheduler_fn`` makes of the optimizer, placeholders replaced.

        Raises:
            TypeError: it is no function of an optimizer that returns something with a ``step()``.
        """
        make = replace_trainer_placeholder_values(self, self.create_scheduler_fn)
        if not callable(make) or (hasattr(make, "step") and not isinstance(make, type)):
            raise TypeError(
                f"create_scheduler_fn={make!r}: expected a function that takes the optimizer and returns a scheduler"
            )
        scheduler = make(self.optimizer)
        each = scheduler if isinstance(scheduler, list | tuple) else [scheduler]
        if not all(callable(getattr(one, "step", None)) for one in each):
            raise TypeError(f"create_scheduler_fn returned {scheduler!r}, which has no step(): expected a scheduler")
        return scheduler

    # training

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
        """Train, and evaluate after each epoch if there is a dataset for it.

        Args:
            train_dataset: the samples, map-style or iterable.
            num_epochs: epochs in all, those before a resume included. Under a search, at most so many.
            eval_dataset: samples to evaluate on after each epoch.
            per_device_batch_size: samples in a batch of a rank.
            max_num_train_steps: updates, counted over all ranks, after which training ends, in place of ``num_epochs``.
            gradient_accumulation_steps: batches to an update.
            gradient_clip_value: clip each gradient to ±this before an update.
            create_scheduler_fn: makes a scheduler of the optimizer; it is stepped after each update. Keywords and
                arguments of a ``functools.partial`` may be placeholders (:class:`TrainerPlaceholderValues`).
            train_dataloader_kwargs, eval_dataloader_kwargs: arguments of the loaders.
            reset_run_history: forget the metrics of earlier runs.
            collate_fn: makes a batch of a list of samples.
            resume_from: a folder of :meth:`save_training_state` to go on from.
            gradient_clip_norm: scale the gradients down to a common norm of at most this.
            track_gradient_norm: record the mean norm of the gradients as ``train_gradient_norm``; always, if clipped
                by norm.
            report_every: also report metrics to the core after so many updates.
            checkpoint_every: save by the core after each ``"epoch"``, or after so many updates; None: only at the end,
                and before a preemption.
            evaluate_every: also evaluate after so many updates, in the middle of epochs; not after the last of one,
                whose end evaluates.

        Raises:
            ValueError, TypeError: an argument cannot be used.
            StopTrainingError: a loss was NaN, and ``on_nan="raise"``.
            SystemExit: a loss was NaN, ``on_nan="exit"``, and there is no core context.
        """
        epochs = _whole("num_epochs", num_epochs, least=0, needed=True)
        accumulation = _whole("gradient_accumulation_steps", gradient_accumulation_steps, needed=True)
        limit = _whole("max_num_train_steps", max_num_train_steps)
        clip_norm = _above_0("gradient_clip_norm", gradient_clip_norm)
        run = Run(
            clip_norm=math.inf if track_gradient_norm and clip_norm is None else clip_norm,
            evaluate_every=_whole("evaluate_every", evaluate_every),
            report_every=_whole("report_every", report_every),
            checkpoint_every="epoch" if checkpoint_every == "epoch" else _whole("checkpoint_every", checkpoint_every),
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
        with opened(self):
            self._prepare_model_optimizer_and_dataloaders()
            self.run_config = self._create_run_config(per_device_batch_size, epochs, accumulation, limit, clip_value)
            self._check_eval_batch_size()
            if create_scheduler_fn is not None:
                self.scheduler = self.create_scheduler()
            if not begin_run(self, run, resume_from):
                return
            if resume_from is not None:
                metadata = self.load_training_state(resume_from) or {}
                if not self._det_core.is_loaded:  # an override has loaded it
                    go_to(self, metadata)
                self._det_core.is_loaded = False
                self.print(f"Resumed training state from {resume_from} (epoch {metadata.get('current_epoch', 0)})")
            for parameter in _parameters(self.optimizer):  # a run before may have ended in the middle of a group
                parameter.grad = None
            self._run_training()

    def _prepare_model_optimizer_and_dataloaders(self) -> None:
        """Put model and optimizers on their devices and ranks, and the loaders in the order of this seed."""
        session = self._det_core
        session.strategy.free()
        self._accelerator = self._create_accelerator()
        connect(self)
        strategy = session.strategy
        session.seed = self._chosen_seed()
        if session.given_seed is not None and self._train_dataloader is not None:
            set_seed(session.seed + strategy.process_index)
        session.move_metrics()
        if session.managed is not None or session.several:
            self._warn_of_parameters_beside_the_model()
        self.model, prepared = strategy.prepare(self.model, listed(self.optimizer))
        self.optimizer = shaped(self.optimizer, prepared)
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
        """The seed of this run, the same on every rank."""
        session = self._det_core
        if session.given_seed is None:
            seed = torch.initial_seed()
            return seed if session.ranks is None else int(session.ranks.distributed.broadcast(seed))
        if session.given_seed is not _UNSET:
            return int(session.given_seed)
        trial = None if session.managed is None else session.managed.trial
        return DEFAULT_SEED if trial is None else int(trial.trial_seed)

    def _create_run_config(
        self, per_device_batch_size: int, num_epochs: int, gradient_accumulation_steps: int,
        max_num_train_steps: int | None, gradient_clip_value: float | None,
    ) -> TrainerRunConfig:  # fmt: skip
        """The sizes and lengths of the run that begins; the loaders say what their batch size is."""
        strategy = self._det_core.strategy
        size = self._det_core.strategy.num_processes
        train_size = batch_size_of(self._train_dataloader) or per_device_batch_size
        eval_size = batch_size_of(self._eval_dataloader) or per_device_batch_size
        local = 0 if self._train_dataloader is None else length_of(self._train_dataloader)
        everywhere = None if local is None else -(-local * size // gradient_accumulation_steps)
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
            num_local_update_steps_per_epoch=None if local is None else -(-local // gradient_accumulation_steps),
            max_num_train_steps=limit, is_local_process_zero=strategy.is_local_main_process,
            is_world_process_zero=strategy.is_main_process, is_distributed=size > 1,
            mixed_precision=strategy.mixed_precision, num_processes=size,
        )  # fmt: skip

    def _check_eval_batch_size(self) -> None:
        """Say before training if ranks would have nothing to evaluate.

        Raises:
            ValueError: the batches of all ranks hold more than the whole dataset.
        """
        config = self.run_config
        loader = self._eval_dataloader
        samples = length_of(self.eval_dataset) if loader is not None and self.eval_dataset is not None else None
        if not config.is_distributed or samples is None or batch_size_of(loader) is None:
            return
        if config.eval_total_batch_size > samples:
            raise ValueError(
                f"an evaluation batch of all ranks holds {config.eval_total_batch_size} samples, and the evaluation "
                f"dataset {samples}: use a smaller batch size"
            )
        rest = 0 if self._pad_uneven_eval_batches else samples % config.eval_total_batch_size
        if rest and rest <= config.eval_per_device_batch_size * (config.num_processes - 1):
            what = "some ranks have no batch: gather() in calculate_eval_batch_loss() would wait for them for ever"
        elif rest and rest % config.num_processes:
            what = "ranks have batches of different sizes: gather() then needs padding_value="
        else:
            return
        warnings.warn(f"in the last evaluation step {what}", UserWarning, stacklevel=3)

    def evaluate(
        self, dataset: Any = None, per_device_batch_size: int = 8,
        dataloader_kwargs: Mapping[str, Any] | None = None, collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:  # fmt: skip
        """Evaluate the model; the run history then holds ``evaluation_loss`` and ``evaluation_<metric>`` alone.

        Args:
            dataset: the samples; left out, those of the last ``train()``.
            per_device_batch_size: samples in a batch of a rank.
            dataloader_kwargs: arguments of the loader.
            collate_fn: makes a batch of a list of samples.
        """
        if dataset is not None:
            self.eval_dataset = dataset
        self.collate_fn = collate_fn
        self.run_history.reset()
        self._train_dataloader = self._eval_dl_kwargs = None
        self._eval_dataloader = self.create_eval_dataloader(
            batch_size=per_device_batch_size, eval_dl_kwargs=dataloader_kwargs
        )
        with opened(self):
            self._prepare_model_optimizer_and_dataloaders()
            self.run_config = self._create_run_config(per_device_batch_size, 1, 1, 0, None)
            self._check_eval_batch_size()
            self._run_evaluation()


class TrainerWithTimmScheduler(Trainer):
    """A Trainer for schedulers of timm: ``step_update(num_updates=)`` after each update, counted from 1, and
    ``step(epoch, metric=)`` after each epoch, with the number of epochs done."""

    num_updates: int | None = None

    def train_epoch_start(self) -> None:
        """Count from the updates made so far."""
        super().train_epoch_start()
        self.num_updates = self._det_core.run.updates

    def scheduler_step(self) -> None:
        """Count an update."""
        self.num_updates = (self.num_updates or 0) + 1
        for scheduler in listed(self.scheduler):
            scheduler.step_update(num_updates=self.num_updates)

    def _det_core_epoch_done(self) -> None:
        watched = self.run_history.get_metric_values("eval_loss_epoch")
        for scheduler in listed(self.scheduler):
            takes = inspect.signature(scheduler.step).parameters.values()
            has_metric = any(p.name == "metric" or p.kind is p.VAR_KEYWORD for p in takes)
            more = {"metric": watched[-1] if watched else None} if has_metric else {}
            scheduler.step(self._det_core.run.epoch + 1, **more)


def _parameters(optimizer: Any) -> list[torch.nn.Parameter]:
    return parameters_of(with_groups(optimizer))


def _merged(default: dict[str, Any], given: Mapping[str, Any] | None, dataset: Any) -> dict[str, Any]:
    """The loader's arguments with the user's over them; without those that torch refuses beside them."""
    if isinstance(dataset, torch.utils.data.DataLoader):  # people put factories in the place of the name below
        raise TypeError(
            "a DataLoader was given as the dataset: give its dataset, and its arguments in train_dataloader_kwargs= or "
            "eval_dataloader_kwargs=, or override create_train_dataloader() and create_eval_dataloader()"
        )
    merged = {**default, **(given or {})}
    own_batches = merged.get("batch_sampler") is not None
    if own_batches:
        merged.pop("batch_size", None)
    is_empty = length_of(dataset) == 0  # torch refuses to shuffle nothing, and does not say which dataset that is
    if own_batches or merged.get("sampler") is not None or isinstance(dataset, IterableDataset) or is_empty:
        merged.pop("shuffle", None)
    return merged


def _whole(name: str, value: Any, *, least: int = 1, needed: bool = False) -> Any:
    """A whole number of any kind, numpy's or 1e4, as an int; None stays, unless it is needed."""
    if value is None and not needed:
        return None
    if isinstance(value, bool) or not isinstance(value, REAL) or value % 1:
        raise TypeError(f"{name}={value!r}: expected a whole number of at least {least}")
    if not value >= least:
        raise ValueError(f"{name}={value!r}: expected a whole number of at least {least}")
    return int(value)


def _above_0(name: str, value: Any) -> float | None:
    if value is not None and (not isinstance(value, REAL) or isinstance(value, bool)):
        raise TypeError(f"{name}={value!r}: expected a number above 0")
    if value is not None and not value > 0:  # NaN is not
        raise ValueError(f"{name}={value!r}: expected a number above 0")
    return None if value is None else float(value)

"""The Trainer: a model, a loss function and an optimizer in, a managed training out; each step of it a method."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from det_core._training.strategy import parameters_of
from det_core.accelerated import _state
from det_core.accelerated._accelerate import AccelerateStrategy, make_accelerator
from det_core.accelerated._data import EpochLoader, default_workers, length_of
from det_core.accelerated._events import CallbackHandler
from det_core.accelerated._loop import Run, TrainingLoop
from det_core.accelerated._managed import Managed, Ranks, open_context
from det_core.accelerated._placeholders import TrainerPlaceholderValues, replace_trainer_placeholder_values
from det_core.accelerated._strategy import Strategy
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


class Trainer(TrainingLoop):
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
        mixed_precision: ``"no"``, ``"bf16"`` or ``"fp16"``. Left out: as accelerate is configured, where it is there.
        on_nan: what becomes of the process after a loss was NaN or infinite: ``"exit"`` (SystemExit), ``"raise"``
            (:class:`StopTrainingError`), ``"stop"`` (``train()`` returns). Under a core context the trial is reported
            as not worth repeating instead of the exit.
        profile: sample the machine during runs, by the core's profiler.
    """

    create_scheduler_fn: Any = None
    collate_fn: Any = None
    train_dataset: Any = None
    _train_dl_kwargs: dict[str, Any] | None = None
    _eval_dl_kwargs: dict[str, Any] | None = None
    _pad_uneven_eval_batches = False
    _seed = DEFAULT_SEED

    def __init__(
        self,
        model: Any,
        loss_func: Any,
        optimizer: Any,
        callbacks: Iterable[Any] = DEFAULT_CALLBACKS,
        run_history: RunHistory | None = None,
        *,
        core_context: Any = None,
        seed: int | None = _UNSET,
        metrics: Any = None,
        train_metrics: Any = None,
        mixed_precision: str | None = None,
        on_nan: str = "exit",
        profile: bool = False,
    ) -> None:
        if on_nan not in ("exit", "raise", "stop"):
            raise ValueError(f"on_nan={on_nan!r}: expected 'exit', 'raise' or 'stop'")
        self.model, self.loss_func, self.optimizer = model, loss_func, optimizer
        self.run_history = InMemoryRunHistory() if run_history is None else run_history
        self._eval_metrics, self._train_metrics = metrics, train_metrics
        self._callbacks = callbacks
        self._mixed_precision, self._on_nan, self._profile = mixed_precision, on_nan, profile
        self._given_context, self._given_seed = core_context, seed
        self._run, self._loss_tracker = Run(), LossTracker()
        self._set_accelerator()
        self.callback_handler = self._create_callback_handler()
        self.callback_handler.call_event("on_init_end", self)

    # what a run is made of

    @property
    def device(self) -> torch.device:
        """Where the model and its batches are."""
        return self._strategy.device

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first of all ranks."""
        return self._strategy.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self._strategy.is_local_main_process

    def _create_accelerator(self) -> Any:
        """An ``accelerate.Accelerator`` where accelerate is installed, else what does without it; to be overridden for
        an accelerator with options."""
        accelerator = make_accelerator(self._mixed_precision)
        return Strategy(self._mixed_precision or "no") if accelerator is None else accelerator

    def _set_accelerator(self) -> None:
        accelerator = self._accelerator = self._create_accelerator()
        self._strategy = accelerator if isinstance(accelerator, Strategy) else AccelerateStrategy(accelerator)

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
        self,
        train_dataset: Any,
        num_epochs: int,
        eval_dataset: Any = None,
        per_device_batch_size: int = 8,
        max_num_train_steps: int | None = None,
        gradient_accumulation_steps: int = 1,
        gradient_clip_value: float | None = None,
        create_scheduler_fn: Callable[..., Any] | None = None,
        train_dataloader_kwargs: Mapping[str, Any] | None = None,
        eval_dataloader_kwargs: Mapping[str, Any] | None = None,
        reset_run_history: bool = True,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        resume_from: Any = None,
        *,
        gradient_clip_norm: float | None = None,
        track_gradient_norm: bool = False,
        report_every: int | None = None,
        checkpoint_every: int | str | None = "epoch",
        evaluate_every: int | None = None,
    ) -> None:
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
        _check_numbers(
            num_epochs=num_epochs, gradient_accumulation_steps=gradient_accumulation_steps,
            max_num_train_steps=max_num_train_steps, report_every=report_every, evaluate_every=evaluate_every,
            checkpoint_every=None if checkpoint_every == "epoch" else checkpoint_every,
            gradient_clip_value=gradient_clip_value, gradient_clip_norm=gradient_clip_norm,
        )  # fmt: skip
        if self.optimizer is None:
            raise ValueError("train() needs an optimizer, and this Trainer has none")
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.create_scheduler_fn, self.collate_fn = create_scheduler_fn, collate_fn
        self.scheduler = self._eval_dataloader = self._train_dl_kwargs = self._eval_dl_kwargs = None
        self.preempted = False
        if reset_run_history and resume_from is None:
            self.run_history.reset()
        self._train_dataloader = self.create_train_dataloader(
            batch_size=per_device_batch_size, train_dl_kwargs=train_dataloader_kwargs
        )
        if eval_dataset is not None:
            self._eval_dataloader = self.create_eval_dataloader(
                batch_size=per_device_batch_size, eval_dl_kwargs=eval_dataloader_kwargs
            )
        with self._prepared():
            self.run_config = self._create_run_config(
                per_device_batch_size, num_epochs, gradient_accumulation_steps, max_num_train_steps, gradient_clip_value
            )
            self._check_eval_batch_size()
            endless = max_num_train_steps is not None and self.run_config.num_update_steps_per_epoch is None
            only_tracked = math.inf if track_gradient_norm else None
            self._run = Run(
                num_epochs=sys.maxsize if endless else self.run_config.num_epochs,
                accumulation=gradient_accumulation_steps, max_steps=max_num_train_steps, clip_value=gradient_clip_value,
                clip_norm=only_tracked if gradient_clip_norm is None else gradient_clip_norm,
                evaluate_every=evaluate_every, report_every=report_every, checkpoint_every=checkpoint_every,
            )  # fmt: skip
            self.scheduler = None if create_scheduler_fn is None else self.create_scheduler()
            if self._managed is not None and not self._managed.begin(self, resume_from):
                return
            if resume_from is not None:
                epoch = self.load_training_state(resume_from).get("current_epoch", 0)
                self.print(f"Resumed training state from {resume_from} (epoch {epoch})")
            for parameter in parameters_of(self.optimizers):  # a run before may have ended in the middle of a group
                parameter.grad = None
            self._run_training()

    @contextmanager
    def _prepared(self) -> Iterator[None]:
        """Model, optimizers and loaders prepared, and given back as they were, whatever happens."""
        try:
            self._prepare_model_optimizer_and_dataloaders()
            yield
        except RuntimeError:
            if self._several and self._ranks is not None:  # torch only says that a connection was closed
                self._ranks.distributed.raise_if_left()
            raise
        finally:
            self._unprepare()
            if isinstance(self._ranks, Ranks):  # the others are told of an error
                self._ranks.distributed.close(failure=sys.exc_info()[1])
            self._ranks = None

    def _prepare_model_optimizer_and_dataloaders(self) -> None:
        """Put model and optimizers on their devices and ranks, and the loaders in the order of this seed."""
        self._strategy.free_memory()
        self._set_accelerator()
        strategy = self._strategy
        context = open_context(self._given_context)
        if context is not None and context.distributed.size != strategy.num_processes:
            raise ValueError(
                f"the core context has {context.distributed.size} rank(s), and the model is trained by "
                f"{strategy.num_processes}: give core.init(distributed=core.DistributedContext.detect())"
            )
        self._managed = None if context is None else Managed.of(context)
        self._ranks = context or (Ranks() if strategy.num_processes > 1 else None)
        self._seed = self._chosen_seed()
        if self._given_seed is not None and self._train_dataloader is not None:
            set_seed(self._seed + strategy.process_index)
        self._move_metrics()
        if context is not None or self._several:
            self._warn_of_parameters_beside_the_model()
        many = isinstance(self.optimizer, list | tuple)
        self.model, prepared = strategy.prepare(self.model, self.optimizers)
        self.optimizer = prepared if many else prepared[0] if prepared else None
        for name, even in (("_train_dataloader", True), ("_eval_dataloader", self._pad_uneven_eval_batches)):
            if (loader := getattr(self, name)) is not None:
                rank, size = strategy.process_index, strategy.num_processes
                adapted = EpochLoader(loader, seed=self._seed, rank=rank, size=size, even=even, device=strategy.device)
                setattr(self, name, adapted)
        self.callback_handler.call_event("on_loaders_prepared", self)

    def _warn_of_parameters_beside_the_model(self) -> None:
        known = {id(parameter) for parameter in self.model.parameters()}
        beside = [tuple(p.shape) for p in parameters_of(self.optimizers) if id(p) not in known]
        if beside:
            warnings.warn(
                f"the optimizer updates {len(beside)} parameter(s) that are not the model's, such as one of shape "
                f"{beside[0]}: they are not in the core's checkpoints and not averaged over ranks; make their module a "
                "part of the model",
                UserWarning, stacklevel=2,
            )  # fmt: skip

    def _chosen_seed(self) -> int:
        """The seed of this run, the same on every rank."""
        if self._given_seed is None:
            seed = torch.initial_seed()
            return seed if self._ranks is None else int(self._ranks.distributed.broadcast(seed))
        if self._given_seed is not _UNSET:
            return int(self._given_seed)
        trial = None if self._managed is None else self._managed.trial
        return DEFAULT_SEED if trial is None else trial.trial_seed

    def _create_run_config(
        self,
        per_device_batch_size: int,
        num_epochs: int,
        gradient_accumulation_steps: int,
        max_num_train_steps: int | None,
        gradient_clip_value: float | None,
    ) -> TrainerRunConfig:
        """The sizes and lengths of the run that begins; the loaders say what their batch size is."""
        strategy, size = self._strategy, self._strategy.num_processes
        train_size, eval_size = _batch_size(self._train_dataloader), _batch_size(self._eval_dataloader)
        local = 0 if self._train_dataloader is None else length_of(self._train_dataloader)
        everywhere = None if local is None else -(-local * size // gradient_accumulation_steps)
        limit = max_num_train_steps
        if limit is not None and everywhere:
            num_epochs = -(-limit // everywhere)
        elif limit is None and everywhere is not None:
            limit = num_epochs * everywhere + 1
        return TrainerRunConfig(
            num_epochs=num_epochs,
            train_per_device_batch_size=train_size,
            train_dl_kwargs=self._train_dl_kwargs,
            eval_per_device_batch_size=eval_size,
            eval_dl_kwargs=self._eval_dl_kwargs,
            gradient_accumulation_steps=gradient_accumulation_steps,
            gradient_clip_value=gradient_clip_value,
            train_total_batch_size=None if train_size is None else train_size * size * gradient_accumulation_steps,
            eval_total_batch_size=None if eval_size is None else eval_size * size,
            num_update_steps_per_epoch=everywhere,
            num_local_update_steps_per_epoch=None if local is None else -(-local // gradient_accumulation_steps),
            max_num_train_steps=limit,
            is_local_process_zero=strategy.is_local_main_process,
            is_world_process_zero=strategy.is_main_process,
            is_distributed=size > 1,
            mixed_precision=strategy.mixed_precision,
            num_processes=size,
        )

    def _check_eval_batch_size(self) -> None:
        """Say before training if ranks would have nothing to evaluate.

        Raises:
            ValueError: the batches of all ranks hold more than the whole dataset.
        """
        config, loader = self.run_config, self._eval_dataloader
        samples = length_of(self.eval_dataset) if loader is not None and self.eval_dataset is not None else None
        if not config.is_distributed or samples is None or config.eval_total_batch_size is None:
            return
        if config.eval_total_batch_size > samples:
            raise ValueError(
                f"an evaluation batch of all ranks holds {config.eval_total_batch_size} samples, and the evaluation "
                f"dataset {samples}: use a smaller batch size"
            )
        rest = samples % config.eval_total_batch_size
        if rest and rest <= config.eval_per_device_batch_size * (config.num_processes - 1):
            what = "some ranks have no batch: gather() in calculate_eval_batch_loss() would wait for them for ever"
        elif rest and rest % config.num_processes:
            what = "ranks have batches of different sizes: gather() then needs padding_value="
        else:
            return
        warnings.warn(f"in the last evaluation step {what}", UserWarning, stacklevel=3)

    def evaluate(
        self,
        dataset: Any = None,
        per_device_batch_size: int = 8,
        dataloader_kwargs: Mapping[str, Any] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
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
        with self._prepared():
            self.run_config = self._create_run_config(per_device_batch_size, 1, 1, 0, None)
            self._check_eval_batch_size()
            self._run_evaluation()

    # checkpoints

    def save_checkpoint(
        self,
        save_path: Any,
        checkpoint_kwargs: Mapping[str, Any] | None = None,
        save_optimizer: bool = True,
        save_scheduler: bool = True,
        save_per_node: bool = True,
    ) -> None:
        """Write model, optimizer and scheduler to one file, which ``torch.load(weights_only=True)`` reads.

        Args:
            save_path: the file.
            checkpoint_kwargs: more keys of it.
            save_optimizer, save_scheduler: what is in it beside the model.
            save_per_node: write it on each machine, not on the first alone.
        """
        _state.save_checkpoint(self, save_path, checkpoint_kwargs, save_optimizer, save_scheduler, save_per_node)

    def load_checkpoint(
        self, checkpoint_path: Any, load_optimizer: bool = True, load_scheduler: bool = True
    ) -> dict[str, Any]:
        """Load a file of :meth:`save_checkpoint`, and return all that is in it.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it holds an optimizer or a scheduler, and this Trainer has none.
            CheckpointError: it is of another model.
        """
        return _state.load_checkpoint(self, checkpoint_path, load_optimizer, load_scheduler)

    def save_training_state(self, output_dir: Any, checkpoint_kwargs: Mapping[str, Any] | None = None) -> None:
        """Save all that ``train(resume_from=)`` needs into a folder in accelerate's layout, on every rank.

        Called within a step, this is done after the update that the step belongs to.

        Raises:
            MissingExtra: accelerate is not installed.
        """
        self.after_update(lambda: _state.save_training_state(self, output_dir, checkpoint_kwargs))

    def load_training_state(self, input_dir: Any) -> dict[str, Any]:
        """Load a folder of :meth:`save_training_state`; returns its metadata, ``{}`` where there is none.

        Raises:
            FileNotFoundError: there is no such folder.
            MissingExtra: accelerate is not installed.
            CheckpointError: it is of another model or other optimizers.
        """
        return _state.load_training_state(self, input_dir)


class TrainerWithTimmScheduler(Trainer):
    """A Trainer for schedulers of timm: ``step_update(num_updates=)`` after each update, counted from 1, and
    ``step(epoch, metric=)`` after each epoch, with the number of epochs done."""

    num_updates: int | None = None

    def train_epoch_start(self) -> None:
        """Count from the updates made so far."""
        super().train_epoch_start()
        self.num_updates = self.updates_completed

    def scheduler_step(self) -> None:
        """Count an update."""
        assert self.num_updates is not None
        self.num_updates += 1
        for scheduler in self.schedulers:
            scheduler.step_update(num_updates=self.num_updates)

    def training_run_epoch_end(self) -> None:
        """Count an epoch."""
        super().training_run_epoch_end()
        watched = self.run_history.get_metric_values("eval_loss_epoch")
        for scheduler in self.schedulers:
            scheduler.step(self._run.epoch + 1, metric=watched[-1] if watched else None)


def _batch_size(loader: Any) -> int | None:
    """How many samples a loader's batches have, if it says so."""
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def _merged(default: dict[str, Any], given: Mapping[str, Any] | None, dataset: Any) -> dict[str, Any]:
    """The loader's arguments with the user's over them; without those that torch refuses beside them."""
    if isinstance(dataset, DataLoader):
        raise TypeError(
            "a DataLoader was given as the dataset: give its dataset, and its arguments in train_dataloader_kwargs= or "
            "eval_dataloader_kwargs=, or override create_train_dataloader() and create_eval_dataloader()"
        )
    merged = {**default, **(given or {})}
    own_batches = merged.get("batch_sampler") is not None
    if own_batches:
        merged.pop("batch_size", None)
    if own_batches or merged.get("sampler") is not None or isinstance(dataset, IterableDataset):
        merged.pop("shuffle", None)
    return merged


def _check_numbers(**values: Any) -> None:
    for name, value in values.items():
        if value is None and name not in ("num_epochs", "gradient_accumulation_steps"):
            continue
        kind: Any = Real if "clip" in name else int
        least = 0 if name == "num_epochs" else 1
        wanted = "a number above 0" if kind is Real else f"a whole number of at least {least}"
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{name}={value!r}: expected {wanted}")
        if not (value > 0 if kind is Real else value >= least):  # NaN is neither
            raise ValueError(f"{name}={value!r}: expected {wanted}")

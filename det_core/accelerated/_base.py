"""What a Trainer is made of: its attributes, and each step of a training as a method that a user may override."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from det_core._notices import write_quietly
from det_core.accelerated._events import CallbackHandler, Stops, StopTrainingError
from det_core.accelerated._strategy import Strategy, nested
from det_core.accelerated.run_config import TrainerRunConfig
from det_core.accelerated.tracking import LossTracker, RunHistory
from det_core.accelerated.utils import remove_padding


@dataclass
class Position:
    """Where a run is: what a checkpoint keeps of it."""

    epoch: int = 0
    batch: int = 0
    part: int = 0
    """How much of the epoch under way is over: 1, its training; 2, its evaluation as well."""
    updates: int = 0
    """Optimizer updates, those before a resume included."""
    base: int = 0
    """Updates of earlier runs in this trial."""
    reported: int = 0
    """Updates when metrics were last reported within an epoch: equal on every rank, as counts of samples are not."""


@dataclass
class Run(Position):
    """A training run: where it is, what happens in it, and what ``train()`` was asked for beyond the run config."""

    clip_norm: float | None = None
    """Infinite: the norm is only tracked."""
    evaluate_every: int | None = None
    report_every: int | None = None
    checkpoint_every: int | str | None = "epoch"

    is_begun: bool = False
    """Whether what it goes on from was looked for."""
    accumulation: int = 1
    group: int = 0
    """Micro-batches in the accumulation group under way; 0 outside of an epoch of ours."""
    length: int | None = None
    """Batches in the epoch under way, where that is known."""
    norms: list[Any] = field(default_factory=list)
    window: tuple[Any, Any] = (0.0, 0)
    """The epoch's sum of losses and count of samples at that report."""

    in_epoch: bool = False
    in_step: bool = False
    """Between the first batch of an accumulation group and its update."""
    after_update: list[Callable[[], None]] = field(default_factory=list)
    ended: bool = False
    """The number of updates or the search says that training is over."""
    left: bool = False
    """The epoch under way is left in its middle, to be gone on with there."""
    stopped: StopTrainingError | None = None
    """What has ended the run."""


class Session(Stops):
    """All that a Trainer keeps for itself, in one object, so that a subclass may give its own attributes any name.

    Args:
        given: the arguments of the Trainer that are ours, by name.
    """

    strategy: Strategy
    given_context: Any
    given_seed: Any
    metrics: Any
    train_metrics: Any
    mixed_precision: str | None
    on_nan: str
    profile: bool

    def __init__(self, **given: Any) -> None:
        super().__init__()
        vars(self).update(given)
        self.run = Run()
        self.seed = 0
        self.managed: Any = None
        self.ranks: Any = None
        """Whose agreement a stop needs: the core's context, or what stands in for it; None: nobody's."""
        self.resumed: Any = None
        self.batch_loss: Any = None
        self.preempted = False
        self.loader_error: Exception | None = None
        self.step_start: Callable[..., None] | None = None
        self.step_end: Callable[..., None] | None = None
        self.on_update: Callable[..., None] | None = None
        self.is_loaded = False
        """Whether a training state was loaded, which the run that begins goes on from."""
        self.warned: set[str] = set()
        """Owners of states that are not part of checkpoints, as a warning has said."""
        self.is_open = False
        """Whether a run is prepared for, and not given back yet."""

    def after_update(self, call: Callable[[], None]) -> None:
        """Call something between the update under way and the next batch; outside of a training epoch, at once."""
        if self.run.in_step:
            self.run.after_update.append(call)
        else:
            call()

    @property
    def under_master(self) -> bool:
        """Whether this is a trial of an experiment."""
        return self.managed is not None and bool(self.managed.context.managed)

    def move_metrics(self) -> None:
        """Put the modules in ``metrics=`` and ``train_metrics=``, and what they have counted, on the device."""
        for metric in (*named(self.metrics).values(), *named(self.train_metrics).values()):
            if isinstance(metric, nn.Module):
                metric.to(self.strategy.device)


class Extra:
    """A property of ours: one that a subclass assigns to takes its place, and nothing of ours reads it."""

    def __init__(self, doc: str, read: Callable[[Any], Any]) -> None:
        self.__doc__ = doc
        self._read = read

    def __get__(self, trainer: Any, owner: Any = None) -> Any:
        return self if trainer is None else self._read(trainer)


class TrainerBase:
    """Each method here is called through ``self`` by the loop, so an override takes effect.

    An override of one that computes or updates something does so for itself; of the others, the default does nothing.
    """

    model: Any
    loss_func: Any
    optimizer: Any
    scheduler: Any = None
    callback_handler: CallbackHandler
    run_history: RunHistory
    run_config: TrainerRunConfig = None  # type: ignore[assignment]
    train_dataset: Any = None
    eval_dataset: Any = None
    _accelerator: Any
    _loss_tracker: LossTracker
    _train_dataloader: Any = None
    _eval_dataloader: Any = None
    _det_core: Session

    preempted = Extra(
        "Whether the last training was saved and left, to be resumed later.", lambda t: t._det_core.preempted
    )
    batch_loss = Extra(
        "The loss of the last batch: a number on a CPU, else a tensor.", lambda t: t._det_core.batch_loss
    )
    updates_completed = Extra("Updates of this run, with those before a resume.", lambda t: t._det_core.run.updates)
    steps_completed = Extra("Updates since the trial began: the unit of reports.", lambda t: steps_of(t))
    optimizers = Extra("The optimizers: none, one or several.", lambda t: listed(t.optimizer))
    schedulers = Extra("The schedulers: none, one or several.", lambda t: listed(t.scheduler))
    is_main_process = Extra("Whether this is the first of all ranks.", lambda t: t._det_core.strategy.is_main_process)
    is_local_main_process = Extra(
        "Whether it is that of its machine.", lambda t: t._det_core.strategy.is_local_main_process
    )

    # what a user overrides

    def training_run_start(self) -> None:
        """A training run begins."""

    def train_epoch_start(self) -> None:
        """A training epoch begins: the model is put into training mode."""
        self.model.train()

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        """Compute a batch's loss.

        A :class:`StopTrainingError` in a method of a step ends the job where there are several ranks, as the others
        wait for the rest of the step; one in an event stops the training on all of them.

        Returns:
            ``loss`` (a scalar with gradients), ``model_outputs``, ``batch_size``, and whatever callbacks are to see.
        """
        inputs, targets = batch[0], batch[1]
        outputs = self.model(inputs)
        return {"loss": self.loss_func(outputs, targets), "model_outputs": outputs, "batch_size": targets.size(0)}

    def backward_step(self, loss: Tensor) -> None:
        """Compute gradients.

        Args:
            loss: the batch's loss, divided by the number of batches in its update.
        """
        self._det_core.strategy.backward(loss)

    def _clip_gradients(self) -> None:
        """Clip gradients by value or by norm before an update, and note their norm."""
        run = self._det_core.run
        strategy = self._det_core.strategy
        limit = self.run_config.gradient_clip_value
        if limit is not None:
            strategy.clip_value(self.model, limit)
        if run.clip_norm is not None:
            run.norms.append(strategy.clip_norm(self.model, run.clip_norm).detach())

    def optimizer_step(self) -> None:
        """Update the parameters, by what ``self.optimizer`` is now.

        Raises:
            ValueError: there is no optimizer.
        """
        session = self._det_core
        optimizer = self.optimizer
        if optimizer is None:
            raise ValueError("training needs an optimizer, and this Trainer has none at its first update")
        session.strategy.step((optimizer,) if hasattr(optimizer, "step") else listed(optimizer))
        if not session.run.in_epoch:  # in an epoch of the user's own, which nobody else counts
            session.run.updates += 1

    def scheduler_step(self) -> None:
        """Step the scheduler, after an update."""
        for scheduler in listed(self.scheduler):
            scheduler.step()

    def optimizer_zero_grad(self) -> None:
        """Forget the gradients."""
        optimizer = self.optimizer
        self._det_core.strategy.zero_grad((optimizer,) if hasattr(optimizer, "zero_grad") else listed(optimizer))

    def train_epoch_end(self) -> None:
        """A training epoch is over."""

    def eval_epoch_start(self) -> None:
        """An evaluation begins: the model is put into evaluation mode."""
        self.model.eval()

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        """Compute a batch's loss in an evaluation; returns as :meth:`calculate_train_batch_loss` does."""
        return TrainerBase.calculate_train_batch_loss(self, batch)

    def eval_epoch_end(self) -> None:
        """An evaluation is over."""

    def training_run_epoch_end(self) -> None:
        """Training and evaluation of an epoch are over."""

    def training_run_end(self) -> None:
        """A training run is over."""

    def evaluation_run_start(self) -> None:
        """``evaluate()`` begins."""

    def evaluation_run_end(self) -> None:
        """``evaluate()`` is over."""

    def update_metrics(self, metrics: Any, batch: Any, batch_output: Mapping[str, Any]) -> None:
        """Count a batch in ``metrics=`` or ``train_metrics=``: ``update(outputs, targets)``."""
        outputs = batch_output["model_outputs"]
        outputs = outputs.detach() if isinstance(outputs, Tensor) else outputs
        for metric in named(metrics).values():
            metric.update(outputs, batch[1])

    def _det_core_epoch_done(self) -> None:
        """An epoch of a run is over, whatever is overridden; for schedulers that count epochs."""

    # at the user's service

    def after_update(self, call: Callable[[], None]) -> None:
        """Call something between the update under way and the next batch; outside of a training epoch, at once."""
        self._det_core.after_update(call)

    def gather(self, tensor: Any, padding_value: float | None = None) -> Any:
        """Nested tensors of all ranks, concatenated along the first dimension, on every rank.

        Args:
            tensor: a tensor, or lists, tuples and dictionaries of such.
            padding_value: what fills up tensors that are shorter on some ranks; rows of nothing else are dropped from
                the result. Left out, all must be of one length.
        """
        gather = self._det_core.strategy.gather
        if padding_value is None:
            return gather(tensor)

        def padded(one: Tensor) -> Tensor:
            longest = int(gather(torch.tensor([len(one)], device=one.device)).max())
            padding = one.new_full((longest - len(one), *one.shape[1:]), padding_value)
            return remove_padding(gather(torch.cat([one, padding])), padding_value)

        return nested(padded, tensor)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print()``, once on each machine, and at once. Under a master, whose logs name the trial before each line,
        without empty lines before a text."""
        if self._det_core.under_master and args and isinstance(args[0], str):
            args = (args[0].lstrip("\n"), *args[1:])
        with suppress(OSError):  # the reader may be gone, which ends no training
            self._accelerator.print(*args, **kwargs)
        write_quietly("", kwargs.get("file") or sys.stdout)

    def get_model(self, keep_torch_compile: bool = True) -> nn.Module:
        """The model without what spreads it over ranks.

        Args:
            keep_torch_compile: whether it stays compiled, if it is.
        """
        strategy = self._det_core.strategy
        return strategy.unwrap_model(self.model) if keep_torch_compile else strategy.bare(self.model)


def steps_of(trainer: TrainerBase) -> int:
    """Optimizer updates since the trial began."""
    return trainer._det_core.run.base + trainer._det_core.run.updates


def session_of(trainer: Any) -> Session | None:
    """Return what a Trainer keeps for itself; None of a stand-in for one, as users test their callbacks with."""
    session = getattr(trainer, "_det_core", None)
    return session if isinstance(session, Session) else None


def after_update(trainer: Any, call: Callable[[], None]) -> None:
    """Call something after the update under way; at once where a stand-in for a Trainer makes none."""
    session = session_of(trainer)
    if session is None:
        call()
    else:
        session.after_update(call)


def callbacks_of(trainer: TrainerBase) -> list[Any]:
    """The callbacks; none of a handler that has no list of them."""
    return list(getattr(trainer.callback_handler, "callbacks", ()))


def named(metrics: Any) -> dict[str, Any]:
    """What ``metrics=`` or ``train_metrics=`` was given, by name; a metric without one goes by its class."""
    if metrics is None:
        return {}
    return metrics if type(metrics) is dict else {type(metrics).__name__.lower(): metrics}


def listed(parts: Any) -> list[Any]:
    """Optimizers or schedulers, given as one, in a list or tuple, or in a dictionary."""
    if parts is None:
        return []
    return list(parts.values() if isinstance(parts, Mapping) else parts if isinstance(parts, list | tuple) else [parts])


def with_groups(optimizers: Any) -> list[Any]:
    """Return those of :func:`listed` that have parameter groups, as stand-ins for optimizers need not."""
    return [one for one in listed(optimizers) if isinstance(getattr(one, "param_groups", None), list)]


def shaped(parts: Any, new: Iterable[Any]) -> Any:
    """What :func:`listed` gave of ``parts``, changed one by one, in a container like theirs."""
    changed = list(new)
    if isinstance(parts, Mapping):
        return dict(zip(parts, changed, strict=True))
    return changed if isinstance(parts, list | tuple) else changed[0] if changed else None

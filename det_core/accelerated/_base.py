"""Base of a Trainer: its attributes, and each step of a training as a method to override."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from det_core._notices import write_quietly
from det_core.accelerated._events import CallbackHandler, PendingStop, StopTrainingError
from det_core.accelerated._strategy import Strategy, nested
from det_core.accelerated.run_config import TrainerRunConfig
from det_core.accelerated.tracking import LossTracker, RunHistory
from det_core.accelerated.utils import remove_padding

TRAINED = 1
EVALUATED = 2


@dataclass
class Position:
    """Position of a run, as stored in checkpoints."""

    epoch: int = 0
    batch: int = 0
    part: int = 0
    """Completed part of the current epoch: 0, or :data:`TRAINED` or :data:`EVALUATED`."""
    updates: int = 0
    """Optimizer updates, including those before a resume."""
    base: int = 0
    """Updates of earlier runs in this trial."""
    reported: int = 0
    """Updates at the last report within an epoch; unlike numbers of samples, equal on every rank."""


@dataclass
class Run(Position):
    """A training run: its position and state, and arguments of ``train()`` beyond the run config."""

    clip_norm: float | None = None
    """Maximum norm; infinite to track the norm only."""
    evaluate_every: int | None = None
    report_every: int | None = None
    checkpoint_every: int | str | None = "epoch"

    is_begun: bool = False
    """Whether the checkpoint to start from was looked for."""
    accumulation: int = 1
    group: int = 0
    """Micro-batches in the current accumulation group; 0 outside of a managed epoch."""
    length: int | None = None
    """Batches in the current epoch, or None if unknown."""
    norms: list[Any] = field(default_factory=list)
    window: tuple[Any, Any] = (0.0, 0)
    """Sum of losses and number of samples of the epoch at the last report."""

    in_epoch: bool = False
    in_step: bool = False
    """Whether it is between the first batch of an accumulation group and its update."""
    after_update: list[Callable[[], None]] = field(default_factory=list)
    has_ended: bool = False
    """Whether the limit of updates or the search has ended the training."""
    is_leaving: bool = False
    """Whether the run stops within an epoch, to be resumed there."""
    stopped: StopTrainingError | None = None
    """Stop that ended the run, or None."""


class Session(PendingStop):
    """Internal state of a Trainer in one object, so that subclasses can use any attribute name.

    Args:
        given: arguments of the Trainer that pytorch-accelerated does not have, by name.
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
        """Core context, or its substitute, through which ranks agree on stops; None with a single rank."""
        self.resumed: Any = None
        self.batch_loss: Any = None
        self.preempted = False
        self.loader_error: Exception | None = None
        self.step_start: Callable[..., None] | None = None
        self.step_end: Callable[..., None] | None = None
        self.on_update: Callable[..., None] | None = None
        self.is_loaded = False
        """Whether a training state is loaded, from which the next run continues."""
        self.warned: set[str] = set()
        """Owners of states left out of checkpoints with a warning."""
        self.is_open = False
        """Whether a run is being prepared or runs."""

    def after_update(self, call: Callable[[], None]) -> None:
        """Call a function between the current update and the next batch; outside of a training epoch, at once."""
        if self.run.in_step:
            self.run.after_update.append(call)
        else:
            call()

    @property
    def under_master(self) -> bool:
        """Whether this is a trial of an experiment."""
        return self.managed is not None and bool(self.managed.context.managed)

    def move_metrics(self) -> None:
        """Move the modules in ``metrics=`` and ``train_metrics=`` with their states to the device."""
        for metric in (*by_name(self.metrics).values(), *by_name(self.train_metrics).values()):
            if isinstance(metric, nn.Module):
                metric.to(self.strategy.device)


class ReplaceableProperty:
    """Property for users that a subclass may replace by assignment; internal code does not read it."""

    def __init__(self, doc: str, read: Callable[[Any], Any]) -> None:
        self.__doc__ = doc
        self._read = read

    def __get__(self, trainer: Any, owner: Any = None) -> Any:
        if trainer is None:
            return self
        return self._read(trainer)


class TrainerBase:
    """Methods that the loop calls through ``self``, so that you can override them.

    An override of a method that computes or updates something replaces it; the other methods do nothing by default.
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

    preempted = ReplaceableProperty(
        "Whether the last training was saved and left, to be resumed later.", lambda t: t._det_core.preempted
    )
    batch_loss = ReplaceableProperty(
        "The loss of the last batch: a number on a CPU, else a tensor.", lambda t: t._det_core.batch_loss
    )
    updates_completed = ReplaceableProperty(
        "Updates of this run, with those before a resume.", lambda t: t._det_core.run.updates
    )
    steps_completed = ReplaceableProperty("Updates since the trial began: the unit of reports.", lambda t: steps_of(t))
    optimizers = ReplaceableProperty("The optimizers: none, one or several.", lambda t: as_list(t.optimizer))
    schedulers = ReplaceableProperty("The schedulers: none, one or several.", lambda t: as_list(t.scheduler))
    is_main_process = ReplaceableProperty(
        "Whether this is the first of all ranks.", lambda t: t._det_core.strategy.is_main_process
    )
    is_local_main_process = ReplaceableProperty(
        "Whether it is that of its machine.", lambda t: t._det_core.strategy.is_local_main_process
    )

    # Methods to override.

    def training_run_start(self) -> None:
        """Run at the start of a training run."""

    def train_epoch_start(self) -> None:
        """Start a training epoch: put the model into training mode."""
        self.model.train()

    def calculate_train_batch_loss(self, batch: Any) -> dict[str, Any]:
        """Compute the loss of a batch.

        A :class:`StopTrainingError` in an event stops the training on all ranks. In a method of a step, it ends a job
        of several ranks, as the others wait for the rest of the step.

        Returns:
            ``loss`` (a scalar with gradients), ``model_outputs``, ``batch_size``, and further values for callbacks.
        """
        inputs = batch[0]
        targets = batch[1]
        outputs = self.model(inputs)
        return {"loss": self.loss_func(outputs, targets), "model_outputs": outputs, "batch_size": targets.size(0)}

    def backward_step(self, loss: Tensor) -> None:
        """Compute gradients.

        Args:
            loss: loss of the batch, divided by the number of batches in its update.
        """
        self._det_core.strategy.backward(loss)

    def _clip_gradients(self) -> None:
        """Clip gradients by value or by norm before an update, and keep their norm."""
        run = self._det_core.run
        strategy = self._det_core.strategy
        limit = self.run_config.gradient_clip_value
        if limit is not None:
            strategy.clip_value(self.model, limit)
        if run.clip_norm is not None:
            run.norms.append(strategy.clip_norm(self.model, run.clip_norm).detach())

    def optimizer_step(self) -> None:
        """Update the parameters with the current ``self.optimizer``.

        Raises:
            ValueError: If the Trainer has no optimizer.
        """
        session = self._det_core
        optimizer = self.optimizer
        if optimizer is None:
            raise ValueError("training requires an optimizer: this Trainer has none at its first update")
        session.strategy.step(_with_method(optimizer, "step"))
        if not session.run.in_epoch:  # in a user-defined epoch, whose updates the loop does not count
            session.run.updates += 1

    def scheduler_step(self) -> None:
        """Step the scheduler, after an update."""
        for scheduler in as_list(self.scheduler):
            scheduler.step()

    def optimizer_zero_grad(self) -> None:
        """Clear the gradients."""
        self._det_core.strategy.zero_grad(_with_method(self.optimizer, "zero_grad"))

    def train_epoch_end(self) -> None:
        """Run after a training epoch."""

    def eval_epoch_start(self) -> None:
        """Start an evaluation: put the model into evaluation mode."""
        self.model.eval()

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        """Compute the loss of a batch in an evaluation; return values as :meth:`calculate_train_batch_loss`."""
        return TrainerBase.calculate_train_batch_loss(self, batch)

    def eval_epoch_end(self) -> None:
        """Run after an evaluation."""

    def training_run_epoch_end(self) -> None:
        """Run after training and evaluation of an epoch."""

    def training_run_end(self) -> None:
        """Run after a training run."""

    def evaluation_run_start(self) -> None:
        """Run at the start of ``evaluate()``."""

    def evaluation_run_end(self) -> None:
        """Run after ``evaluate()``."""

    def update_metrics(self, metrics: Any, batch: Any, batch_output: Mapping[str, Any]) -> None:
        """Update ``metrics=`` or ``train_metrics=`` with a batch: ``update(outputs, targets)``."""
        outputs = batch_output["model_outputs"]
        if isinstance(outputs, Tensor):
            outputs = outputs.detach()  # metrics may keep it
        for metric in by_name(metrics).values():
            metric.update(outputs, batch[1])

    def _det_core_epoch_done(self) -> None:
        """Run after an epoch, for schedulers that count epochs; independent of overrides."""

    # Methods to call.

    def after_update(self, call: Callable[[], None]) -> None:
        """Call a function between the current update and the next batch; outside of a training epoch, at once."""
        self._det_core.after_update(call)

    def gather(self, tensor: Any, padding_value: float | None = None) -> Any:
        """Return nested tensors of all ranks, concatenated along the first dimension, on every rank.

        Args:
            tensor: a tensor, or nested lists, tuples and dictionaries of tensors.
            padding_value: value that pads tensors to equal lengths; rows of this value are dropped from the result.
                Without it, all tensors must have the same length.
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
        """Print once on each machine, and flush."""
        # The logs of a master show the trial before each line, so leading empty lines are dropped.
        if self._det_core.under_master and args and isinstance(args[0], str):
            args = (args[0].lstrip("\n"), *args[1:])
        with suppress(OSError):  # a reader that has gone does not end a training
            self._accelerator.print(*args, **kwargs)
        write_quietly("", kwargs.get("file") or sys.stdout)

    def get_model(self, keep_torch_compile: bool = True) -> nn.Module:
        """Return the model without its distributed wrapper.

        Args:
            keep_torch_compile: keep the wrapper of ``torch.compile``.
        """
        strategy = self._det_core.strategy
        if keep_torch_compile:
            return strategy.unwrap_model(self.model)
        return strategy.bare(self.model)


def steps_of(trainer: TrainerBase) -> int:
    """Return the number of optimizer updates since the trial began."""
    return trainer._det_core.run.base + trainer._det_core.run.updates


def session_of(trainer: Any) -> Session | None:
    """Return the session of a Trainer, or None for a stand-in, with which users test callbacks."""
    session = getattr(trainer, "_det_core", None)
    if isinstance(session, Session):
        return session
    return None


def after_update(trainer: Any, call: Callable[[], None]) -> None:
    """Call a function after the current update, or at once for a stand-in of a Trainer."""
    session = session_of(trainer)
    if session is None:
        call()
    else:
        session.after_update(call)


def callbacks_of(trainer: TrainerBase) -> list[Any]:
    """Return the callbacks, or none if the handler has no list of them."""
    return list(getattr(trainer.callback_handler, "callbacks", ()))


def by_name(metrics: Any) -> dict[str, Any]:
    """Return metrics by name; the name of a single metric is its class."""
    if metrics is None:
        return {}
    if type(metrics) is dict:
        return metrics
    return {type(metrics).__name__.lower(): metrics}


def as_list(parts: Any) -> list[Any]:
    """Return a list of optimizers or schedulers given as one, a list, a tuple or a dictionary."""
    if parts is None:
        return []
    if isinstance(parts, Mapping):
        return list(parts.values())
    if isinstance(parts, list | tuple):
        return list(parts)
    return [parts]


def _with_method(optimizers: Any, name: str) -> list[Any]:
    """Return a list of optimizers; a user-defined container with this method counts as one."""
    if hasattr(optimizers, name):
        return [optimizers]
    return as_list(optimizers)


def with_param_groups(optimizers: Any) -> list[Any]:
    """Return the optimizers that have parameter groups; stand-ins may have none."""
    return [one for one in as_list(optimizers) if isinstance(getattr(one, "param_groups", None), list)]


def in_container_of(parts: Any, new: Iterable[Any]) -> Any:
    """Return new objects for those of :func:`as_list` in a container like ``parts``."""
    changed = list(new)
    if isinstance(parts, Mapping):
        return dict(zip(parts, changed, strict=True))
    if isinstance(parts, list | tuple):
        return changed
    return next(iter(changed), None)

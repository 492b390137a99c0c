"""Small trainings by the accelerated Trainer, what writes down their order, and the same by plain loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from det_core.accelerated import Trainer
from det_core.accelerated.callbacks import TrainerCallback

METHODS = (
    "training_run_start", "train_epoch_start", "calculate_train_batch_loss", "backward_step", "_clip_gradients",
    "optimizer_step", "scheduler_step", "optimizer_zero_grad", "train_epoch_end", "eval_epoch_start",
    "calculate_eval_batch_loss", "eval_epoch_end", "training_run_epoch_end", "training_run_end",
    "evaluation_run_start", "evaluation_run_end",
)  # fmt: skip
"""The methods of a Trainer that a user overrides."""
EVENTS = tuple(name for name in vars(TrainerCallback) if name.startswith("on_") and name != "on_update")


def rows(number: int = 40, scale: float = 1.0) -> TensorDataset:
    """Return rows of two numbers in and one out, the same at each call."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(number, 2, generator=generator)
    return TensorDataset(
        inputs, scale * (inputs.sum(1, keepdim=True) + 0.1 * torch.randn(number, 1, generator=generator))
    )


def linear() -> nn.Module:
    """Return a model of three weights, the same at each call."""
    torch.manual_seed(3)
    return nn.Linear(2, 1)


def a_trainer(
    cls: type[Trainer] = Trainer, callbacks: Any = (), *, model: Any = None, lr: float = 0.1, **options: Any
) -> Trainer:
    """Return a Trainer with SGD and MSE, and no callbacks unless given.

    Args:
        cls: its class.
        callbacks: classes or instances.
        model: left out, :func:`linear`.
        lr: the learning rate.
        options: more of its arguments; ``optimizer=`` and ``loss_func=`` replace those two.
    """
    model = linear() if model is None else model
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    return cls(model, options.pop("loss_func", nn.functional.mse_loss), optimizer, callbacks, **options)


def train(trainer: Trainer, num_epochs: int = 1, data: Any = None, **options: Any) -> Trainer:
    """Train on 40 rows in batches of 10, without workers, unless the options say otherwise."""
    loader = {"num_workers": 0, **options.pop("train_dataloader_kwargs", {})}
    evaluation = {"num_workers": 0, **options.pop("eval_dataloader_kwargs", {})}
    trainer.train(
        rows() if data is None else data, num_epochs, per_device_batch_size=options.pop("per_device_batch_size", 10),
        train_dataloader_kwargs=loader, eval_dataloader_kwargs=evaluation, **options,
    )  # fmt: skip
    return trainer


def evaluate(trainer: Trainer, data: Any = None) -> Trainer:
    """Evaluate on 40 rows in batches of 10."""
    trainer.evaluate(rows() if data is None else data, per_device_batch_size=10, dataloader_kwargs={"num_workers": 0})
    return trainer


def weights(model: Any) -> list[Tensor]:
    """Return copies of a model's parameters; of a Trainer, its model's."""
    return [p.detach().clone() for p in getattr(model, "model", model).parameters()]


def same(left: Any, right: Any) -> bool:
    """Return whether two models, or Trainers, have bit-equal weights."""
    return all(torch.equal(a, b) for a, b in zip(weights(left), weights(right), strict=True))


# what happens, written down


def _written(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.log.append(name)
        return getattr(super(Recording, self), name)(*args, **kwargs)

    return method


class Recording(Trainer):
    """Recorder of calls to the methods of :data:`METHODS`.

    Attributes:
        log: their names, in order; :class:`Events` adds its own.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.log: list[str] = []
        super().__init__(*args, **kwargs)


for _name in METHODS:
    setattr(Recording, _name, _written(_name))


class Events(TrainerCallback):
    """Recorder of every event, in its trainer's ``log`` where there is one.

    Attributes:
        log: the events' names.
        told: each event's arguments.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.told: list[tuple[str, dict[str, Any]]] = []

    def count(self, event: str) -> int:
        """Return the number of times that an event was fired."""
        return self.log.count(event)


def _heard(name: str) -> Callable[..., None]:
    def event(self: Events, trainer: Any, **kwargs: Any) -> None:
        self.log.append(name)
        self.told.append((name, kwargs))
        if isinstance(trainer, Recording):
            trainer.log.append(name)

    return event


for _name in EVENTS:
    setattr(Events, _name, _heard(_name))


class Scripted(Trainer):
    """A Trainer whose evaluation gives the losses of ``losses``, epoch by epoch."""

    losses: tuple[float, ...] = ()

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        """Replace the loss by that of the epoch."""
        output = super().calculate_eval_batch_loss(batch)
        loss = torch.tensor(self.losses[(self.run_history.current_epoch - 1) % len(self.losses)])
        return {**output, "loss": loss}


def scripted(*losses: float) -> type[Trainer]:
    """Return a class of Trainers whose n-th evaluation has the n-th of these losses."""
    return type("Scripted", (Scripted,), {"losses": losses})

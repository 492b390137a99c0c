"""The steps of a training that a user overrides, as they are by default, and what a Trainer offers beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from det_core.accelerated._strategy import Strategy, nested
from det_core.accelerated.utils import remove_padding

if TYPE_CHECKING:
    from det_core.accelerated._loop import Run


class TrainingSteps:
    """Base of the Trainer: each method here is called through ``self`` by the loop, so an override takes effect.

    An override of one that computes or updates something does so for itself; of the others, the default does nothing.
    """

    model: Any
    loss_func: Any
    optimizer: Any
    scheduler: Any = None
    _eval_metrics: Any
    _train_metrics: Any
    _strategy: Strategy
    _run: Run

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers: none, one or several."""
        return _listed(self.optimizer)

    @property
    def schedulers(self) -> list[Any]:
        """The schedulers: none, one or several."""
        return _listed(self.scheduler)

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
        self._strategy.backward(loss)

    def _clip_gradients(self) -> None:
        """Clip gradients by value or by norm before an update, and note their norm."""
        run, strategy = self._run, self._strategy
        if run.clip_value is not None:
            strategy.clip_value(self.model, self.optimizers, run.clip_value)
        if run.clip_norm is not None:
            run.norms.append(strategy.clip_norm(self.model, self.optimizers, run.clip_norm).detach())

    def optimizer_step(self) -> None:
        """Update the parameters."""
        self._strategy.step(self.optimizers)

    def scheduler_step(self) -> None:
        """Step the scheduler, after an update."""
        if self.scheduler is not None:
            for scheduler in self.schedulers:
                scheduler.step()

    def optimizer_zero_grad(self) -> None:
        """Forget the gradients."""
        self._strategy.zero_grad(self.optimizers)

    def train_epoch_end(self) -> None:
        """A training epoch is over."""

    def eval_epoch_start(self) -> None:
        """An evaluation begins: the model is put into evaluation mode."""
        self.model.eval()

    def calculate_eval_batch_loss(self, batch: Any) -> dict[str, Any]:
        """Compute a batch's loss in an evaluation; returns as :meth:`calculate_train_batch_loss` does."""
        return TrainingSteps.calculate_train_batch_loss(self, batch)

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

    def _move_metrics(self) -> None:
        """Put the modules in ``metrics=`` and ``train_metrics=``, and what they have counted, on the device."""
        for metric in (*named(self._eval_metrics).values(), *named(self._train_metrics).values()):
            if isinstance(metric, nn.Module):
                metric.to(self._strategy.device)

    # at the user's service

    def after_update(self, call: Callable[[], None]) -> None:
        """Call something between the update under way and the next batch; outside of a training epoch, at once."""
        if self._run.in_step:
            self._run.after_update.append(call)
        else:
            call()

    def gather(self, tensor: Any, padding_value: float | None = None) -> Any:
        """Nested tensors of all ranks, concatenated along the first dimension, on every rank.

        Args:
            tensor: a tensor, or lists, tuples and dictionaries of such.
            padding_value: what fills up tensors that are shorter on some ranks; rows of nothing else are dropped from
                the result. Left out, all must be of one length.
        """
        gather = self._strategy.gather
        if padding_value is None:
            return gather(tensor)

        def padded(one: Tensor) -> Tensor:
            longest = int(gather(torch.tensor([len(one)], device=one.device)).max())
            padding = one.new_full((longest - len(one), *one.shape[1:]), padding_value)
            return remove_padding(gather(torch.cat([one, padding])), padding_value)

        return nested(padded, tensor)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print()``, once on each machine."""
        self._strategy.print(*args, **kwargs)

    def get_model(self, keep_torch_compile: bool = True) -> nn.Module:
        """The model without what spreads it over ranks.

        Args:
            keep_torch_compile: whether it stays compiled, if it is.
        """
        return self._strategy.unwrap_model(self.model) if keep_torch_compile else self._strategy.bare(self.model)


def named(metrics: Any) -> dict[str, Any]:
    """What ``metrics=`` or ``train_metrics=`` was given, by name; a metric without one goes by its class."""
    if metrics is None:
        return {}
    return metrics if type(metrics) is dict else {type(metrics).__name__.lower(): metrics}


def _listed(parts: Any) -> list[Any]:
    if parts is None:
        return []
    return list(parts) if isinstance(parts, list | tuple) else [parts]

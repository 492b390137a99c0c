"""The class that a user writes: a model, its data, and how one batch of it is trained and evaluated."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from det_core.errors import InvalidExperimentException
from det_core.pytorch._callback import PyTorchCallback
from det_core.pytorch._context import PyTorchTrialContext
from det_core.pytorch._data import DataLoader, TorchData, data_length
from det_core.pytorch._reducer import Reducer


class Trial(abc.ABC):
    """What trials of every kind may override.

    Attributes:
        code_files: files, folders and patterns below the working directory that checkpoints keep in ``code/`` beside
            the modules that were loaded from there, such as ``["labels.txt", "configs/*.yaml"]``.
    """

    code_files: Sequence[str] = ()

    @abc.abstractmethod
    def build_training_data_loader(self) -> Any:
        """The training data."""

    @abc.abstractmethod
    def build_validation_data_loader(self) -> Any:
        """The validation data."""

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        """Callbacks by name; their states are saved and restored under these names. Called once, on every rank."""
        return {}

    def evaluate_batch(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The validation metrics of one batch, by name."""
        raise InvalidExperimentException(f"{type(self).__name__} does not override evaluate_batch()")

    def evaluation_reducer(self) -> Reducer | Mapping[str, Reducer]:
        """How the metrics of :meth:`evaluate_batch` are reduced: all alike, or by name. The average by default."""
        return Reducer.AVG

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        """The validation metrics of the whole set, by name, as they are to be reported. Called on the chief alone.

        Args:
            data_loader: a ``torch.utils.data.DataLoader`` of the whole set. Its batches are not moved to the device.
        """
        raise InvalidExperimentException(f"{type(self).__name__} does not override evaluate_full_dataset()")


class PyTorchTrial(Trial):
    """A model as a class. Subclass it, and hand an instance to :class:`det_core.pytorch.Trainer`.

    ``__init__`` builds models, optimizers and schedulers, and wraps each of them with the context's ``wrap_model``,
    ``wrap_optimizer`` and ``wrap_lr_scheduler``: what is wrapped is moved to the device, spread over the ranks, saved
    and restored. One of :meth:`evaluate_batch` and :meth:`evaluate_full_dataset` is to be overridden.

    Example:
        ::

            class MyTrial(pytorch.PyTorchTrial):
                def __init__(self, context):
                    self.context = context
                    self.model = context.wrap_model(torch.nn.Linear(4, 1))
                    self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))

                def build_training_data_loader(self):
                    return pytorch.DataLoader(my_dataset, batch_size=32, shuffle=True)

                def train_batch(self, batch, epoch_idx, batch_idx):
                    inputs, labels = batch
                    loss = torch.nn.functional.mse_loss(self.model(inputs), labels)
                    self.context.backward(loss)
                    self.context.step_optimizer(self.optimizer)
                    return {"loss": loss}
    """

    trial_context_class = PyTorchTrialContext

    @abc.abstractmethod
    def __init__(self, context: PyTorchTrialContext) -> None:
        """Build and wrap models, optimizers and learning rate schedulers."""

    @abc.abstractmethod
    def train_batch(self, batch: TorchData, epoch_idx: int, batch_idx: int) -> Any:
        """Train on one batch: forward, ``context.backward(loss)``, ``context.step_optimizer(optimizer)``.

        Args:
            batch: what the training loader gives, on the device.
            epoch_idx: the epoch, from 0: ``batch_idx`` divided by the number of batches that a rank has in one.
            batch_idx: the batch, from 0, counted on one rank since the training began, over all resumes.

        Returns:
            the metrics of this batch by name, the same names for every batch; or the loss alone. Tensors may stay
            on their device.
        """

    @abc.abstractmethod
    def build_training_data_loader(self) -> DataLoader:
        """The training data; called once, on every rank."""

    @abc.abstractmethod
    def build_validation_data_loader(self) -> DataLoader:
        """The validation data; called once, on every rank."""

    def evaluate_batch(self, batch: TorchData, batch_idx: int) -> dict[str, Any]:
        """The validation metrics of one batch, by name; numbers, or tensors of one value.

        What the batches of all ranks give is reduced to one number for each name, as :meth:`evaluation_reducer` says.

        Args:
            batch: what the validation loader gives, on the device.
            batch_idx: the batch, from 0, of this rank in this validation. A method without this parameter is called
                without.
        """
        return super().evaluate_batch(batch)

    def get_batch_length(self, batch: Any) -> int:
        """How many records a batch has; for your own use, nothing depends on it."""
        return data_length(batch)


def overrides(trial: Trial, method: str) -> bool:
    """Whether a trial has a method of its own. Functions are compared, not names: two classes may be called alike."""
    found = getattr(type(trial), method)
    ours = [cls for cls in type(trial).__mro__ if cls.__module__.startswith("det_core.")]
    return all(found is not vars(cls).get(method) for cls in ours)


def takes_batch_idx(trial: Trial) -> bool:
    """Whether ``evaluate_batch`` is to be called with ``batch_idx``: it has that parameter, or more than the batch."""
    parameters = inspect.signature(trial.evaluate_batch).parameters
    positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return "batch_idx" in parameters or len(positional) > 1

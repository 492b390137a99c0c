"""Base classes of user-defined trials: a model, its data, and the training and evaluation of one batch."""

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
    """Methods common to all kinds of trials.

    Attributes:
        code_files: files, directories and patterns below the working directory to keep in checkpoints, in ``code/``
            with the loaded modules, such as ``["labels.txt", "configs/*.yaml"]``.
    """

    code_files: Sequence[str] = ()

    @abc.abstractmethod
    def build_training_data_loader(self) -> Any:
        """Return the training data."""

    @abc.abstractmethod
    def build_validation_data_loader(self) -> Any:
        """Return the validation data."""

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        """Return callbacks by name, under which their states are saved. Called once on every rank."""
        return {}

    def evaluate_batch(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the validation metrics of one batch by name."""
        raise InvalidExperimentException(f"{type(self).__name__} does not override evaluate_batch()")

    def evaluation_reducer(self) -> Reducer | Mapping[str, Reducer]:
        """Return the reducer of all metrics of :meth:`evaluate_batch`, or one by name. Defaults to the average."""
        return Reducer.AVG

    def evaluate_full_dataset(self, data_loader: Any) -> dict[str, Any]:
        """Return the validation metrics of the whole dataset by name. Called on the chief alone.

        Args:
            data_loader: a ``torch.utils.data.DataLoader`` of the whole dataset, whose batches are not moved to the
                device.
        """
        raise InvalidExperimentException(f"{type(self).__name__} does not override evaluate_full_dataset()")


class PyTorchTrial(Trial):
    """A model as a class. Subclass it, and pass an instance to :class:`det_core.pytorch.Trainer`.

    In ``__init__``, build models, optimizers and schedulers, and wrap them with the context's ``wrap_model``,
    ``wrap_optimizer`` and ``wrap_lr_scheduler``. Wrapped objects are moved to the device, distributed over the ranks,
    saved and restored. Override either :meth:`evaluate_batch` or :meth:`evaluate_full_dataset`.

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
            batch: batch of the training loader, on the device.
            epoch_idx: index of the epoch, from 0: ``batch_idx`` divided by the number of a rank's batches in an epoch.
            batch_idx: index of the batch, from 0, counted on one rank over all resumes.

        Returns:
            the metrics of this batch by name, with the same names for every batch; or the loss alone. Tensors may stay
            on their device.
        """

    @abc.abstractmethod
    def build_training_data_loader(self) -> DataLoader:
        """Return the training data. Called once on every rank."""

    @abc.abstractmethod
    def build_validation_data_loader(self) -> DataLoader:
        """Return the validation data. Called once on every rank."""

    def evaluate_batch(self, batch: TorchData, batch_idx: int) -> dict[str, Any]:
        """Return the validation metrics of one batch by name: numbers, or tensors of one value.

        The metrics of all batches on all ranks are reduced by :meth:`evaluation_reducer`.

        Args:
            batch: batch of the validation loader, on the device.
            batch_idx: index of the batch on this rank, from 0. This parameter is optional.
        """
        return super().evaluate_batch(batch)

    def get_batch_length(self, batch: Any) -> int:
        """Return the number of records in a batch, for your own use."""
        return data_length(batch)


def overrides(trial: Trial, method: str) -> bool:
    """Return whether a user-defined class overrides a method."""
    # Functions and not names: a user's class may have the name of ours.
    found = getattr(type(trial), method)
    ours = [cls for cls in type(trial).__mro__ if cls.__module__.startswith("det_core.")]
    return all(found is not vars(cls).get(method) for cls in ours)


def takes_batch_idx(trial: Trial) -> bool:
    """Return whether ``evaluate_batch`` has the parameter ``batch_idx``, or a second positional one."""
    parameters = inspect.signature(trial.evaluate_batch).parameters
    # Trials of old releases have only the batch, under any name.
    positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return "batch_idx" in parameters or len(positional) > 1

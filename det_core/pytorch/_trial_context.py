"""What a trial of any kind is given: what there is to know of the run, reducers, stops, TensorBoard."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from det_core import core
from det_core._optional import is_installed
from det_core._training.devices import to_device
from det_core.errors import InternalException
from det_core.pytorch._reducer import MetricReducer, Reducers

if TYPE_CHECKING:
    from det_core.pytorch._observers import TorchProfiler

logger = logging.getLogger("det_core.pytorch")


class TrialContext:
    """What the contexts of all trials have in common.

    Attributes:
        distributed: the ranks.
        device: where models and batches go.
        models: what was wrapped, in that order.
        profiler: the core's, which samples the machine.
    """

    _init = "pytorch.init"
    _any_loader_call = "context.disable_dataset_reproducibility_checks()"

    def __init__(
        self,
        core_context: core.Context,
        device: torch.device,
        *,
        hparams: Mapping[str, Any] | None = None,
        exp_conf: Mapping[str, Any] | None = None,
        enable_tensorboard_logging: bool = True,
    ) -> None:
        self._core = core_context
        self._hparams = None if hparams is None else dict(hparams)
        self._exp_conf = None if exp_conf is None else dict(exp_conf)
        self._tensorboard = enable_tensorboard_logging
        self.distributed = core_context.distributed
        self.device = device
        self.profiler = core_context.profiler
        self.models: list[nn.Module] = []
        self._reducers = Reducers()
        self._any_loader = False
        self._stop_requested = False
        self._fits = self._batches_before = 0
        """How many were begun, and what those that ended had trained."""
        self._resumed = self._preempted = False
        """Whether the latest checkpoint has found its fit; whether a fit was stopped, to go on later."""
        self._writer: Any = None
        self._torch_profiler: TorchProfiler | None = None
        self._not_moved: set[type] = set()
        self._epoch_len: int | None = None
        self._batch: int | None = None
        self._epoch: int | None = None
        self._global_batch_size: int | None = None
        self._slot_batch_size: int | None = None

    def _evaluating(self) -> AbstractContextManager[Any]:
        """Around a validation, in which ranks may have different numbers of batches."""
        return nullcontext()

    def _check_alike(self, values: Mapping[str, Any]) -> None:
        """Compare what must be the same on every rank, by name; all ranks call it, and raise the same ValueError."""
        everybody = self.distributed.allgather(dict(values))
        for rank, theirs in enumerate(everybody):
            for name, value in theirs.items():
                if value != (chiefs := everybody[0].get(name)):
                    raise ValueError(f"{name}: {value} on rank {rank}, and {chiefs} on rank 0; ranks must be alike")

    def _prepare_new_training(self) -> None:
        """Give all ranks rank 0's models and optimizers, where wrapping has not seen to that."""

    def wrap_reducer(
        self,
        reducer: MetricReducer | Callable[[list[Any]], Any],
        name: str | None = None,
        for_training: bool = True,
        for_validation: bool = True,
    ) -> MetricReducer:
        """Register a reducer of metrics over batches and ranks; returns what is to be updated.

        Args:
            reducer: a MetricReducer; or a function that is given the list of all values that ``update(value)`` was
                called with on any rank, in the order of the data if that is once per batch.
            name: of the metric; left out, the reducer returns a dictionary of metrics.
            for_training: whether it counts for training metrics.
            for_validation: whether it counts for validation metrics.
        """
        return self._reducers.wrap(reducer, name, for_training=for_training, for_validation=for_validation)

    def to_device(self, data: Any) -> Any:
        """``data`` with the tensors and numeric arrays in it moved to the device, containers of their own type."""
        return to_device(data, self.device, self._not_moved)

    # stopping

    def set_stop_requested(self, stop_requested: bool) -> None:
        """Ask for a stop of the whole job, on any rank: all ranks end after the same batch, with a checkpoint.

        ``False`` takes that back, as long as this rank has not finished its batch.
        """
        assert isinstance(stop_requested, bool), f"stop_requested must be a bool, not {type(stop_requested).__name__}"
        self._stop_requested = stop_requested

    def get_stop_requested(self) -> bool:
        """Whether a stop was asked for on this rank."""
        return self._stop_requested

    # where training is

    def current_train_batch(self) -> int:
        """The index of the batch that is trained, as ``train_batch`` is given it."""
        return self._known(self._batch, "current_train_batch")

    def current_train_epoch(self) -> int:
        """The index of the epoch that is trained."""
        return self._known(self._epoch, "current_train_epoch")

    def is_epoch_start(self) -> bool:
        """Whether the batch that is trained is the first of its epoch."""
        batch = self._known(self._batch, "is_epoch_start")
        return batch % self._epoch_len == 0 if self._epoch_len else batch == 0

    def is_epoch_end(self) -> bool:
        """Whether the batch that is trained is the last of its epoch."""
        batch = self._known(self._batch, "is_epoch_end")
        return bool(self._epoch_len) and (batch + 1) % (self._epoch_len or 1) == 0

    def get_initial_batch(self) -> int:
        """How many batches were trained when this process began."""
        return self._core.steps_completed

    @staticmethod
    def _known(value: int | None, method: str) -> int:
        if value is None:
            raise InternalException(f"{method}() was called before training")
        return value

    # what there is to know

    def get_hparams(self) -> dict[str, Any]:
        """The hyperparameters."""
        if self._hparams is None:
            raise ValueError(f"there are no hyperparameters: {self._init}(hparams={{…}})")
        return self._hparams

    def get_hparam(self, name: str) -> Any:
        """The value of one hyperparameter."""
        hparams = self.get_hparams()
        if name not in hparams:
            raise ValueError(f"there is no hyperparameter {name!r}; there are {', '.join(sorted(hparams)) or 'none'}")
        if name == "global_batch_size":
            logger.warning("use context.get_per_slot_batch_size() and get_global_batch_size() instead of this hparam")
        return hparams[name]

    def get_global_batch_size(self) -> int:
        """Records in a batch of all ranks together: the hyperparameter ``global_batch_size``."""
        if self._global_batch_size is None:
            raise ValueError("the hyperparameters have no global_batch_size")
        return self._global_batch_size

    def get_per_slot_batch_size(self) -> int:
        """Records in a batch of one rank."""
        if self._slot_batch_size is None:
            raise ValueError("the hyperparameters have no global_batch_size")
        return self._slot_batch_size

    def get_experiment_config(self) -> dict[str, Any]:
        """The experiment's configuration, or what ``pytorch.init(exp_conf=)`` was given."""
        if self._exp_conf is None:
            raise ValueError(f"there is no experiment configuration: {self._init}(exp_conf={{…}})")
        return self._exp_conf

    def get_data_config(self) -> dict[str, Any]:
        """The ``data`` section of the experiment's configuration."""
        return dict(self.get_experiment_config().get("data") or {})

    def get_experiment_id(self) -> int:
        """The experiment; 0 in a bare run."""
        return 0 if self._core.trial is None else self._core.trial.experiment_id

    def get_trial_id(self) -> int:
        """The trial; 0 in a bare run."""
        return 0 if self._core.trial is None else self._core.trial.trial_id

    def get_trial_seed(self) -> int:
        """The seed of this trial."""
        if self._core.trial is None:
            raise InternalException("get_trial_seed(): a bare run has no seed but those that the script sets")
        return self._core.trial.trial_seed

    @property
    def latest_checkpoint(self) -> str | None:
        """The storage_id of the checkpoint to start from."""
        return self._core.latest_checkpoint

    # TensorBoard and torch's profiler

    def get_tensorboard_path(self) -> Path:
        """The folder for files that TensorBoard reads; they are kept beside the checkpoints."""
        return self._core.train.get_tensorboard_path()

    def get_enable_tensorboard_logging(self) -> bool:
        """Whether metrics are written as TensorBoard events."""
        return self._tensorboard

    def set_enable_tensorboard_logging(self, enable_tensorboard_logging: bool) -> None:
        """Say whether metrics are written as TensorBoard events."""
        assert isinstance(enable_tensorboard_logging, bool), "enable_tensorboard_logging must be a bool"
        self._tensorboard = enable_tensorboard_logging and is_installed("tensorboard")

    def get_tensorboard_writer(self) -> Any:
        """A ``torch.utils.tensorboard.SummaryWriter`` in :meth:`get_tensorboard_path`, made on first use."""
        if self._writer is None:
            from det_core.pytorch._observers import summary_writer

            self._writer = summary_writer(self.get_tensorboard_path())
        return self._writer

    def set_profiler(self, *args: Any, **kwargs: Any) -> None:
        """Profile training by ``torch.profiler.profile(*args, **kwargs)``, stepped after each batch."""
        from det_core.pytorch._observers import TorchProfiler

        self._torch_profiler = TorchProfiler(self.get_tensorboard_path(), args, kwargs)

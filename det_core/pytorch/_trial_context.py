"""Base of the contexts of trials: the run, reducers, stops, TensorBoard."""

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
    """Base class of the contexts of all trials.

    Attributes:
        distributed: the ranks.
        device: device of models and batches.
        models: wrapped models, in order.
        profiler: ``ctx.profiler``, which samples the machine.
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
        self._hparams: dict[str, Any] | None = None
        if hparams is not None:
            self._hparams = dict(hparams)
        self._exp_conf: dict[str, Any] | None = None
        if exp_conf is not None:
            self._exp_conf = dict(exp_conf)
        self._tensorboard = enable_tensorboard_logging
        self.distributed = core_context.distributed
        self.device = device
        self.profiler = core_context.profiler
        self.models: list[nn.Module] = []
        self._reducers = Reducers()
        self._any_loader = False
        self._stop_requested = False
        self._fits = 0
        """Number of fits begun."""
        self._batches_before = 0
        """Batches trained by the fits that ended."""
        self._resumed = False
        """True once the latest checkpoint is used by its fit."""
        self._preempted = False
        """True once a fit was stopped, to be resumed later."""
        self._writer: Any = None
        self._torch_profiler: TorchProfiler | None = None
        self._not_moved: set[type] = set()
        self._epoch_len: int | None = None
        self._batch: int | None = None
        self._epoch: int | None = None
        self._global_batch_size: int | None = None
        self._slot_batch_size: int | None = None

    def _evaluating(self) -> AbstractContextManager[Any]:
        """Return a context manager for validations, in which ranks may have different numbers of batches."""
        return nullcontext()

    def _check_alike(self, values: Mapping[str, Any]) -> None:
        """Raise ValueError on every rank if values differ between ranks; a collective."""
        everybody = self.distributed.allgather(dict(values))
        for rank, theirs in enumerate(everybody):
            for name, value in theirs.items():
                if value != (chiefs := everybody[0].get(name)):
                    raise ValueError(f"ranks differ in {name}: {value} on rank {rank}, {chiefs} on rank 0")

    def _prepare_new_training(self) -> None:
        """Give all ranks the chief's models and optimizers, if wrapping has not."""

    def wrap_reducer(
        self,
        reducer: MetricReducer | Callable[[list[Any]], Any],
        name: str | None = None,
        for_training: bool = True,
        for_validation: bool = True,
    ) -> MetricReducer:
        """Register a reducer of metrics over batches and ranks; return the reducer to update.

        Args:
            reducer: a MetricReducer; or a function of the list of all values passed to ``update(value)`` on any rank,
                in the order of the data if there is one value a batch.
            name: name of the metric. Without it, the reducer returns a dictionary of metrics.
            for_training: use it for training metrics.
            for_validation: use it for validation metrics.
        """
        return self._reducers.wrap(reducer, name, for_training=for_training, for_validation=for_validation)

    def to_device(self, data: Any) -> Any:
        """Return ``data`` with its tensors and numeric arrays moved to the device, in containers of the same types."""
        return to_device(data, self.device, self._not_moved)

    # Stopping.

    def set_stop_requested(self, stop_requested: bool) -> None:
        """Request a stop of the whole job on any rank: all ranks end after the same batch, with a checkpoint.

        ``False`` withdraws the request, until this rank has finished its batch.
        """
        assert isinstance(stop_requested, bool), f"stop_requested must be a bool, not {type(stop_requested).__name__}"
        self._stop_requested = stop_requested

    def get_stop_requested(self) -> bool:
        """Return whether this rank requested a stop."""
        return self._stop_requested

    # Position.

    def current_train_batch(self) -> int:
        """Return the index of the current batch, as in ``train_batch``."""
        return self._known(self._batch, "current_train_batch")

    def current_train_epoch(self) -> int:
        """Return the index of the current epoch."""
        return self._known(self._epoch, "current_train_epoch")

    def is_epoch_start(self) -> bool:
        """Return whether the current batch is the first of its epoch."""
        batch = self._known(self._batch, "is_epoch_start")
        if not self._epoch_len:
            return batch == 0
        return batch % self._epoch_len == 0

    def is_epoch_end(self) -> bool:
        """Return whether the current batch is the last of its epoch."""
        batch = self._known(self._batch, "is_epoch_end")
        return bool(self._epoch_len) and (batch + 1) % (self._epoch_len or 1) == 0

    def get_initial_batch(self) -> int:
        """Return the number of batches trained before this process began."""
        return self._core.steps_completed

    @staticmethod
    def _known(value: int | None, method: str) -> int:
        if value is None:
            raise InternalException(f"{method}() was called before training")
        return value

    # Configuration.

    def get_hparams(self) -> dict[str, Any]:
        """Return the hyperparameters."""
        if self._hparams is None:
            raise ValueError(f"hyperparameters missing: pass {self._init}(hparams={{…}})")
        return self._hparams

    def get_hparam(self, name: str) -> Any:
        """Return the value of a hyperparameter."""
        hparams = self.get_hparams()
        if name not in hparams:
            raise ValueError(f"unknown hyperparameter {name!r}; known: {', '.join(sorted(hparams)) or 'none'}")
        if name == "global_batch_size":
            logger.warning("use context.get_per_slot_batch_size() and get_global_batch_size() instead of this hparam")
        return hparams[name]

    def get_global_batch_size(self) -> int:
        """Return the number of records in a batch of all ranks: the hyperparameter ``global_batch_size``."""
        if self._global_batch_size is None:
            raise ValueError("the hyperparameters have no global_batch_size")
        return self._global_batch_size

    def get_per_slot_batch_size(self) -> int:
        """Return the number of records in a batch of one rank."""
        if self._slot_batch_size is None:
            raise ValueError("the hyperparameters have no global_batch_size")
        return self._slot_batch_size

    def get_experiment_config(self) -> dict[str, Any]:
        """Return the experiment's configuration, or ``pytorch.init(exp_conf=)``."""
        if self._exp_conf is None:
            raise ValueError(f"experiment configuration missing: pass {self._init}(exp_conf={{…}})")
        return self._exp_conf

    def get_data_config(self) -> dict[str, Any]:
        """Return the ``data`` section of the experiment's configuration."""
        return dict(self.get_experiment_config().get("data") or {})

    def get_experiment_id(self) -> int:
        """Return the ID of the experiment; 0 in a bare run."""
        if self._core.trial is None:
            return 0
        return self._core.trial.experiment_id

    def get_trial_id(self) -> int:
        """Return the ID of the trial; 0 in a bare run."""
        if self._core.trial is None:
            return 0
        return self._core.trial.trial_id

    def get_trial_seed(self) -> int:
        """Return the seed of this trial."""
        if self._core.trial is None:
            raise InternalException("get_trial_seed() requires a trial of an experiment: a bare run has no seed")
        return self._core.trial.trial_seed

    @property
    def latest_checkpoint(self) -> str | None:
        """ID of the checkpoint to start from, or None."""
        return self._core.latest_checkpoint

    # TensorBoard and torch's profiler.

    def get_tensorboard_path(self) -> Path:
        """Return the directory of TensorBoard's files, which are stored with the checkpoints."""
        return self._core.train.get_tensorboard_path()

    def get_enable_tensorboard_logging(self) -> bool:
        """Return whether metrics are written as TensorBoard events."""
        return self._tensorboard

    def set_enable_tensorboard_logging(self, enable_tensorboard_logging: bool) -> None:
        """Set whether metrics are written as TensorBoard events."""
        assert isinstance(enable_tensorboard_logging, bool), "enable_tensorboard_logging must be a bool"
        self._tensorboard = enable_tensorboard_logging and is_installed("tensorboard")

    def get_tensorboard_writer(self) -> Any:
        """Return a ``torch.utils.tensorboard.SummaryWriter`` for :meth:`get_tensorboard_path`, made on first use."""
        if self._writer is None:
            from det_core.pytorch._observers import summary_writer

            self._writer = summary_writer(self.get_tensorboard_path())
        return self._writer

    def set_profiler(self, *args: Any, **kwargs: Any) -> None:
        """Profile training with ``torch.profiler.profile(*args, **kwargs)``, stepped after each batch."""
        from det_core.pytorch._observers import TorchProfiler

        self._torch_profiler = TorchProfiler(self.get_tensorboard_path(), args, kwargs)

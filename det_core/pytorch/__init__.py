"""A model as a class: trials, their context, and the Trainer that owns the loop.

Importing this package loads torch, and none of its heavier parts: the profiler, TensorBoard, distributed checkpoints.
"""

from det_core._training.devices import to_device
from det_core.pytorch import samplers
from det_core.pytorch._callback import PyTorchCallback
from det_core.pytorch._context import PyTorchExperimentalContext, PyTorchTrialContext
from det_core.pytorch._data import DataLoader, TorchData, adapt_batch_sampler, data_length
from det_core.pytorch._load import CheckpointLoadContext, load_trial_from_checkpoint_path
from det_core.pytorch._loop import Batch, Epoch, TrainUnit
from det_core.pytorch._lr_scheduler import LRScheduler
from det_core.pytorch._reducer import MetricReducer, Reducer
from det_core.pytorch._trainer import Trainer, init
from det_core.pytorch._trial import PyTorchTrial

__all__ = [
    "Batch",
    "CheckpointLoadContext",
    "DataLoader",
    "Epoch",
    "LRScheduler",
    "MetricReducer",
    "PyTorchCallback",
    "PyTorchExperimentalContext",
    "PyTorchTrial",
    "PyTorchTrialContext",
    "Reducer",
    "TorchData",
    "TrainUnit",
    "Trainer",
    "adapt_batch_sampler",
    "data_length",
    "init",
    "load_trial_from_checkpoint_path",
    "samplers",
    "to_device",
]

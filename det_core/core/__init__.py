"""The Core API: all that a training script touches. Start with :func:`init`."""

from det_core.core._checkpoint import CheckpointContext, DownloadMode
from det_core.core._context import Context
from det_core.core._distributed import DistributedContext
from det_core.core._init import init
from det_core.core._preempt import PreemptContext, PreemptMode
from det_core.core._profiler import ProfilerContext
from det_core.core._searcher import SearcherContext, SearcherMode, SearcherOperation, Unit
from det_core.core._tensorboard_mode import TensorboardMode
from det_core.core._train import EarlyExitReason, TrainContext

__all__ = [
    "CheckpointContext",
    "Context",
    "DistributedContext",
    "DownloadMode",
    "EarlyExitReason",
    "PreemptContext",
    "PreemptMode",
    "ProfilerContext",
    "SearcherContext",
    "SearcherMode",
    "SearcherOperation",
    "TensorboardMode",
    "TrainContext",
    "Unit",
    "init",
]

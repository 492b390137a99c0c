"""Core API: everything that a training script uses. Start with :func:`init`.

Importing this package loads none of its modules; each is loaded when one of its names is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from det_core.core._checkpoint import CheckpointContext, DownloadMode
    from det_core.core._checkpoint._retention import (
        AnyOf,
        KeepBest,
        KeepEvery,
        KeepLatest,
        KeepWithin,
        RetentionPolicy,
    )
    from det_core.core._context import Context, current_context
    from det_core.core._distributed import DistributedContext
    from det_core.core._init import init
    from det_core.core._preemption import PreemptContext, PreemptMode
    from det_core.core._profiler import ProfilerContext
    from det_core.core._random_state import random_state, set_random_state
    from det_core.core._resumable import ResumableLoader, resumable
    from det_core.core._searcher import SearcherContext, SearcherMode, SearcherOperation, Unit
    from det_core.core._tensorboard import TensorboardMode
    from det_core.core._train import EarlyExitReason, TrainContext

__all__ = [
    "AnyOf",
    "CheckpointContext",
    "Context",
    "DistributedContext",
    "DownloadMode",
    "EarlyExitReason",
    "KeepBest",
    "KeepEvery",
    "KeepLatest",
    "KeepWithin",
    "PreemptContext",
    "PreemptMode",
    "ProfilerContext",
    "ResumableLoader",
    "RetentionPolicy",
    "SearcherContext",
    "SearcherMode",
    "SearcherOperation",
    "TensorboardMode",
    "TrainContext",
    "Unit",
    "current_context",
    "init",
    "random_state",
    "resumable",
    "set_random_state",
]

_LAZY_EXPORTS = {
    "AnyOf": "_checkpoint._retention",
    "CheckpointContext": "_checkpoint",
    "Context": "_context",
    "DistributedContext": "_distributed",
    "DownloadMode": "_checkpoint",
    "EarlyExitReason": "_train",
    "KeepBest": "_checkpoint._retention",
    "KeepEvery": "_checkpoint._retention",
    "KeepLatest": "_checkpoint._retention",
    "KeepWithin": "_checkpoint._retention",
    "PreemptContext": "_preemption",
    "PreemptMode": "_preemption",
    "ProfilerContext": "_profiler",
    "ResumableLoader": "_resumable",
    "RetentionPolicy": "_checkpoint._retention",
    "SearcherContext": "_searcher",
    "SearcherMode": "_searcher",
    "SearcherOperation": "_searcher",
    "TensorboardMode": "_tensorboard",
    "TrainContext": "_train",
    "Unit": "_searcher",
    "current_context": "_context",
    "init": "_init",
    "random_state": "_random_state",
    "resumable": "_resumable",
    "set_random_state": "_random_state",
}
"""Module of each name."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY_EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_LAZY_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__]

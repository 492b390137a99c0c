"""Observers of a training, imported on first use: torch's profiler and TensorBoard's writer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from det_core._optional import require


def summary_writer(folder: Path) -> Any:
    """Return a torch ``SummaryWriter`` for a directory.

    Raises:
        MissingExtra: If tensorboard is not installed.
    """
    module = require("torch.utils.tensorboard", extra="tensorboard", purpose="context.get_tensorboard_writer()")
    return module.SummaryWriter(log_dir=str(folder))


class TorchProfiler:
    """A ``torch.profiler.profile`` for a whole fit, whose schedule counts batches.

    Args:
        folder: default directory of traces.
        args, kwargs: arguments of ``torch.profiler.profile``.
    """

    def __init__(self, folder: Path, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        handler = {"on_trace_ready": torch.profiler.tensorboard_trace_handler(str(folder))}
        # The script's own on_trace_ready wins.
        self._profile = torch.profiler.profile(*args, **{**handler, **kwargs})
        self._running = False

    def start(self) -> None:
        """Start profiling, if it has not started."""
        if not self._running:
            self._running = True
            self._profile.start()

    def step(self) -> None:
        """Record the end of a batch."""
        self._profile.step()

    def stop(self) -> None:
        """Stop profiling and write the remaining traces."""
        if self._running:
            self._running = False
            self._profile.stop()

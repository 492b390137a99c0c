"""What watches a training, imported when it is asked for: torch's profiler, a TensorBoard writer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from det_core._optional import require


def summary_writer(folder: Path) -> Any:
    """A ``SummaryWriter`` of torch's in ``folder``; MissingExtra, if tensorboard is not installed."""
    module = require("torch.utils.tensorboard", extra="tensorboard", purpose="context.get_tensorboard_writer()")
    return module.SummaryWriter(log_dir=str(folder))


class TorchProfiler:
    """A ``torch.profiler.profile`` around a whole fit, stepped after each batch, so that its schedule counts batches.
    Traces go into ``folder``, unless the arguments say otherwise, which are torch's."""

    def __init__(self, folder: Path, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        handler = {"on_trace_ready": torch.profiler.tensorboard_trace_handler(str(folder))}
        self._profile = torch.profiler.profile(*args, **{**handler, **kwargs})
        self._running = False

    def start(self) -> None:
        """Begin; again is nothing."""
        if not self._running:
            self._running = True
            self._profile.start()

    def step(self) -> None:
        """A batch is over."""
        self._profile.step()

    def stop(self) -> None:
        """End, and write what is left."""
        if self._running:
            self._running = False
            self._profile.stop()

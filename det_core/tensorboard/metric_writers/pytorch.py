"""``TorchWriter``: a writer for trials that make one of their own."""

from __future__ import annotations

from typing import Any

from det_core import core
from det_core._optional import require


class TorchWriter:
    """Writes into the folder of the context that is open, whose files are kept beside the checkpoints.

    New code asks for ``context.get_tensorboard_writer()``.

    Attributes:
        writer: a ``torch.utils.tensorboard.SummaryWriter``.

    Raises:
        RuntimeError: no context is open: make it within ``pytorch.init()``, in the trial's ``__init__`` say.
        MissingExtra: tensorboard is not installed.
    """

    def __init__(self) -> None:
        context = core.current_context()
        if context is None:
            raise RuntimeError("TorchWriter() needs an open context: make it within pytorch.init() or core.init()")
        module = require("torch.utils.tensorboard", extra="tensorboard", purpose="TorchWriter()")
        self.writer: Any = module.SummaryWriter(log_dir=str(context.train.get_tensorboard_path()))

    def add_scalar(self, name: str, value: Any, step: int) -> None:
        """Write a number."""
        self.writer.add_scalar(name, value, step)

    def reset(self) -> None:
        """Have what is written on disk."""
        self.writer.flush()

    flush = reset

"""A Trainer for ordinary models: ``Trainer(model, loss_func, optimizer).train(dataset, num_epochs)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import det_core
import det_core._training  # before torch is imported: it says how to install it
from det_core._optional import check_installed, require

check_installed("accelerate", extra="accelerate", purpose="the accelerated Trainer")

from det_core.accelerated.trainer import Trainer, TrainerPlaceholderValues  # noqa: E402
from det_core.accelerated.utils import set_seed  # noqa: E402

__version__ = det_core.__version__

__all__ = ["Trainer", "TrainerPlaceholderValues", "__version__", "notebook_launcher", "set_seed"]


def notebook_launcher(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Start a function on several processes out of a notebook: accelerate's own ``notebook_launcher``.

    Args:
        function: trains, in each process.
        args, kwargs: ``args=()``, ``num_processes=None``, ``mixed_precision="no"``, ``use_port="29500"`` and more, as
            accelerate has them.

    Raises:
        MissingExtra: accelerate is not installed.
    """
    accelerate = require("accelerate", extra="accelerate", purpose="starting processes from a notebook")
    accelerate.notebook_launcher(function, *args, **kwargs)

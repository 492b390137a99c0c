"""Trials with DeepSpeed: ZeRO, pipelines and gradient accumulation in the loop of ``det_core.pytorch``.

Importing this package does not import DeepSpeed; :func:`init` does.
"""

from det_core.pytorch.deepspeed._config import overwrite_deepspeed_config
from det_core.pytorch.deepspeed._context import (
    DeepSpeedTrialContext,
    ModelParallelUnit,
    init,
    make_data_parallel_mpu,
    make_deepspeed_mpu,
)
from det_core.pytorch.deepspeed._trainer import Trainer
from det_core.pytorch.deepspeed._trial import DeepSpeedTrial

__all__ = [
    "DeepSpeedTrial",
    "DeepSpeedTrialContext",
    "ModelParallelUnit",
    "Trainer",
    "init",
    "make_data_parallel_mpu",
    "make_deepspeed_mpu",
    "overwrite_deepspeed_config",
]

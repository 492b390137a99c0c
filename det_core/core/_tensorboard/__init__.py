"""TensorBoard's event files: written with the metrics, and kept beside the checkpoints."""

from det_core.core._tensorboard._mode import Tensorboard, TensorboardMode, chosen_mode

__all__ = ["Tensorboard", "TensorboardMode", "chosen_mode"]

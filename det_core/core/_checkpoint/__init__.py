"""Checkpoints as a script sees them: stored and restored by one rank or by all together."""

from det_core.core._checkpoint._cache import CheckpointCache
from det_core.core._checkpoint._context import CheckpointContext
from det_core.core._checkpoint._handle import CheckpointHandle
from det_core.core._checkpoint._mode import DownloadMode
from det_core.core._checkpoint._record import CheckpointRecord

__all__ = ["CheckpointCache", "CheckpointContext", "CheckpointHandle", "CheckpointRecord", "DownloadMode"]

"""Checkpoints as a script sees them: stored and restored by one rank or by all together."""

from det_core.core._checkpoint._commit import CheckpointHandle
from det_core.core._checkpoint._context import CheckpointContext
from det_core.core._checkpoint._events import CheckpointObserver, CheckpointRecord, RunObserver
from det_core.core._checkpoint._reader import DownloadMode
from det_core.core._checkpoint._script_checks import ScriptChecks
from det_core.core._checkpoint._start import StartCheckpoint

__all__ = [
    "CheckpointContext",
    "CheckpointHandle",
    "CheckpointObserver",
    "CheckpointRecord",
    "DownloadMode",
    "RunObserver",
    "ScriptChecks",
    "StartCheckpoint",
]

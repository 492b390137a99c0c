"""Checkpoints as a script sees them: stored and restored by one rank or by all together."""

from det_core.core._checkpoint._commit import CheckpointHandle
from det_core.core._checkpoint._context import CheckpointContext
from det_core.core._checkpoint._events import CheckpointEvents, CheckpointRecord, RunEvents
from det_core.core._checkpoint._reader import DownloadMode
from det_core.core._checkpoint._script_checks import ScriptChecks
from det_core.core._checkpoint._start import StartCheckpoint

__all__ = [
    "CheckpointContext",
    "CheckpointEvents",
    "CheckpointHandle",
    "CheckpointRecord",
    "DownloadMode",
    "RunEvents",
    "ScriptChecks",
    "StartCheckpoint",
]

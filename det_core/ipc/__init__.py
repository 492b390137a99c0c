"""Talk between the ranks of a job: collectives, messages, and who is still alive. Knows nothing of contexts."""

from det_core.ipc._connect import Links, connect
from det_core.ipc._lane import Lane, SoloLane
from det_core.ipc._star import Star

__all__ = ["Lane", "Links", "SoloLane", "Star", "connect"]

"""The seam: who answers a script's questions."""

from det_core.backend._local import LocalBackend
from det_core.backend._protocol import Backend

__all__ = ["Backend", "LocalBackend"]

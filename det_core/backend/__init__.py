"""The seam: who answers a script's questions. What a run under a master needs is in :mod:`det_core.backend.rest`."""

from det_core.backend._local import LocalBackend
from det_core.backend._protocol import Backend

__all__ = ["Backend", "LocalBackend"]

"""The seam between a script and what answers its requests: the run's own journals, or a master."""

from det_core.backend._backend import Backend, LocalBackend

__all__ = ["Backend", "LocalBackend"]

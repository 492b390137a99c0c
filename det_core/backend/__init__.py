"""The seam between a script and what answers its requests; :mod:`det_core.backend.rest` is for runs under a master."""

from det_core.backend._backend import Backend, LocalBackend

__all__ = ["Backend", "LocalBackend"]

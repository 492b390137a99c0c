"""The brain of the master: requests and events in, recorded decisions out."""

from det_core.master.service._service import Service

__all__ = ["Service"]

"""Checkpoints on object stores: one small door per service, and all that is above it in common."""

from det_core.storage._objects._bucket import Bucket, Entry, KeyMissing
from det_core.storage._objects._door import Door
from det_core.storage._objects._store import ObjectStore

__all__ = ["Bucket", "Door", "Entry", "KeyMissing", "ObjectStore"]

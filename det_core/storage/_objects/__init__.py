"""Checkpoints on object stores: one small door per service, and all that is above it in common."""

from det_core.storage._objects._bucket import Bucket, Entry, KeyMissing

__all__ = ["Bucket", "Entry", "KeyMissing"]

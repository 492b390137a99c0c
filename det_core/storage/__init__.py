"""Checkpoint stores: where checkpoints lie, complete or not there. Knows nothing of ranks, journals or backends."""

from det_core.storage._copy import Progress, digests
from det_core.storage._directory import DirectoryStore
from det_core.storage._io import Disk
from det_core.storage._manifest import FileEntry, Header, Manifest
from det_core.storage._names import check_storage_id, folders_of
from det_core.storage._open import open_store
from det_core.storage._owner import Owner, host_identity
from det_core.storage._scan import Listing, Selector, Source, scan
from det_core.storage._store import Staging, Store, StoredCheckpoint

__all__ = [
    "DirectoryStore",
    "Disk",
    "FileEntry",
    "Header",
    "Listing",
    "Manifest",
    "Owner",
    "Progress",
    "Selector",
    "Source",
    "Staging",
    "Store",
    "StoredCheckpoint",
    "check_storage_id",
    "digests",
    "folders_of",
    "host_identity",
    "open_store",
    "scan",
]

"""Checkpoint stores: where checkpoints lie, complete or not there. Knows nothing of ranks, journals or backends."""

from det_core.storage._copy import Progress, digests
from det_core.storage._directory import DirectoryStore
from det_core.storage._draft import Draft
from det_core.storage._io import Disk
from det_core.storage._manifest import FileEntry, Header, Manifest
from det_core.storage._memory import write_memory
from det_core.storage._names import check_storage_id, folders_of
from det_core.storage._open import open_store
from det_core.storage._owner import Owner, host_identity
from det_core.storage._public import public_storage
from det_core.storage._retention import (
    AnyOf,
    Candidate,
    KeepBest,
    KeepEvery,
    KeepLatest,
    KeepNewer,
    RetentionPolicy,
    Verdict,
    check_policy,
    judge,
    plan,
)
from det_core.storage._scan import Listing, Selector, Source, scan
from det_core.storage._snapshot import copy_in, give_back, link_in, take_away
from det_core.storage._store import Staging, Store, StoredCheckpoint

__all__ = [
    "AnyOf",
    "Candidate",
    "DirectoryStore",
    "Disk",
    "Draft",
    "FileEntry",
    "Header",
    "KeepBest",
    "KeepEvery",
    "KeepLatest",
    "KeepNewer",
    "Listing",
    "Manifest",
    "Owner",
    "Progress",
    "RetentionPolicy",
    "Selector",
    "Source",
    "Staging",
    "Store",
    "StoredCheckpoint",
    "Verdict",
    "check_policy",
    "check_storage_id",
    "copy_in",
    "digests",
    "folders_of",
    "give_back",
    "host_identity",
    "judge",
    "link_in",
    "open_store",
    "plan",
    "public_storage",
    "scan",
    "take_away",
    "write_memory",
]

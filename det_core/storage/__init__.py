"""Checkpoint stores: where checkpoints lie, complete or not there. Knows nothing of ranks, journals or backends."""

from det_core.storage._calls import calls_were_left
from det_core.storage._copy import copy_in, digests
from det_core.storage._directory import DirectoryStore
from det_core.storage._files import Disk
from det_core.storage._manifest import FileEntry, Header, Manifest
from det_core.storage._names import check_storage_id, event_files_of_experiment, event_files_of_run, folders_of
from det_core.storage._open import open_store, public_storage
from det_core.storage._owner import Owner, host_identity
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
)
from det_core.storage._scan import Listing, Selector, Source, scan
from det_core.storage._store import Staging, Store, StoredCheckpoint
from det_core.storage._threads import Progress

__all__ = [
    "AnyOf",
    "Candidate",
    "DirectoryStore",
    "Disk",
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
    "calls_were_left",
    "check_policy",
    "check_storage_id",
    "copy_in",
    "digests",
    "event_files_of_experiment",
    "event_files_of_run",
    "folders_of",
    "host_identity",
    "judge",
    "open_store",
    "public_storage",
    "scan",
]

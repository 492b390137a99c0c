"""Checkpoint stores: where complete checkpoints are kept. Independent of ranks, journals and backends."""

from det_core.storage._calls import calls_were_left
from det_core.storage._copy import copy_in, digests, split_files
from det_core.storage._directory import DirectoryStore
from det_core.storage._files import Disk
from det_core.storage._manifest import FileEntry, Header, Manifest
from det_core.storage._names import check_storage_id, event_files_of_experiment, event_files_of_run, parent_folders
from det_core.storage._open import open_store, storage_without_secrets
from det_core.storage._owner import Owner, host_id
from det_core.storage._retention import (
    AnyOf,
    Candidate,
    KeepBest,
    KeepEvery,
    KeepLatest,
    KeepWithin,
    RetentionDecision,
    RetentionPolicy,
    check_policy,
    evaluate,
)
from det_core.storage._scan import Listing, Selector, SourceFile, scan
from det_core.storage._staging import Staging
from det_core.storage._store import Store, StoredCheckpoint
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
    "KeepWithin",
    "Listing",
    "Manifest",
    "Owner",
    "Progress",
    "RetentionDecision",
    "RetentionPolicy",
    "Selector",
    "SourceFile",
    "Staging",
    "Store",
    "StoredCheckpoint",
    "calls_were_left",
    "check_policy",
    "check_storage_id",
    "copy_in",
    "digests",
    "evaluate",
    "event_files_of_experiment",
    "event_files_of_run",
    "host_id",
    "open_store",
    "parent_folders",
    "scan",
    "split_files",
    "storage_without_secrets",
]

"""Tables of the topics that are not yet read as objects."""

from __future__ import annotations

from det_core.master.store.models import Base

METADATA = Base.metadata
EXPERIMENTS = METADATA.tables["experiments"]
TRIALS = METADATA.tables["trials"]
ALLOCATIONS = METADATA.tables["allocations"]
OPERATIONS = METADATA.tables["operations"]
SEARCHER_EVENTS = METADATA.tables["searcher_events"]
TOKENS = METADATA.tables["tokens"]
CONTEXTS = METADATA.tables["contexts"]
STORAGES = METADATA.tables["storages"]
RUN_METADATA = METADATA.tables["run_metadata"]
KEY_VALUES = METADATA.tables["key_values"]
METRICS = METADATA.tables["metrics"]
RECORDS = METADATA.tables["records"]
CHECKPOINTS = METADATA.tables["checkpoints"]
LOGS = METADATA.tables["logs"]

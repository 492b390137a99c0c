"""The store: all that a master must not forget, in SQLite or PostgreSQL, written before it is answered.

A subject is a module of functions that take a Connection first: ``experiments``, ``trials``, ``allocations``,
``operations``, ``searcher_events``, ``ingest``, ``series``, ``validations``, ``checkpoints``, ``logs``, ``tokens``,
``contexts``, ``storages`` and ``key_values``. They are used within a work:
``await store.write(lambda conn: trials.change(conn, 1, restarts=2))``.
"""

# ruff: noqa: E402 - the door first: without the extra, its error says how to install it
from det_core._optional import require

require("sqlalchemy", extra="master", purpose="a master's store")

from det_core.master.store._store import Store
from det_core.master.store.allocations import AllocationRow
from det_core.master.store.checkpoints import CheckpointRow
from det_core.master.store.experiments import ExperimentRow
from det_core.master.store.logs import LogLine, LogRow
from det_core.master.store.models import Base
from det_core.master.store.operations import OperationRow
from det_core.master.store.searcher_events import SearcherEventRow
from det_core.master.store.series import MetricRow
from det_core.master.store.tokens import TokenRow
from det_core.master.store.trials import TrialRow

METADATA = Base.metadata

__all__ = [
    "METADATA",
    "AllocationRow",
    "CheckpointRow",
    "ExperimentRow",
    "LogLine",
    "LogRow",
    "MetricRow",
    "OperationRow",
    "SearcherEventRow",
    "Store",
    "TokenRow",
    "TrialRow",
]

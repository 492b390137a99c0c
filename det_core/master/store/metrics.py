"""Metrics: taken in from journals or one report at a time, read back as series and summaries."""

from det_core.master.store._journaled import Journaled, insert_journal
from det_core.master.store._record_rows import RecordRow, records
from det_core.master.store._reported import report
from det_core.master.store._reports import NO_STEP
from det_core.master.store._series import Cursor, MetricRow, series
from det_core.master.store._tally import KeySummary
from det_core.master.store._validations import (
    Validation,
    best,
    best_validation,
    best_validations,
    groups,
    latest_validation,
    number,
    summaries,
    total_steps,
    validations,
)
from det_core.master.store._writers import REPORTED, SYSTEM

__all__ = [
    "NO_STEP",
    "REPORTED",
    "SYSTEM",
    "Cursor",
    "Journaled",
    "KeySummary",
    "MetricRow",
    "RecordRow",
    "Validation",
    "best",
    "best_validation",
    "best_validations",
    "groups",
    "insert_journal",
    "latest_validation",
    "number",
    "records",
    "report",
    "series",
    "summaries",
    "total_steps",
    "validations",
]

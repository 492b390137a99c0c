"""The journal: the record of a run on local disk, and its readers.

Each process of a run appends to its own file in the run's directory, one JSON object per line. A report that has
returned survives the death of the process; a line that the disk refuses is kept in memory and tried again.
"""

from det_core.journal._cursor import Cursor, Line, open_cursors, rank_cursors
from det_core.journal._devices import PendingValue
from det_core.journal._journal import SUCCESS_OUTCOMES, Journal
from det_core.journal._run_folder import RunFolder, ambiguous_id, lock_run, match_id, match_run_id
from det_core.journal._scan import Record, Row, RunRecord, RunSummary, list_runs, read_run, records_before
from det_core.journal._values import Report

__all__ = [
    "SUCCESS_OUTCOMES",
    "Cursor",
    "Journal",
    "Line",
    "PendingValue",
    "Record",
    "Report",
    "Row",
    "RunFolder",
    "RunRecord",
    "RunSummary",
    "ambiguous_id",
    "list_runs",
    "lock_run",
    "match_id",
    "match_run_id",
    "open_cursors",
    "rank_cursors",
    "read_run",
    "records_before",
]

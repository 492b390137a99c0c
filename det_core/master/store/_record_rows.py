"""The records of journals that are no metrics, read back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from det_core.master.store._reports import RECORDS
from det_core.master.store._rows import is_id, many


@dataclass(frozen=True)
class RecordRow:
    """A record that is no metrics row."""

    trial_id: int
    run_id: int
    restart: int
    rank: int
    seq: int
    kind: str
    time: float
    body: dict[str, Any]


def records(conn: Connection, trial_id: int, *, kind: str | None = None, run_id: int | None = None) -> list[RecordRow]:
    """The records of a trial, by run, restart, rank and sequence number; of one kind or run, if one is named."""
    if not is_id(trial_id):
        return []
    r = RECORDS.c
    statement = select(RECORDS).where(r.trial_id == trial_id)
    if kind is not None:
        statement = statement.where(r.kind == kind)
    if run_id is not None:
        statement = statement.where(r.run_id == run_id)
    return many(conn, statement.order_by(r.run_id, r.restart, r.rank, r.seq), RecordRow)

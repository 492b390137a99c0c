"""Records of journals, as the processes of a trial wrote them: each counts once, however often it arrives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, insert

from det_core.master.store import _writers
from det_core.master.store._record import checked, json_text
from det_core.master.store._reports import METRICS, NO_STEP, RECORDS
from det_core.master.store._rows import insert_new
from det_core.master.store._tally import take_in
from det_core.master.store._writers import Group, Writer

_METRICS, _RECORDS = insert(METRICS), insert(RECORDS)


@dataclass(frozen=True)
class Journaled:
    """What became of a batch.

    Attributes:
        next_seq: the sequence number after the last that is kept of this writer.
        fresh: the records that are no metrics and were not known before, in order.
        metrics: how many of the metrics rows were not known before.
    """

    next_seq: int
    fresh: list[Mapping[str, Any]]
    metrics: int


def insert_journal(
    conn: Connection,
    trial_id: int,
    run_id: int,
    rank: int,
    records: Sequence[Mapping[str, Any]],
    *,
    restart: int = 0,
) -> Journaled:
    """Keep records of one process.

    Args:
        conn: where.
        trial_id: the trial.
        run_id: the run of the trial that wrote them.
        rank: the rank that wrote them, 0 or more.
        records: as they stand in the journal's file, with ``nonfinite`` where a number is not finite. In order, as a
            rule; a record that comes late or again is taken all the same, once.
        restart: the restart that the journal's name says.

    Raises:
        ValueError: a record that is none; the message says which.
    """
    if not (0 <= rank < NO_STEP and 0 <= restart < NO_STEP):
        raise ValueError(f"rank {rank} and restart {restart} must be 0 or more, and below 2**63")
    return _Intake(conn, _writers.load(conn, trial_id, run_id, restart, rank)).take(records)


@dataclass
class _Intake:
    """One batch on its way."""

    conn: Connection
    writer: Writer
    rows: list[dict[str, Any]] = field(default_factory=list)
    others: list[dict[str, Any]] = field(default_factory=list)
    values: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)
    fresh: list[Mapping[str, Any]] = field(default_factory=list)
    news: int = 0

    def take(self, records: Sequence[Mapping[str, Any]]) -> Journaled:
        """Keep the records that are new."""
        writer = self.writer
        for number, record in enumerate(records):
            record = checked(record, number)
            if record["kind"] == "journal":  # a file's first line
                continue
            if record["kind"] == "metrics":
                self._metrics(record)
            else:
                self._other(record)
            writer.next_seq = max(writer.next_seq, record["seq"] + 1)
        self._flush()
        for group, values in self.values.items():
            take_in(writer.groups[group].tallies, values)
        if self.news or self.fresh:
            _writers.save(self.conn, writer)
        return Journaled(writer.next_seq, self.fresh, self.news)

    def _metrics(self, record: Mapping[str, Any]) -> None:
        writer, seq, step, group = self.writer, record["seq"], record["steps_completed"], record["group"]
        metrics, batches = record["metrics"], record.get("batch_metrics")
        plain = "nonfinite" not in record
        row = {
            "trial_id": writer.trial_id,
            "grp": group,
            "step": NO_STEP if step is None else step,
            "run_id": writer.run_id,
            "restart": writer.restart,
            "rank": writer.rank,
            "seq": seq,
            "time": record["time"],
            "metrics": json_text(metrics, plain),
            "batch_metrics": None if batches is None else json_text(batches, plain),
        }
        if seq >= writer.next_seq:
            self.rows.append(row)
        else:
            self._flush()
            if not insert_new(self.conn, METRICS, row):
                return
        self.news += 1
        note(writer, group, seq, step)
        self.values.setdefault(group, []).append(metrics)

    def _other(self, record: Mapping[str, Any]) -> None:
        writer = self.writer
        row = {
            "trial_id": writer.trial_id,
            "run_id": writer.run_id,
            "restart": writer.restart,
            "rank": writer.rank,
            "seq": record["seq"],
            "kind": record["kind"],
            "time": record["time"],
            "body": record["body"],
        }
        if record["seq"] >= writer.next_seq:
            self.others.append(row)
        else:
            self._flush()
            if not insert_new(self.conn, RECORDS, row):
                return
        self.fresh.append(record)
        step = record["body"].get("steps_completed")
        if record["kind"] == "restore" and type(step) is int and 0 <= step < NO_STEP:
            writer.restored = step if writer.restored is None else min(step, writer.restored)

    def _flush(self) -> None:
        if self.rows:
            self.conn.execute(_METRICS, self.rows)
        if self.others:
            self.conn.execute(_RECORDS, self.others)
        self.rows, self.others = [], []


def note(writer: Writer, group: str, seq: int, step: int | None) -> None:
    """A row is new: note what it says of its group."""
    known = writer.groups.get(group)
    if known is None:
        known = writer.groups[group] = Group()
    known.rows += 1
    if step is None:
        return
    if known.first_seq is None or seq < known.first_seq:
        known.first_seq, known.first = seq, step
    if known.high is None or known.low is None:
        known.low = known.high = step
    elif step >= known.high:
        known.high = step
    else:
        known.in_order = False
        known.low = min(known.low, step)

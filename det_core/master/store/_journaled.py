"""Records of journals, as the processes of a trial wrote them: each counts once, however often it arrives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy import Connection, insert

from det_core.master.store import _writers
from det_core.master.store._record import checked, json_text
from det_core.master.store._reports import METRICS, NO_STEP, RECORDS
from det_core.master.store._rows import insert_new
from det_core.master.store._writers import Writer

_COLUMNS = [column.name for column in METRICS.columns]
_INSERT = f"INSERT INTO {METRICS.name} ({', '.join(_COLUMNS)}) VALUES ({{}})"


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
        records: as they stand in the journal's file, with ``nonfinite`` where a number is not finite, or as floats are
            once they are read. In order, as a rule; one that comes late or again is taken all the same, once.
        restart: the restart that the journal's name says.

    Raises:
        ValueError: a record that is none; the message says which.
    """
    if not (0 <= rank < NO_STEP and 0 <= restart < NO_STEP):
        raise ValueError(f"rank {rank} and restart {restart} must be 0 or more, and below 2**63")
    return _Intake(conn, _writers.load(conn, trial_id, run_id, restart, rank)).take(records)


class _Intake:
    """One batch on its way."""

    def __init__(self, conn: Connection, writer: Writer) -> None:
        self._conn, self._writer = conn, writer
        self._rows: list[tuple[Any, ...]] = []
        self._others: list[dict[str, Any]] = []
        self._values: dict[str, list[Mapping[str, Any]]] = {}
        self._fresh: list[Mapping[str, Any]] = []
        self._news = 0

    def take(self, records: Sequence[Mapping[str, Any]]) -> Journaled:
        """Keep the records that are new."""
        writer = self._writer
        for number, given in enumerate(records):
            if self._quick(given):
                continue
            record = checked(given, number)
            if record["kind"] == "journal":  # a file's first line
                continue
            if record["kind"] == "metrics":
                self._careful(record)
            else:
                self._other(record)
            writer.next_seq = max(writer.next_seq, record["seq"] + 1)
        self._flush()
        for group, values in self._values.items():
            writer.groups[group].count(values)
        if self._news or self._fresh:
            _writers.save(self._conn, writer)
        return Journaled(writer.next_seq, self._fresh, self._news)

    def _quick(self, record: Any) -> bool:
        """Keep a row that is as nearly all are; False, and nothing done, where it takes more care."""
        if type(record) is not dict or record.get("kind") != "metrics" or "nonfinite" in record:
            return False
        get, writer = record.get, self._writer
        seq, step, group, time, metrics = get("seq"), get("steps_completed"), get("group"), get("time"), get("metrics")
        if type(seq) is not int or type(step) is not int or type(time) is not float or type(group) is not str:
            return False
        values = self._values.get(group)
        if values is None or type(metrics) is not dict or get("batch_metrics") is not None:
            return False
        known = writer.groups[group]
        if not writer.next_seq <= seq < NO_STEP or known.high is None or not known.high <= step < NO_STEP:
            return False
        try:
            text = orjson.dumps(metrics)
        except TypeError:
            return False
        if b"null" in text:  # which may have been a number that is not finite
            return False
        self._rows.append((*self._who(group, step), seq, time, text.decode(), None))
        values.append(metrics)
        self._news += 1
        known.rows += 1
        known.high = step
        writer.next_seq = seq + 1
        return True

    def _careful(self, record: Mapping[str, Any]) -> None:
        writer, seq, step, group = self._writer, record["seq"], record["steps_completed"], record["group"]
        metrics, batches = record["metrics"], record.get("batch_metrics")
        row = (
            *self._who(group, NO_STEP if step is None else step),
            seq,
            record["time"],
            json_text(metrics),
            None if batches is None else json_text(batches),
        )
        late = seq < writer.next_seq
        if not late:
            self._rows.append(row)
        else:
            self._flush()
            if not insert_new(self._conn, METRICS, dict(zip(_COLUMNS, row, strict=True))):
                return
        self._news += 1
        writer.group(group).note(seq, step, late=late)
        self._values.setdefault(group, []).append(metrics)

    def _who(self, group: str, step: int) -> tuple[Any, ...]:
        writer = self._writer
        return writer.trial_id, group, step, writer.run_id, writer.restart, writer.rank

    def _other(self, record: Mapping[str, Any]) -> None:
        writer = self._writer
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
            self._others.append(row)
        else:
            self._flush()
            if not insert_new(self._conn, RECORDS, row):
                return
        self._fresh.append(record)
        step = record["body"].get("steps_completed")
        if record["kind"] == "restore" and type(step) is int and 0 <= step < NO_STEP:
            writer.restored = step if writer.restored is None else min(step, writer.restored)

    def _flush(self) -> None:
        if self._rows:  # by the driver itself: SQLAlchemy would turn every row over several times
            place = "?" if self._conn.dialect.name == "sqlite" else "%s"
            self._conn.exec_driver_sql(_INSERT.format(", ".join([place] * len(_COLUMNS))), self._rows)
        if self._others:
            self._conn.execute(insert(RECORDS), self._others)
        self._rows, self._others = [], []

"""Intake of what trials report: records of journals and single reports, each counted once.

A batch is checked, then written by one ``INSERT … ON CONFLICT DO NOTHING``. What is derived from it (the next sequence
number, the steps of each group) is a minimum or a maximum, so a record that comes late or again needs no case.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from sqlalchemy import ColumnElement, and_, insert, inspect, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from det_core import _clock
from det_core._json import equal_json, is_number, restore, str_to_nonfinite
from det_core.errors import StoreConflict
from det_core.master.store import _writers, validations
from det_core.master.store._writers import REPORTED, SYSTEM, Writer
from det_core.master.store.models import NO_STEP, Metric, Record, dumps, loads

_COLUMNS = [column.name for column in inspect(Metric).columns]
_INSERT = f"INSERT INTO {Metric.__tablename__} ({', '.join(_COLUMNS)}) VALUES ({{}}) ON CONFLICT DO NOTHING"
_EPOCHS = ("epoch", "epochs")


def insert_journal(
    session: Session,
    trial_id: int,
    run_id: int,
    rank: int,
    records: Sequence[Mapping[str, Any]],
    *,
    restart: int = 0,
) -> int:
    """Store records of one process; return the sequence number after the largest that is stored.

    Args:
        session: Session that writes.
        trial_id: Trial that wrote them.
        run_id: Run of the trial that wrote them.
        rank: Rank that wrote them, 0 or more.
        records: Records as they stand in the journal's file, in any order; those that are stored already are ignored.
        restart: Restart that the journal's name says.

    Raises:
        ValueError: If one of them is not a record; the message says which.
    """
    if not (0 <= rank < NO_STEP and 0 <= restart < NO_STEP):
        raise ValueError(f"rank {rank}, restart {restart}: expected whole numbers from 0 to below 2**63 - 1")
    checked = [_checked(record, index) for index, record in enumerate(records)]
    writer = _writers.load(session, trial_id, run_id, restart, rank)
    starts = writer.starts()
    rows = [_metrics_row(writer, record) for record in checked if record["kind"] == "metrics"]
    # The first line of a file is of the kind "journal".
    others = [_other_row(writer, record) for record in checked if record["kind"] not in ("metrics", "journal")]
    if rows:
        # By the driver itself: SQLAlchemy would convert every row several times.
        conn = session.connection()
        mark = "?" if conn.dialect.name == "sqlite" else "%s"
        conn.exec_driver_sql(_INSERT.format(", ".join([mark] * len(_COLUMNS))), rows)
    if others:
        _insert_records(session, others)
    if rows or others:
        _save(session, writer, starts, rows)
    return writer.next_seq


def report(
    session: Session,
    trial_id: int,
    run_id: int,
    group: str,
    steps_completed: int | None,
    metrics: Mapping[str, Any],
    batch_metrics: Sequence[Mapping[str, Any]] | None = None,
    *,
    time: float | None = None,
) -> bool:
    """Store one report of the contract's route (§5.2), merged with what is stored at its step.

    Keys that this step of this run has already with equal values change nothing, so a repeat is harmless. Samples of
    the machine, and rows without a step, are not merged: a repeat of one has its time and its values.

    Args:
        session: Session that writes.
        trial_id: Trial that reports.
        run_id: Run of the trial that reports.
        group: Metric group.
        steps_completed: Step, or None for a row without one.
        metrics: Values by key; the strings of §2.1 stand for numbers that are not finite.
        batch_metrics: Values per batch.
        time: Seconds since the epoch. Defaults to now.

    Returns:
        Whether it was new.

    Raises:
        ValueError: If group, step or metrics are invalid.
        StoreConflict: If a key has another value already; nothing of the report is stored then.
    """
    if problem := _group_problem(group) or _step_problem(steps_completed):
        raise ValueError(problem)
    values: dict[str, Any] = str_to_nonfinite(dict(metrics))
    batches = None if batch_metrics is None else str_to_nonfinite(list(batch_metrics))
    if invalid := [key for key in _EPOCHS if key in values and not is_number(values[key])]:
        raise ValueError(f"metrics.{invalid[0]}={values[invalid[0]]!r:.80}: expected a number")
    step = NO_STEP if steps_completed is None or group in SYSTEM else steps_completed
    if step == NO_STEP:
        if time is not None and _is_repeated(session, trial_id, run_id, group, time, values):
            return False
    else:
        stored = _stored(session, trial_id, run_id, group, step)
        where = f"trial {trial_id}, group {group}, step {step}"
        values, batches, is_new = _new_values(stored, values, batches, where)
        if not is_new:
            return False
    writer = _writers.load(session, trial_id, run_id, 0, REPORTED)
    record = {
        "group": group,
        "steps_completed": None if step == NO_STEP else step,
        "seq": writer.next_seq,
        "time": _clock.now() if time is None else time,
        "metrics": values,
        "batch_metrics": batches,
    }
    starts = writer.starts()
    row = _metrics_row(writer, record)
    session.connection().execute(insert(Metric), dict(zip(_COLUMNS, row, strict=True)))
    _save(session, writer, starts, [row])
    return True


def _insert_records(session: Session, rows: Sequence[dict[str, Any]]) -> None:
    """Insert the records whose keys are not in the table, by one statement."""
    conn = session.connection()
    insert_into = sqlite.insert if conn.dialect.name == "sqlite" else postgresql.insert
    conn.execute(insert_into(Record).on_conflict_do_nothing(), rows)


def _save(session: Session, writer: Writer, starts: Any, rows: Sequence[tuple[Any, ...]]) -> None:
    """Store a writer, and what follows from its new rows for the trial."""
    _writers.save(session, writer)
    steps = [step for _, _, step, *_ in rows if step != NO_STEP]
    validated = {step for _, group, step, *_ in rows if group == validations.VALIDATION and step != NO_STEP}
    starts_changed = writer.starts() != starts
    if steps or starts_changed:
        highest = max(steps, default=None)
        validations.follow(session, writer, starts_changed=starts_changed, highest=highest, validated=validated)


def _metrics_row(writer: Writer, record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Add a record of metrics to what is known of its writer; return its row."""
    step = NO_STEP if record["steps_completed"] is None else record["steps_completed"]
    batches = record.get("batch_metrics")
    writer.add(record["group"], record["seq"], step)
    return (
        writer.trial_id,
        record["group"],
        step,
        writer.run_id,
        writer.restart,
        writer.rank,
        record["seq"],
        record["time"],
        _to_json(record["metrics"]),
        None if batches is None else _to_json(batches),
    )


def _other_row(writer: Writer, record: Mapping[str, Any]) -> dict[str, Any]:
    """Add a record of another kind to what is known of its writer; return its row."""
    step = record["body"].get("steps_completed")
    if record["kind"] == "restore" and type(step) is int and 0 <= step < NO_STEP:
        writer.add_restore(step)
    writer.next_seq = max(writer.next_seq, record["seq"] + 1)
    return {
        "trial_id": writer.trial_id,
        "run_id": writer.run_id,
        "restart": writer.restart,
        "rank": writer.rank,
        "seq": record["seq"],
        "kind": record["kind"],
        "time": record["time"],
        "body": record["body"],
    }


def _checked(record: Mapping[str, Any], index: int) -> Mapping[str, Any]:
    """Return a record with its numbers that are not finite.

    Raises:
        ValueError: If it is not a record.
    """
    if not isinstance(record, Mapping):
        raise ValueError(f"record {index}: expected an object, got {record!r:.80}")
    problem = _problem(record)
    if problem is not None:
        raise ValueError(f"record {index}: {problem}")
    if "nonfinite" not in record:
        return record
    restored = copy.deepcopy(dict(record))
    if not restore(restored, restored["nonfinite"]):
        raise ValueError(f"record {index}: nonfinite={record['nonfinite']!r:.200}: expected paths to strings")
    return restored


def _problem(record: Mapping[str, Any]) -> str | None:
    """Return what makes this an invalid record, or None."""
    kind = record.get("kind")
    if type(kind) is not str:
        return f"kind={kind!r:.80}: expected a string"
    if kind == "journal":
        return None
    seq = record.get("seq")
    if type(seq) is not int or not 0 <= seq < NO_STEP:
        return f"seq={seq!r:.80}: expected a whole number from 0 to below 2**63 - 1"
    time = record.get("time")
    # A float of more is not exact to a second any more, and a number without an end is not a time.
    if not isinstance(time, float | int) or isinstance(time, bool) or not abs(time) < 2**53:
        return f"time={time!r:.80}: expected seconds since the epoch"
    if kind != "metrics":
        body = record.get("body")
        return None if isinstance(body, dict) else f"body={body!r:.80}: expected an object"
    metrics = record.get("metrics")
    if type(metrics) is not dict:
        return f"metrics={metrics!r:.80}: expected an object"
    batches = record.get("batch_metrics")
    if type(batches) is not list and batches is not None:
        return f"batch_metrics={batches!r:.80}: expected a list"
    if "steps_completed" not in record:
        return "steps_completed is missing"
    return _group_problem(record.get("group")) or _step_problem(record["steps_completed"])


def _group_problem(group: Any) -> str | None:
    """Return why a value cannot name a metric group, or None."""
    if type(group) is str and group and "." not in group and "\0" not in group and _is_encodable(group):
        return None
    return f"group={group!r:.80}: expected a non-empty name without '.'"


def _step_problem(step: Any) -> str | None:
    """Return why a value cannot be a step, or None."""
    if step is None or (type(step) is int and 0 <= step < NO_STEP):
        return None
    return f"steps_completed={step!r:.80}: expected a whole number from 0 to below 2**63 - 1, or null"


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _to_json(value: Any) -> str:
    """Return a value as JSON, by orjson where that writes all of it."""
    try:
        text = orjson.dumps(value)
    except TypeError:  # more than 64 bits, half a surrogate pair
        return dumps(value)
    return dumps(value) if b"null" in text else text.decode()  # orjson writes NaN as null


def _stored(session: Session, trial_id: int, run_id: int, group: str, step: int) -> Sequence[Any]:
    where = _at(trial_id, run_id, group, step)
    order = (Metric.restart, Metric.rank, Metric.seq)
    return session.execute(select(Metric.metrics, Metric.batch_metrics).where(where).order_by(*order)).all()


def _new_values(
    rows: Sequence[Any], values: dict[str, Any], batches: Any, where: str
) -> tuple[dict[str, Any], Any, bool]:
    """Return what of a report is not stored yet, and whether that is anything."""
    known: dict[str, Any] = {}
    for row in rows:
        known = {**loads(row.metrics), **known}
    if changed := [key for key, value in values.items() if key in known and not equal_json(known[key], value)]:
        key = changed[0]
        raise StoreConflict(
            f"{where}: {key} changed from {known[key]!r:.80} to {values[key]!r:.80}: reported values are immutable"
        )
    stored = next((loads(row.batch_metrics) for row in rows if row.batch_metrics is not None), None)
    if batches is not None and stored is not None:
        if not equal_json(stored, batches):
            raise StoreConflict(f"{where}: batch_metrics changed: reported values are immutable")
        batches = None
    new = {key: value for key, value in values.items() if key not in known}
    return new, batches, bool(new) or batches is not None or not rows


def _is_repeated(session: Session, trial_id: int, run_id: int, group: str, time: float, values: dict[str, Any]) -> bool:
    """Return whether the same row without a step was reported before."""
    where = _at(trial_id, run_id, group, NO_STEP)
    same = where & (Metric.restart == 0) & (Metric.rank == REPORTED) & (Metric.time == time)
    return any(equal_json(loads(text), values) for text in session.scalars(select(Metric.metrics).where(same)))


def _at(trial_id: int, run_id: int, group: str, step: int) -> ColumnElement[bool]:
    return and_(Metric.trial_id == trial_id, Metric.grp == group, Metric.step == step, Metric.run_id == run_id)

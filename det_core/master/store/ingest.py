"""Intake of what trials report: records of journals and single reports, each counted once.

A batch is checked, then written by one ``INSERT … ON CONFLICT DO NOTHING``. What is derived from it (the next sequence
number, the steps of each group) is a minimum or a maximum, so a record that comes late or again needs no case.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from det_core import _clock
from det_core._json import equal_json, is_number, restore, str_to_nonfinite
from det_core.errors import StoreConflict
from det_core.master.store import validations
from det_core.master.store.models import NO_STEP, REPORTED, SYSTEM, Metric, Record, Steps, Writer, dumps, loads

_EPOCHS = ("epoch", "epochs")
_Row = tuple[Any, ...]
"""Values of the columns of a row, in their order."""
# Built once: SQLAlchemy takes longer to build it than the database to answer.
_AT_STEP = (
    select(Metric.metrics, Metric.batch_metrics)
    .where(
        Metric.trial_id == bindparam("trial"),
        Metric.grp == bindparam("group"),
        Metric.step == bindparam("step"),
        Metric.run_id == bindparam("run"),
    )
    .order_by(Metric.restart, Metric.rank, Metric.seq)
)


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
    process = (run_id, restart, rank)
    rows: list[_Row] = []
    others: list[_Row] = []
    restored: list[int] = []
    for index, received in enumerate(records):
        record = _checked(received, index)
        kind = record["kind"]
        if kind == "metrics":
            rows.append(_metrics_row(trial_id, process, record))
        elif kind != "journal":  # the first line of a file
            body = record["body"]
            step = body.get("steps_completed")
            if kind == "restore" and type(step) is int and 0 <= step < NO_STEP:
                restored.append(step)
            others.append((trial_id, *process, record["seq"], kind, record["time"], _to_json(body)))
    writer = _writer(session, trial_id, *process)
    _insert(session, Metric, rows)
    _insert(session, Record, others)
    if rows or others:
        writer.next_seq = max(writer.next_seq, *(row[6] + 1 for row in rows), *(other[4] + 1 for other in others))
        _follow(session, writer, rows, restored)
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
    step = None if group in SYSTEM else steps_completed
    place = {"trial": trial_id, "group": group, "step": NO_STEP if step is None else step, "run": run_id}
    if step is not None:
        stored = session.connection().execute(_AT_STEP, place).all()
        where = f"trial {trial_id}, group {group}, step {step}"
        values, batches = _new_values(stored, values, batches, where)
        if stored and not values and batches is None:
            return False
    elif time is not None:
        same = _AT_STEP.where(Metric.rank == REPORTED, Metric.time == time)
        if any(equal_json(loads(row.metrics), values) for row in session.connection().execute(same, place)):
            return False
    process = (run_id, 0, REPORTED)
    writer = _writer(session, trial_id, *process)
    record = {
        "group": group,
        "steps_completed": step,
        "seq": writer.next_seq,
        "time": _clock.now() if time is None else time,
        "metrics": values,
        "batch_metrics": batches,
    }
    rows = [_metrics_row(trial_id, process, record)]
    _insert(session, Metric, rows)
    writer.next_seq += 1
    _follow(session, writer, rows, [])
    return True


def _writer(session: Session, trial_id: int, run_id: int, restart: int, rank: int) -> Writer:
    """Return the stored writer, or a new one."""
    writer = session.get(Writer, (trial_id, run_id, restart, rank))
    if writer is None:
        writer = Writer(trial_id=trial_id, run_id=run_id, restart=restart, rank=rank)
        session.add(writer)
    return writer


def _metrics_row(trial_id: int, process: tuple[int, int, int], record: Mapping[str, Any]) -> _Row:
    step = record["steps_completed"]
    batches = record.get("batch_metrics")
    return (
        trial_id,
        record["group"],
        NO_STEP if step is None else step,
        *process,
        record["seq"],
        record["time"],
        _to_json(record["metrics"]),
        None if batches is None else _to_json(batches),
    )


def _insert(session: Session, kind: type[Metric] | type[Record], rows: Sequence[_Row]) -> None:
    """Insert the rows whose keys are not in the table, by one statement."""
    if not rows:
        return
    conn = session.connection()
    columns = [column.name for column in kind.__table__.columns]
    marks = ["?" if conn.dialect.name == "sqlite" else "%s"] * len(columns)
    # By the driver itself: SQLAlchemy would convert every row several times.
    conn.exec_driver_sql(
        f"INSERT INTO {kind.__tablename__} ({', '.join(columns)}) VALUES ({', '.join(marks)}) ON CONFLICT DO NOTHING",
        list(rows),
    )


def _follow(session: Session, writer: Writer, rows: Sequence[_Row], restored: Sequence[int]) -> None:
    """Note what a writer has reported, and what follows from that for the trial."""
    starts = _starts(writer)
    pairs: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for _, group, step, _, _, _, seq, *_ in rows:
        pairs[group].append((seq, step))
    known = writer.steps
    groups = dict(writer.groups)
    for group, reported in pairs.items():
        steps = Steps.of(reported)
        if steps is not None:
            groups[group] = list(steps.merged(known.get(group, steps)))
        else:
            groups.setdefault(group, [None, None, None, None])
    writer.groups = groups
    if restored:
        writer.restored = min(restored if writer.restored is None else [writer.restored, *restored])
    reported_steps = {step for _, _, step, *_ in rows if step != NO_STEP}
    validated = {step for _, group, step, *_ in rows if group == validations.VALIDATION and step != NO_STEP}
    starts_changed = _starts(writer) != starts
    if reported_steps or starts_changed:
        validations.follow(session, writer, reported_steps, validated, starts_changed=starts_changed)


def _starts(writer: Writer) -> Any:
    """Return all that says which rows of earlier attempts a writer supersedes, to compare."""
    return writer.restored, {name: (steps.first, steps.low) for name, steps in writer.steps.items()}


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
    if not _is_text(kind):
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
    if group and _is_text(group) and "." not in group:
        return None
    return f"group={group!r:.80}: expected a non-empty name without '.'"


def _step_problem(step: Any) -> str | None:
    """Return why a value cannot be a step, or None."""
    if step is None or (type(step) is int and 0 <= step < NO_STEP):
        return None
    return f"steps_completed={step!r:.80}: expected a whole number from 0 to below 2**63 - 1, or null"


def _is_text(value: Any) -> bool:
    """Return whether a value is text that both databases can hold: no NUL, no half of a surrogate pair."""
    if type(value) is not str or "\0" in value:
        return False
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)


def _to_json(value: Any) -> str:
    """Return a value as JSON, by orjson where that writes all of it."""
    try:
        text = orjson.dumps(value)
    except TypeError:  # more than 64 bits, half a surrogate pair
        return dumps(value)
    return dumps(value) if b"null" in text else text.decode()  # orjson writes NaN as null


def _new_values(rows: Sequence[Any], values: dict[str, Any], batches: Any, where: str) -> tuple[dict[str, Any], Any]:
    """Return the values and the batch metrics of a report that are not stored yet."""
    known: dict[str, Any] = {}
    for row in rows:
        known = {**loads(row.metrics), **known}
    for key, value in values.items():
        if key in known and not equal_json(known[key], value):
            raise StoreConflict(
                f"{where}: {key} changed from {known[key]!r:.80} to {value!r:.80}: reported values are immutable"
            )
    stored = next((loads(row.batch_metrics) for row in rows if row.batch_metrics is not None), None)
    if batches is not None and stored is not None:
        if not equal_json(stored, batches):
            raise StoreConflict(f"{where}: batch_metrics changed: reported values are immutable")
        batches = None
    return {key: value for key, value in values.items() if key not in known}, batches

"""Metrics by the contract's route (§5.2): one report at a time, merged with what stands at its step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, insert, select

from det_core import _clock
from det_core._json import equal_json, is_number, str_to_nonfinite
from det_core.errors import StoreConflict
from det_core.master.store import _writers
from det_core.master.store._record import group_trouble, step_trouble
from det_core.master.store._reports import METRICS, NO_STEP
from det_core.master.store._types import dumps, loads
from det_core.master.store._writers import REPORTED, SYSTEM

_EPOCHS = ("epoch", "epochs")


def report(
    conn: Connection,
    trial_id: int,
    run_id: int,
    group: str,
    steps_completed: int | None,
    metrics: Mapping[str, Any],
    batch_metrics: Sequence[Mapping[str, Any]] | None = None,
    *,
    time: float | None = None,
) -> bool:
    """Keep one report.

    Keys that stand at this step in this run with equal values change nothing, so a repeat is harmless. Samples of
    the machine, and rows without a step, are not merged: of them a repeat is known by its time.

    Args:
        conn: where.
        trial_id: the trial.
        run_id: the trial's run that reports.
        group: the metric group.
        steps_completed: the step; None for a row that belongs to none.
        metrics: values by key; the strings of §2.1 stand for numbers that are not finite.
        batch_metrics: values per batch.
        time: seconds since the epoch; None: now.

    Returns:
        Whether it is news.

    Raises:
        ValueError: no usable group, step or metrics.
        StoreConflict: a key has another value already; nothing of the report is kept.
    """
    if trouble := group_trouble(group) or step_trouble(steps_completed):
        raise ValueError(trouble)
    values: dict[str, Any] = str_to_nonfinite(dict(metrics))
    batches = None if batch_metrics is None else str_to_nonfinite(list(batch_metrics))
    if wrong := [key for key in _EPOCHS if key in values and not is_number(values[key])]:
        raise ValueError(f"metrics: {wrong[0]} must be a number, not {values[wrong[0]]!r:.80}")
    step = NO_STEP if steps_completed is None or group in SYSTEM else steps_completed
    if step == NO_STEP:
        if time is not None and _sampled(conn, trial_id, run_id, group, time, values):
            return False
    else:
        where = f"trial {trial_id}, group {group}, step {step}"
        values, batches, is_news = _unknown(_standing(conn, trial_id, run_id, group, step), values, batches, where)
        if not is_news:
            return False
    _add(conn, trial_id, run_id, group, step, values, batches, _clock.now() if time is None else time)
    return True


def _add(
    conn: Connection,
    trial_id: int,
    run_id: int,
    group: str,
    step: int,
    values: dict[str, Any],
    batches: Any,
    time: float,
) -> None:
    writer = _writers.load(conn, trial_id, run_id, 0, REPORTED)
    row = {
        "trial_id": trial_id,
        "grp": group,
        "step": step,
        "run_id": run_id,
        "restart": 0,
        "rank": REPORTED,
        "seq": writer.next_seq,
        "time": time,
        "metrics": dumps(values),
        "batch_metrics": None if batches is None else dumps(batches),
    }
    conn.execute(insert(METRICS), row)
    known = writer.group(group)
    known.note(writer.next_seq, None if step == NO_STEP else step)
    known.count([values])
    writer.next_seq += 1
    _writers.save(conn, writer)


def _standing(conn: Connection, trial_id: int, run_id: int, group: str, step: int) -> Sequence[Any]:
    m = METRICS.c
    where = (m.trial_id == trial_id) & (m.grp == group) & (m.step == step) & (m.run_id == run_id)
    return conn.execute(select(m.metrics, m.batch_metrics).where(where).order_by(m.restart, m.rank, m.seq)).all()


def _unknown(rows: Sequence[Any], values: dict[str, Any], batches: Any, where: str) -> tuple[dict[str, Any], Any, bool]:
    """What of a report does not stand yet, and whether that is anything at all."""
    known: dict[str, Any] = {}
    for row in rows:
        known = {**loads(row.metrics), **known}
    if wrong := [key for key, value in values.items() if key in known and not equal_json(known[key], value)]:
        key = wrong[0]
        raise StoreConflict(
            f"{where}: {key} was reported as {known[key]!r:.80} already, and cannot become {values[key]!r:.80}"
        )
    standing = next((loads(row.batch_metrics) for row in rows if row.batch_metrics is not None), None)
    if batches is not None and standing is not None:
        if not equal_json(standing, batches):
            raise StoreConflict(f"{where}: other batch metrics were reported already, and cannot be overwritten")
        batches = None
    new = {key: value for key, value in values.items() if key not in known}
    return new, batches, bool(new) or batches is not None or not rows


def _sampled(conn: Connection, trial_id: int, run_id: int, group: str, time: float, values: dict[str, Any]) -> bool:
    """Whether the very same row without a step was reported before."""
    m = METRICS.c
    where = (m.trial_id == trial_id) & (m.grp == group) & (m.step == NO_STEP) & (m.run_id == run_id)
    mine = where & (m.restart == 0) & (m.rank == REPORTED) & (m.time == time)
    return any(equal_json(loads(text), values) for text in conn.execute(select(m.metrics).where(mine)).scalars())

"""What was measured of trials: their last and best validations, their steps, summaries of their groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from typing import Any

from sqlalchemy import Connection, select

from det_core._json import is_number
from det_core.master.store import _writers
from det_core.master.store._schema import TRIALS
from det_core.master.store._series import MetricRow, Query, steps
from det_core.master.store._tally import KeySummary, Tally, summary, take_in
from det_core.master.store._visible import Visible
from det_core.master.store._writers import Writer

VALIDATION = "validation"


@dataclass(frozen=True)
class Validation:
    """A validation of a trial, and the value of one metric in it."""

    trial_id: int
    value: float
    row: MetricRow


def number(metrics: Mapping[str, Any], name: str) -> float | None:
    """The number of that name, or on that dotted path; None where there is none."""
    found: Any = metrics.get(name)
    if found is None and "." in name:
        found = metrics
        for part in name.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
    return float(found) if is_number(found) else None


def latest_validation(conn: Connection, trial_id: int, metric: str | None = None) -> MetricRow | None:
    """The validation of the largest step that counts, and that has ``metric`` if one is named."""
    query = Query(trial_id, VALIDATION, Visible(_writers.of_trial(conn, trial_id)))
    for (row,) in steps(conn, query, newest_first=True):
        if metric is None or number(row.metrics, metric) is not None:
            return row
    return None


def validations(conn: Connection, trial_id: int, metric: str) -> list[Validation]:
    """The validations of a trial that count and have ``metric``, by step."""
    return _validations(conn, trial_id, metric, _writers.of_trial(conn, trial_id))


def best_validation(
    conn: Connection, trial_id: int, metric: str, *, smaller_is_better: bool = True
) -> Validation | None:
    """The best of a trial's validations, the earliest of equals; NaN is the worst."""
    return best(validations(conn, trial_id, metric), smaller_is_better=smaller_is_better)


def best_validations(
    conn: Connection, experiment_id: int, metric: str, *, smaller_is_better: bool = True
) -> dict[int, Validation]:
    """Trial -> the best of its validations, for the trials of an experiment that have any."""
    trials = conn.execute(select(TRIALS.c.id).where(TRIALS.c.experiment_id == experiment_id)).scalars().all()
    found = {}
    for trial_id, writers in _writers.of_trials(conn, trials).items():
        if any(VALIDATION in writer.groups for writer in writers):
            of_trial = _validations(conn, trial_id, metric, writers)
            if (one := best(of_trial, smaller_is_better=smaller_is_better)) is not None:
                found[trial_id] = one
    return found


def best(found: Iterable[Validation], *, smaller_is_better: bool = True) -> Validation | None:
    """The best of some validations, the first of equals; NaN is the worst."""
    sign = 1.0 if smaller_is_better else -1.0
    return min(found, key=lambda v: (isnan(v.value), 0.0 if isnan(v.value) else sign * v.value), default=None)


def total_steps(conn: Connection, trial_ids: Sequence[int]) -> dict[int, int]:
    """Trial -> the largest step it has reported or gone back to; 0 where it has reported none."""
    return {trial: _total(writers) for trial, writers in _writers.of_trials(conn, trial_ids).items()}


def summaries(conn: Connection, trial_ids: Sequence[int]) -> dict[int, dict[str, dict[str, KeySummary]]]:
    """Trial -> group -> key -> the summary of its numbers, of rows that count."""
    return {trial: _summaries(conn, trial, writers) for trial, writers in _writers.of_trials(conn, trial_ids).items()}


def groups(conn: Connection, trial_id: int) -> list[str]:
    """The names of a trial's metric groups, sorted."""
    return sorted({name for writer in _writers.of_trial(conn, trial_id) for name in writer.groups})


def _validations(conn: Connection, trial_id: int, metric: str, writers: Sequence[Writer]) -> list[Validation]:
    query = Query(trial_id, VALIDATION, Visible(writers))
    return [
        Validation(trial_id, value, row)
        for rows in steps(conn, query)
        for row in rows
        if row.steps_completed is not None and (value := number(row.metrics, metric)) is not None
    ]


def _total(writers: Sequence[Writer]) -> int:
    visible = Visible(writers)
    return max(
        (
            min(group.high, visible.beyond(name, writer.attempt) - 1)
            for writer in writers
            for name, group in writer.groups.items()
            if group.high is not None
        ),
        default=0,
    )


def _summaries(conn: Connection, trial_id: int, writers: Sequence[Writer]) -> dict[str, dict[str, KeySummary]]:
    found: dict[str, dict[str, KeySummary]] = {}
    for name in sorted({name for writer in writers for name in writer.groups}):
        mine = [writer.groups[name] for writer in writers if name in writer.groups]
        tallies: dict[str, Tally] = {}
        if len(mine) == 1 and mine[0].in_order and _last(writers, name):
            tallies = mine[0].tallies
        else:  # something may be superseded, or said by several ranks: count the rows themselves
            for rows in steps(conn, Query(trial_id, name, Visible(writers))):
                take_in(tallies, [row.metrics for row in rows])
        found[name] = summary(tallies)
    return found


def _last(writers: Sequence[Writer], name: str) -> bool:
    """Whether nothing can have superseded a row of the one writer of a group."""
    visible = Visible(writers)
    return all(
        (high := writer.groups[name].high) is None or high < visible.beyond(name, writer.attempt)
        for writer in writers
        if name in writer.groups
    )
